"""Where a step's features come from: the target at every step, or a cache filled once.

The cache holds every sample's features back to back, so packs can be composed anew each epoch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftline.data.packing import Pack
from draftline.data.tokens import Sample
from draftline.errors import ConfigError
from draftline.model.taps import check_features
from draftline.model.target import Target
from draftline.runtime.devices import upload


@dataclass(frozen=True, slots=True)
class FeatureSize:
    """What a cache of `tokens` tokens would take."""

    tokens: int
    width: int
    bytes: int

    @property
    def gib(self) -> float:
        return self.bytes / 2**30


def feature_size(target: Target, tokens: int, *, last_hidden: bool) -> FeatureSize:
    """The size of a cache over `tokens` tokens, in the target's dtype."""
    width = (len(target.taps) + int(last_hidden)) * target.hidden_size
    return FeatureSize(tokens, width, tokens * width * target.embedding.element_size())


class FeatureSource:
    """Runs the target over samples, in batches padded on the right, and removes the padding."""

    def __init__(self, target: Target, *, last_hidden: bool, batch_tokens: int, most: int) -> None:
        """`batch_tokens`: padded tokens of one target forward; `most`: rows of one."""
        self._target = target
        self._last_hidden = last_hidden
        self._batch_tokens = batch_tokens
        self._most = most
        self._taps_width = len(target.taps) * target.hidden_size
        self._cache: Tensor | None = None
        self._offsets: list[int] = []

    @property
    def width(self) -> int:
        """Channels a token: taps, and the last hidden state where it is needed."""
        return self._taps_width + (self._target.hidden_size if self._last_hidden else 0)

    def pack(
        self, samples: Sequence[Sample], pack: Pack, token_budget: int
    ) -> tuple[Tensor, Tensor | None]:
        """Features `[token_budget, taps * hidden]` and last hidden states of one pack, padding 0."""
        device = self._target.device
        row = torch.zeros(token_budget, self.width, dtype=self._target.dtype, device=device)
        if self._cache is None:
            self._compute([samples[m] for m in pack.members], row)
        else:
            begin = 0
            for member in pack.members:
                length = len(samples[member].input_ids)
                offset = self._offsets[member]
                row[begin : begin + length] = self._cache[offset : offset + length].to(device)
                begin += length
        taps = check_features(
            row[:, : self._taps_width], len(self._target.taps), self._target.hidden_size
        )
        return taps, row[:, self._taps_width :] if self._last_hidden else None

    def measure(self, samples: Sequence[Sample]) -> Tensor:
        """Features `[tokens, taps * hidden]` of the samples without their position 0."""
        total = sum(len(s.input_ids) for s in samples)
        row = torch.zeros(total, self.width, dtype=self._target.dtype, device=self._target.device)
        self._compute(samples, row)
        keep = torch.ones(total, dtype=torch.bool)
        begin = 0
        for sample in samples:
            keep[begin] = False
            begin += len(sample.input_ids)
        return row[keep.to(row.device), : self._taps_width]

    def fill(
        self,
        samples: Sequence[Sample],
        directory: Path | None,
        key: str,
        progress: Callable[[int, int], None],
    ) -> None:
        """Computes every sample's features once, into memory or a file of `directory`.

        A finished file of the same `key` (data, target, taps) is taken as it is. Raises ConfigError
        when there is no room; nothing is allocated before that is known.
        """
        lengths = [len(s.input_ids) for s in samples]
        self._offsets = [0, *np.cumsum(lengths).tolist()]
        total = self._offsets[-1]
        size = feature_size(self._target, total, last_hidden=self._last_hidden)
        done: Path | None = None
        if directory is None:
            _check_room(size, _free_memory(), "memory", "features.source=disk or online")
            self._cache = torch.empty(total, self.width, dtype=self._target.dtype)
        else:
            path = directory / f"features-{key}.bin"
            done = path.with_suffix(".done")
            directory.mkdir(parents=True, exist_ok=True)
            finished = done.exists() and path.exists() and path.stat().st_size == size.bytes
            if not finished:
                # What an interrupted fill left behind holds the very space that is asked for.
                done.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                free = shutil.disk_usage(directory).free
                _check_room(size, free, f"disk at {directory}", "features.dir or source=online")
                # Reserved now: writing into a mapping that the disk cannot back kills the process.
                try:
                    with path.open("wb") as file:
                        os.posix_fallocate(file.fileno(), 0, size.bytes)
                except OSError as error:
                    path.unlink(missing_ok=True)
                    raise ConfigError(
                        f"the feature cache of {size.gib:.1f} GiB cannot be made at {path}: "
                        f"{error.strerror}; use another features.dir or features.source=online"
                    ) from None
            self._cache = torch.from_file(
                str(path), shared=True, size=total * self.width, dtype=self._target.dtype
            ).view(total, self.width)
            if finished:
                return
        finished_tokens = 0
        for index, rows in self._computed(samples):
            self._cache[self._offsets[index] : self._offsets[index + 1]] = rows.cpu()
            finished_tokens += lengths[index]
            progress(finished_tokens, total)
        if done is not None:
            done.touch()

    def _compute(self, samples: Sequence[Sample], row: Tensor) -> None:
        """Writes the samples' features back to back into `row`."""
        offsets = [0, *np.cumsum([len(s.input_ids) for s in samples]).tolist()]
        for index, rows in self._computed(samples):
            row[offsets[index] : offsets[index + 1]] = rows

    def _computed(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
        """Index and features `[tokens, width]` of every sample, in the order of the forwards."""
        lengths = [len(s.input_ids) for s in samples]
        for group in _batches(lengths, self._batch_tokens, self._most):
            buffer = torch.empty(
                sum(lengths[i] for i in group),
                self.width,
                dtype=self._target.dtype,
                device=self._target.device,
            )
            self._run([samples[i] for i in group], buffer)
            begin = 0
            for index in group:
                yield index, buffer[begin : begin + lengths[index]]
                begin += lengths[index]

    def _run(self, samples: Sequence[Sample], out: Tensor) -> None:
        """One target forward; `out [tokens, width]` gets the samples' rows without padding."""
        lengths = [len(s.input_ids) for s in samples]
        longest = max(lengths)
        ids = np.zeros((len(samples), longest), np.int64)
        real = np.zeros((len(samples), longest), np.bool_)
        for i, sample in enumerate(samples):
            ids[i, : lengths[i]] = sample.input_ids
            real[i, : lengths[i]] = True
        device = self._target.device
        taps, last = self._target.features(upload(ids, device), last_hidden=self._last_hidden)
        index = upload(np.flatnonzero(real), device)
        out[:, : self._taps_width] = taps.flatten(0, 1)[index]
        if last is not None:
            out[:, self._taps_width :] = last.flatten(0, 1)[index]


def _batches(lengths: Sequence[int], batch_tokens: int, most: int) -> list[list[int]]:
    """Indices grouped by similar length, so that `rows * longest` stays within `batch_tokens`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            group = groups[-1]
            if len(group) < most and (len(group) + 1) * lengths[group[0]] <= batch_tokens:
                group.append(index)
                continue
        groups.append([index])
    return groups


def _free_memory() -> int:
    """Bytes that this process can still take: the machine's, or the container's where it is less."""
    free = 2**63 - 1
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _check_room(size: FeatureSize, free: int, where: str, instead: str) -> None:
    # A tenth is left to everybody else on the machine.
    if size.bytes > 0.9 * free:
        raise ConfigError(
            f"the feature cache needs {size.gib:.1f} GiB ({size.tokens} tokens x {size.width} "
            f"channels) and {free / 2**30:.1f} GiB of {where} are free; use {instead}, fewer taps "
            "or less data"
        )
