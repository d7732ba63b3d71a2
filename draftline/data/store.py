"""Samples of a run in flat arrays, which need not be in memory: they may be maps of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A token row: `input_ids` int32 [tokens] and `loss_mask` bool [tokens], on answers only.

    `truncated` says that the conversation went on past the last token, or was to.
    """

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: Mask
    truncated: bool


class Samples(Sequence[Sample]):
    """Samples whose arrays are views into `input_ids` int32 [tokens] and `loss_mask` bool [tokens].

    Sample i is `starts[i] : starts[i + 1]` of both, for `starts` int64 [samples + 1]; `ids` and
    `truncated` have an entry per sample. The arrays may be memory maps: a sample is read when it is
    asked for, and `lengths` reads none.
    """

    def __init__(
        self,
        input_ids: NDArray[np.int32],
        loss_mask: Mask,
        starts: NDArray[np.int64],
        ids: Sequence[str],
        truncated: Mask,
        chosen: NDArray[np.int64] | None = None,
    ) -> None:
        """`chosen` int64 [any] are the samples that are in, in their order; None is all of them."""
        self._input_ids, self._loss_mask, self._starts = input_ids, loss_mask, starts
        self._ids, self._truncated = ids, truncated
        self._chosen = np.arange(len(ids)) if chosen is None else chosen

    @staticmethod
    def of(samples: Iterable[Sample]) -> Samples:
        """A copy of `samples` in memory."""
        rows = list(samples)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row.input_ids) for row in rows], out=starts[1:])
        return Samples(
            np.concatenate([row.input_ids for row in rows] or [np.zeros(0, np.int32)]),
            np.concatenate([row.loss_mask for row in rows] or [np.zeros(0, np.bool_)]),
            starts,
            [row.id for row in rows],
            np.array([row.truncated for row in rows], np.bool_),
        )

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Samples: ...

    def __getitem__(self, index: int | slice) -> Sample | Samples:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        place = int(self._chosen[index])
        inside = slice(int(self._starts[place]), int(self._starts[place + 1]))
        return Sample(
            self._ids[place],
            self._input_ids[inside],
            self._loss_mask[inside],
            bool(self._truncated[place]),
        )

    def take(self, indices: Iterable[int]) -> Samples:
        """The samples at `indices`, in that order, out of the same arrays."""
        chosen = self._chosen[np.fromiter(indices, np.int64)]
        return Samples(
            self._input_ids, self._loss_mask, self._starts, self._ids, self._truncated, chosen
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [samples]."""
        lengths: NDArray[np.int64] = np.diff(self._starts)[self._chosen]
        return lengths


def token_lengths(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample; reads none of them where they are `Samples`."""
    if isinstance(samples, Samples):
        return [int(length) for length in samples.lengths]
    return [len(sample.input_ids) for sample in samples]
