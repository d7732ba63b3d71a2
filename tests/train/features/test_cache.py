"""The cache gives what the target would give, is reused only when whole, and is refused in time."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.batches import derive_table
from draftline.data.packing import Pack
from draftline.data.store import Sample
from draftline.errors import ConfigError, FallbackError
from draftline.model.target.target import Target
from draftline.train.features import cache as module
from draftline.train.features.cache import CachedFeatures, FeatureCache, feature_size, measure
from draftline.train.features.forwards import TargetForwards
from tests.support.tiny import build_samples, build_target

LENGTHS = (9, 30, 4, 17, 4, 25, 1)
PACKS = [Pack((1, 3), 47), Pack((0, 2, 4, 5), 42), Pack((6,), 1), Pack((5, 0), 34)]
BUDGET = 48
CPU = torch.device("cpu")


def quiet(_done: int, _total: int) -> None:
    pass


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return build_samples(LENGTHS)


def online(target: Target, *, last_hidden: bool = True, budget: int = BUDGET) -> TargetForwards:
    return TargetForwards(
        target,
        derive_table(LENGTHS, batch_tokens=64, most_rows=3, pack_members_hint=3),
        last_hidden=last_hidden,
        token_budget=budget,
        capture="auto",
        choices=Choices(),
    )


def fill(
    target: Target,
    samples: list[Sample],
    folder: Path | None,
    key: str = "k",
    *,
    last_hidden: bool = True,
    budget: int = BUDGET,
    progress: Callable[[int, int], None] = quiet,
    choices: Choices | None = None,
) -> FeatureCache:
    cache = FeatureCache(target, samples, last_hidden=last_hidden)
    cache.fill(
        lambda: online(target, last_hidden=last_hidden, budget=budget),
        folder,
        key,
        progress,
        choices or Choices(strict=True),
    )
    return cache


def reader(cache: FeatureCache) -> CachedFeatures:
    return CachedFeatures(cache, CPU, token_budget=BUDGET)


def alone(target: Target, sample: Sample) -> Tensor:
    """Features of one sample by itself, from the entries Hugging Face calls hidden_states."""
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    output = target._model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = [output.hidden_states[t + 1][0] for t in target.taps]
    return torch.cat([*states, output.hidden_states[-1][0]], -1)


@torch.no_grad()
def check(cache: FeatureCache, target: Target, samples: list[Sample]) -> None:
    worker = reader(cache)
    for pack in PACKS:
        worker.run(samples, pack)
        assert worker.row.shape == (BUDGET, 3 * target.hidden_size)
        begin = 0
        for member in pack.members:
            rows = alone(target, samples[member])
            span = worker.row[begin : begin + len(rows)]
            torch.testing.assert_close(span, rows, rtol=1e-4, atol=1e-4)
            begin += len(rows)
        assert begin == pack.tokens
        assert not worker.row[begin:].any()


@pytest.mark.parametrize("budget", [30, BUDGET, 1000])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_cache_equals_online(
    target: Target, samples: list[Sample], kind: str, budget: int, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "deep" / "cache" if kind == "disk" else None
    cache = fill(
        target,
        samples,
        folder,
        budget=budget,
        progress=lambda done, total: seen.append((done, total)),
    )
    check(cache, target, samples)
    worker, direct = reader(cache), online(target)
    for pack in PACKS:
        worker.run(samples, pack)
        direct.run(samples, pack)
        torch.testing.assert_close(worker.row, direct.row, rtol=1e-4, atol=1e-4)
    assert (worker.width, worker.dtype) == (direct.width, direct.dtype)
    assert seen[-1] == (sum(LENGTHS), sum(LENGTHS))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_readers_of_one_cache_do_not_share_rows(target: Target, samples: list[Sample]) -> None:
    cache = fill(target, samples, None)
    one, two = reader(cache), reader(cache)
    one.run(samples, PACKS[0])
    before = one.row.clone()
    two.warm()
    two.run(samples, PACKS[1])
    two.row.zero_()
    one.run(samples, PACKS[0])
    assert torch.equal(one.row, before)


def test_only_an_unfinished_cache_asks_for_a_worker(
    target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    first = fill(target, samples, tmp_path, "one")

    def forbidden() -> TargetForwards:
        raise AssertionError("a worker was built although the cache is there")

    second = FeatureCache(target, samples, last_hidden=True)
    second.fill(forbidden, tmp_path, "one", quiet, Choices())
    mine, theirs = reader(first), reader(second)
    for pack in PACKS:
        mine.run(samples, pack)
        theirs.run(samples, pack)
        assert torch.equal(mine.row, theirs.row)
    with pytest.raises(AssertionError, match="worker was built"):
        FeatureCache(target, samples, last_hidden=True).fill(
            forbidden, tmp_path, "other", quiet, Choices()
        )


@pytest.mark.parametrize("damage", ["interrupted", "cut", "cut and interrupted"])
def test_an_unfinished_file_is_filled_anew(
    target: Target, samples: list[Sample], tmp_path: Path, damage: str
) -> None:
    if "cut" in damage:
        fill(target, samples, tmp_path)
        with (tmp_path / "features-k.rows").open("r+b") as file:
            file.truncate(100)
    if "interrupted" in damage:

        def killed(done: int, _total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fill(target, samples, tmp_path, progress=killed, choices=Choices())
    check(fill(target, samples, tmp_path, choices=Choices()), target, samples)


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("eighth", range(8))
def test_a_byte_that_the_disk_changed_is_never_trained_on(
    target: Target, samples: list[Sample], tmp_path: Path, eighth: int
) -> None:
    """Somewhere in the features and, in the last case, in the hashes behind them."""
    path = tmp_path / "features-k.rows"
    fill(target, samples, tmp_path)
    whole = path.read_bytes()
    flipped(path, eighth * (len(whole) - 1) // 7)
    with pytest.raises(FallbackError, match="hash"):
        fill(target, samples, tmp_path)
    choices = Choices()
    cache = fill(target, samples, tmp_path, choices=choices)
    [choice] = choices.entries
    assert choice.fallback
    assert str(path) in choice.wanted
    assert "hash" in choice.reason
    assert path.read_bytes() == whole
    check(cache, target, samples)


def test_every_hash_behind_the_features_is_itself_covered(
    target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    path = tmp_path / "features-k.rows"
    rows = feature_size(target, sum(LENGTHS), last_hidden=True).bytes
    fill(target, samples, tmp_path)
    whole = path.read_bytes()
    for at in range(rows, len(whole)):
        flipped(path, at)
        with pytest.raises(FallbackError, match="hash"):
            fill(target, samples, tmp_path)
        path.write_bytes(whole)


def exchange(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def join(path: Path, other: Path) -> None:
    """The first half of one and the second of another of the same size."""
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(mine[: len(mine) // 2] + theirs[len(mine) // 2 :])


def strip(path: Path, _other: Path) -> None:
    """What a version wrote that had no hashes."""
    path.write_bytes(path.read_bytes()[: -16 * len(LENGTHS) - 32])


def lengthen(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize("damage", [exchange, join, strip, lengthen])
def test_a_file_that_is_another_is_made_anew(
    target: Target,
    samples: list[Sample],
    tmp_path: Path,
    damage: Callable[[Path, Path], None],
) -> None:
    path, other = (tmp_path / f"features-{key}.rows" for key in ("k", "other"))
    fill(target, samples, tmp_path)
    whole = path.read_bytes()
    fill(target, samples, tmp_path, "other")
    damage(path, other)
    choices = Choices()
    fill(target, samples, tmp_path, choices=choices)
    assert [choice.what for choice in choices.entries] == ["features.source"]
    assert path.read_bytes() == whole


def test_a_cache_that_is_not_ours_to_write_is_read(
    target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    path = tmp_path / "features-k.rows"
    first = fill(target, samples, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    path.chmod(0o444)
    second = fill(target, samples, tmp_path)
    for member in range(len(LENGTHS)):
        assert torch.equal(first.rows(member), second.rows(member))
    second.rows(1).zero_()  # a reader's own pages
    fill(target, samples, tmp_path)


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_a_disk_that_refuses_is_said_in_words(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made in .*features\.dir"):
        fill(target, samples, tmp_path / "file" / "cache")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*features\.source=online"):
        fill(target, samples, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


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
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    abandoned = f".features-k.rows.{socket.gethostname()}.{dead.pid}.tmp"
    (tmp_path / abandoned).write_bytes(bytes(size.bytes))
    other = tmp_path / ".features-k.rows.elsewhere.1.tmp"
    other.write_bytes(b"of another machine")
    busy = tmp_path / f".features-k.rows.{socket.gethostname()}.1.tmp"
    with busy.open("wb") as file:
        file.write(b"of another fill")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        fill(target, samples, tmp_path)
    names = {f.name for f in tmp_path.iterdir()}
    assert names == {busy.name, other.name, "features-k.rows"}


def test_a_fill_that_fails_leaves_nothing_that_looks_finished(
    target: Target, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(module.FeatureCache, "_computed", broken)
        with pytest.raises(ValueError, match="in the middle"):
            fill(target, samples, tmp_path)
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(module, "free_host_bytes", lambda: free)
    folder = tmp_path if kind == "disk" else None
    with pytest.raises(ConfigError, match=rf"{sum(LENGTHS)} tokens x 96 channels.*{kind}"):
        fill(target, samples, folder)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_those_of_the_file(target: Target, samples: list[Sample], tmp_path: Path) -> None:
    for last_hidden in (False, True):
        size = feature_size(target, sum(LENGTHS), last_hidden=last_hidden)
        built = fill(target, samples, tmp_path, str(last_hidden), last_hidden=last_hidden)
        assert size.width == built.width
        file = tmp_path / f"features-{last_hidden}.rows"
        assert size.bytes + 16 * len(LENGTHS) + 32 == file.stat().st_size
    assert size.gib == size.bytes / 2**30


def test_the_scale_is_measured_without_the_first_positions(
    target: Target, samples: list[Sample]
) -> None:
    width = 2 * target.hidden_size
    members = [1, 6, 3, 4, 0]
    # In packs of at most 48 tokens, longest first; the sample of one token has nothing to give.
    order = [1, 3, 0, 4, 6]
    with torch.no_grad():
        wanted = torch.cat([alone(target, samples[m])[1:, :width] for m in order])
    for worker in (online(target), reader(fill(target, samples, None))):
        measured = measure(worker, samples, members, width)
        torch.testing.assert_close(measured, wanted, rtol=1e-4, atol=1e-4)
