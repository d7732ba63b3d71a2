"""The cache gives what the target would give, is reused only when whole, and is refused in time."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.data.packing import Pack
from draftline.data.tokens import Sample
from draftline.errors import ConfigError
from draftline.model.target import Target
from draftline.train import features as module
from draftline.train.features import FeatureSource, feature_size
from tests.tiny import build_samples, build_target

LENGTHS = (9, 30, 4, 17, 4, 25, 1)
PACKS = [Pack((1, 3), 47), Pack((0, 2, 4, 5), 42), Pack((6,), 1), Pack((5, 0), 34)]
BUDGET = 48


def quiet(_done: int, _total: int) -> None:
    pass


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return build_samples(LENGTHS)


def source(target: Target, *, last_hidden: bool = True, **changes: int) -> FeatureSource:
    values: dict[str, int] = {"batch_tokens": 64, "most": 3} | changes
    return FeatureSource(target, last_hidden=last_hidden, **values)


def alone(target: Target, sample: Sample) -> tuple[Tensor, Tensor]:
    """Features of one sample by itself, from the entries Hugging Face calls hidden_states."""
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    output = target._model(input_ids=ids, output_hidden_states=True, use_cache=False)
    taps = torch.cat([output.hidden_states[t + 1][0] for t in target.taps], -1)
    return taps, output.hidden_states[-1][0]


def check(built: FeatureSource, target: Target, samples: list[Sample]) -> None:
    for pack in PACKS:
        features, last = built.pack(samples, pack, BUDGET)
        assert features.shape == (BUDGET, 2 * target.hidden_size)
        assert last is not None
        begin = 0
        for member in pack.members:
            taps, final = alone(target, samples[member])
            span = slice(begin, begin + len(taps))
            torch.testing.assert_close(features[span], taps, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last[span], final, rtol=1e-4, atol=1e-4)
            begin += len(taps)
        assert begin == pack.tokens
        assert not features[begin:].any()
        assert not last[begin:].any()


@torch.no_grad()
def test_online_features_are_the_targets_own_whatever_the_batches(
    target: Target, samples: list[Sample]
) -> None:
    for batch_tokens, most in ((1, 8), (64, 1), (64, 8), (1000, 100)):
        check(source(target, batch_tokens=batch_tokens, most=most), target, samples)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_cache_equals_online(
    target: Target, samples: list[Sample], kind: str, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    cached = source(target)
    folder = tmp_path / "deep" / "cache" if kind == "disk" else None
    cached.fill(samples, folder, "key", lambda done, total: seen.append((done, total)))
    check(cached, target, samples)
    online = source(target)
    for pack in PACKS:
        for mine, theirs in zip(
            cached.pack(samples, pack, BUDGET), online.pack(samples, pack, BUDGET), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert seen[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_without_the_last_hidden_state_only_the_trunk_runs(
    target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    plain = Target.features

    def counted(self: Target, ids: Tensor, *, last_hidden: bool = False) -> Any:
        calls.append(last_hidden)
        return plain(self, ids, last_hidden=last_hidden)

    monkeypatch.setattr(Target, "features", counted)
    lean = source(target, last_hidden=False)
    features, last = lean.pack(samples, PACKS[1], BUDGET)
    assert last is None
    assert set(calls) == {False}
    assert lean.width == features.shape[1] == 2 * target.hidden_size
    full, _ = source(target).pack(samples, PACKS[1], BUDGET)
    torch.testing.assert_close(features, full, rtol=1e-4, atol=1e-4)


def test_a_finished_file_is_taken_as_it_is(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = source(target)
    first.fill(samples, tmp_path, "one", quiet)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the target ran although the cache is there")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "features", forbidden)
        second = source(target)
        second.fill(samples, tmp_path, "one", quiet)
        for pack in PACKS:
            for mine, theirs in zip(
                first.pack(samples, pack, BUDGET), second.pack(samples, pack, BUDGET), strict=True
            ):
                assert mine is not None
                assert torch.equal(mine, theirs)
        with pytest.raises(AssertionError, match="target ran"):
            source(target).fill(samples, tmp_path, "another", quiet)


@pytest.mark.parametrize("damage", ["interrupted", "cut", "cut and interrupted"])
def test_an_unfinished_file_is_filled_anew(
    target: Target, samples: list[Sample], tmp_path: Path, damage: str
) -> None:
    if "cut" in damage:
        source(target).fill(samples, tmp_path, "k", quiet)
        with (tmp_path / "features-k.bin").open("r+b") as file:
            file.truncate(100)
    if "interrupted" in damage:

        def killed(done: int, _total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            source(target).fill(samples, tmp_path, "k", killed)
    again = source(target)
    again.fill(samples, tmp_path, "k", quiet)
    with torch.no_grad():
        check(again, target, samples)


def test_the_remains_of_an_interrupted_fill_count_as_free_space(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt reserved the disk; the second one may use that space."""
    size = feature_size(target, sum(LENGTHS), last_hidden=True)
    usage = namedtuple("usage", "total used free")

    def disk(folder: Path) -> Any:
        used = sum(f.stat().st_size for f in Path(folder).iterdir())
        capacity = int(1.5 * size.bytes)
        return usage(capacity, used, capacity - used)

    monkeypatch.setattr(shutil, "disk_usage", disk)
    path = tmp_path / "features-k.bin"
    path.write_bytes(bytes(size.bytes))
    source(target).fill(samples, tmp_path, "k", quiet)
    assert (tmp_path / "features-k.done").exists()


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_too_large_a_cache_is_refused_before_it_is_allocated(
    target: Target,
    samples: list[Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    size = feature_size(target, sum(LENGTHS), last_hidden=True)
    usage = namedtuple("usage", "total used free")
    free = int(size.bytes / 0.95)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
    monkeypatch.setattr(module, "_free_memory", lambda: free)
    folder = tmp_path if kind == "disk" else None
    with pytest.raises(ConfigError, match=rf"{sum(LENGTHS)} tokens x 96 channels.*{kind}"):
        source(target).fill(samples, folder, "k", quiet)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_those_of_the_file(target: Target, samples: list[Sample], tmp_path: Path) -> None:
    for last_hidden in (False, True):
        size = feature_size(target, sum(LENGTHS), last_hidden=last_hidden)
        built = source(target, last_hidden=last_hidden)
        built.fill(samples, tmp_path, str(last_hidden), quiet)
        assert size.width == built.width
        assert size.bytes == (tmp_path / f"features-{last_hidden}.bin").stat().st_size
    assert size.gib == size.bytes / 2**30


def test_the_scale_is_measured_without_the_first_positions(
    target: Target, samples: list[Sample]
) -> None:
    measured = source(target).measure(samples)
    with torch.no_grad():
        wanted = torch.cat([alone(target, sample)[0][1:] for sample in samples])
    torch.testing.assert_close(measured, wanted, rtol=1e-4, atol=1e-4)


def test_batches_stay_within_their_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 200).tolist()
    groups = module._batches(lengths, 256, 7)
    assert sorted(i for group in groups for i in group) == list(range(200))
    for group in groups:
        assert len(group) <= 7
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 256
    assert module._batches([300, 2], 256, 7) == [[0], [1]]
