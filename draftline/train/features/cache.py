"""Features computed once: a cache of every sample's, in memory or in a file, and its reader.

Samples lie back to back, so packs can be composed anew each epoch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.packing import Pack
from draftline.data.store import Sample, token_lengths
from draftline.errors import ConfigError
from draftline.runtime.devices import free_host_bytes
from draftline.runtime.staging import Staging
from draftline.train.features.feature_file import FeatureFile, Hashers

# Samples on their way to a device at once.
_AHEAD = 4


class Tapped(Protocol):
    """What a target, or its facts, says about the features that it gives."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class FeatureWorker(Protocol):
    """One worker's way to a pack's features: `run` queues the work that puts them into `row`.

    `row [token_budget, width]` holds the last pack's features back to back and zeros behind; `warm`
    allocates and compiles what `run` needs, `settle` takes memory again that others' warm-up gave back.
    """

    row: Tensor

    def warm(self) -> None: ...
    def settle(self) -> None: ...
    def run(self, samples: Sequence[Sample], pack: Pack) -> None: ...


@dataclass(frozen=True, slots=True)
class FeatureSize:
    """What a cache of `tokens` tokens would take."""

    tokens: int
    width: int
    bytes: int

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


def feature_size(target: Tapped, tokens: int, *, last_hidden: bool) -> FeatureSize:
    """The size of a cache over `tokens` tokens, in the target's dtype."""
    width = (len(target.taps) + int(last_hidden)) * target.hidden_size
    return FeatureSize(tokens, width, tokens * width * target.dtype.itemsize)


def measure(
    worker: FeatureWorker, samples: Sequence[Sample], members: Sequence[int], width: int
) -> Tensor:
    """The first `width` channels of the samples `members`, on the worker's device, without their
    position 0: `[tokens, width]` in the order of the worker's packs."""
    lengths = token_lengths(samples)
    found = []
    for pack in _groups(lengths, members, len(worker.row)):
        worker.run(samples, pack)
        keep = np.ones(pack.tokens, np.bool_)
        keep[np.cumsum([0] + [lengths[m] for m in pack.members[:-1]])] = False
        index = torch.from_numpy(np.flatnonzero(keep)).to(worker.row.device)
        found.append(worker.row[index, :width])
    return torch.cat(found)


