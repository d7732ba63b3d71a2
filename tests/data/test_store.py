"""Samples in flat arrays: what is asked for is what went in, from memory and from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.data.store import Sample, Samples, token_lengths


def rows(*lengths: int) -> list[Sample]:
    return [
        Sample(f"s{i}", np.arange(n, dtype=np.int32) + 10 * i, np.arange(n) % 2 == i % 2, i == 1)
        for i, n in enumerate(lengths)
    ]


def same(a: Sample, b: Sample) -> bool:
    return (
        (a.id, a.truncated) == (b.id, b.truncated)
        and np.array_equal(a.input_ids, b.input_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and a.input_ids.dtype == b.input_ids.dtype == np.int32
    )


def test_samples_come_back_as_they_went_in() -> None:
    given = rows(3, 1, 7)
    stored = Samples.of(given)
    assert len(stored) == 3
    assert all(same(a, b) for a, b in zip(stored, given, strict=True))
    assert same(stored[-1], given[-1])
    assert stored.lengths.tolist() == token_lengths(given) == token_lengths(stored) == [3, 1, 7]
    with pytest.raises(IndexError):
        stored[3]


def test_some_samples_keep_their_order_and_share_the_arrays() -> None:
    given = rows(3, 1, 7, 2)
    stored = Samples.of(given)
    some = stored.take([3, 0, 2])
    assert [s.id for s in some] == ["s3", "s0", "s2"]
    assert [s.id for s in some[1:]] == ["s0", "s2"]
    assert [s.id for s in some.take([2])] == ["s2"]
    assert some.lengths.tolist() == [2, 3, 7]
    assert np.shares_memory(some[1].input_ids, stored[0].input_ids)
    assert len(stored.take([])) == len(Samples.of([])) == 0
    assert Samples.of([]).lengths.tolist() == []


def test_the_arrays_may_be_files(tmp_path: Path) -> None:
    given = rows(3, 1, 7)
    for name, array in {
        "ids": np.concatenate([row.input_ids for row in given]),
        "mask": np.concatenate([row.loss_mask for row in given]),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
    ids, mask = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("ids", "mask"))
    stored = Samples(
        ids, mask, np.array([0, 3, 4, 11]), ["s0", "s1", "s2"], np.array([False, True, False])
    )
    assert all(same(a, b) for a, b in zip(stored, given, strict=True))
    assert np.shares_memory(stored[2].input_ids, ids)