class FeatureCache:
    """Every sample's features on the host, `[tokens, width]` each; one object serves all readers."""

    def __init__(self, target: Tapped, samples: Sequence[Sample], *, last_hidden: bool) -> None:
        """Allocates nothing; `fill` does."""
        self._samples = samples
        self._lengths = token_lengths(samples)
        self._offsets = [0, *np.cumsum(self._lengths).tolist()]
        self._size = feature_size(target, self._offsets[-1], last_hidden=last_hidden)
        self._store: Tensor | None = None
        self.width = self._size.width
        self.dtype = target.dtype
        self.longest = max(self._lengths)

    def rows(self, member: int) -> Tensor:
        """Features `[tokens, width]` of one sample, a view of the cache."""
        assert self._store is not None, "the cache was not filled"
        return self._store[self._offsets[member] : self._offsets[member + 1]]

    def fill(
        self,
        worker: Callable[[], FeatureWorker],
        directory: Path | None,
        key: str,
        progress: Callable[[int, int], None],
        choices: Choices | None = None,
    ) -> None:
        """Computes every sample's features once, into memory or a file of `directory`.

        A finished file of the same `key` (data, target, taps) is compared with its hashes and taken as
        it is; one that does not fit them is recorded and made anew. Only to compute is `worker` called.
        `progress(done, total)` counts tokens, compared or computed. Raises ConfigError when there is no
        room; nothing is allocated before that is known.
        """
        if directory is None:
            _check_room(self._size, free_host_bytes(), "memory", "features.source=disk or online")
            self._store = torch.empty(self._size.tokens, self.width, dtype=self.dtype)
            for _ in self._computed(worker(), progress):
                pass
            return
        row_bytes = self.width * self.dtype.itemsize
        file = FeatureFile(
            directory / f"features-{key}.rows",
            f"{key} {self.dtype} {self.width}",
            [row_bytes * length for length in self._lengths],
        )
        with _usable(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if file.path.exists() and self._is_whole(file, progress, choices or Choices()):
                self._store = self._mapped(file.path, shared=False)
                return
            file.remove_abandoned()
            free = shutil.disk_usage(directory).free
        _check_room(self._size, free, f"disk at {directory}", "features.dir or source=online")
        with ExitStack() as stack:
            with _usable(directory):
                part = stack.enter_context(file.part())
            self._store = self._mapped(part[0], shared=True)
            digests = [b""] * len(self._lengths)
            hashers = stack.enter_context(Hashers())
            for members in self._computed(worker(), progress):
                found = hashers.digests([self.rows(member) for member in members])
                for member, digest in zip(members, found, strict=True):
                    digests[member] = digest
            with _usable(directory):
                file.finish(part, digests)

    def _is_whole(
        self, file: FeatureFile, progress: Callable[[int, int], None], choices: Choices
    ) -> bool:
        """Whether the file can be taken; one that cannot is recorded, and removed."""
        total = self._size.tokens
        damage = file.damage(lambda sample: progress(self._offsets[sample + 1], total))
        if damage is None:
            return True
        choices.record(
            "features.source",
            wanted=f"the features in {file.path}",
            got="features computed anew",
            reason=damage,
            fallback=True,
        )
        file.path.unlink(missing_ok=True)
        return False

    def _mapped(self, path: Path, *, shared: bool) -> Tensor:
        """The file's rows; one that is not `shared` may be another user's, and is never written."""
        flat = torch.from_file(
            str(path), shared=shared, size=self._size.tokens * self.width, dtype=self.dtype
        )
        return flat.view(-1, self.width)

    def _computed(
        self, worker: FeatureWorker, progress: Callable[[int, int], None]
    ) -> Iterator[tuple[int, ...]]:
        """Fills the store; gives the members that were filled, pack by pack."""
        worker.warm()
        finished = 0
        for pack in _groups(self._lengths, range(len(self._lengths)), len(worker.row)):
            worker.run(self._samples, pack)
            begin, rows = 0, worker.row[: pack.tokens].cpu()
            for member in pack.members:
                end = begin + self._lengths[member]
                self.rows(member).copy_(rows[begin:end])
                begin = end
            yield pack.members
            finished += pack.tokens
            progress(finished, self._size.tokens)


class CachedFeatures:
    """Copies packs' features from a filled cache to one device, for one worker thread.

    `row` is as in `TargetForwards`, which this replaces where features were computed beforehand; no
    target is needed on the device. Samples must be those of the cache, by their index.
    """

    def __init__(self, cache: FeatureCache, device: torch.device, *, token_budget: int) -> None:
        self.device, self.dtype, self.width = device, cache.dtype, cache.width
        self.row = torch.zeros(token_budget, cache.width, dtype=cache.dtype, device=device)
        self._cache = cache
        self._staging: Staging | None = None
        if device.type == "cuda":
            shape = (cache.longest, cache.width)
            self._staging = Staging(shape, cache.dtype, device, depth=_AHEAD)

    def warm(self) -> None:
        """Does nothing: copies need no preparation."""

    def settle(self) -> None:
        """Nothing here lies in the allocator's cache."""

    def run(self, samples: Sequence[Sample], pack: Pack) -> None:
        """Queues the copies of `pack` on the current stream; `row` holds its features after them."""
        begin = 0
        for member in pack.members:
            rows = self._cache.rows(member)
            assert len(rows) == len(samples[member].input_ids), "the cache is of other samples"
            out = self.row[begin : begin + len(rows)]
            if self._staging is None:
                out.copy_(rows)
            else:
                staged = self._staging.take()[: len(rows)]
                staged.copy_(rows)
                self._staging.send(staged, out)
            begin += len(rows)
        self.row[begin:].zero_()


def _groups(lengths: Sequence[int], members: Sequence[int], token_budget: int) -> Iterator[Pack]:
    """Packs of at most `token_budget` tokens, of samples alike in length, longest first."""
    group: list[int] = []
    tokens = 0
    for member in sorted(members, key=lambda m: -lengths[m]):
        if group and tokens + lengths[member] > token_budget:
            yield Pack(tuple(group), tokens)
            group, tokens = [], 0
        group.append(member)
        tokens += lengths[member]
    if group:
        yield Pack(tuple(group), tokens)


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Says what the disk refused in words of the configuration."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the feature cache cannot be made in {directory}: {error.strerror or error}; use another "
            "features.dir or features.source=online"
        ) from None


def _check_room(size: FeatureSize, free: int | None, where: str, instead: str) -> None:
    # A tenth is left to everybody else on the machine.
    if free is not None and size.bytes > 0.9 * free:
        raise ConfigError(
            f"the feature cache needs {size.gib:.1f} GiB ({size.tokens} tokens x {size.width} "
            f"channels) and {free / 2**30:.1f} GiB of {where} are free; use {instead}, fewer taps "
            "or less data"
        )
