"""The finite set of shapes in which a target runs, and the samples of a pack laid out in them.

A shape is `(rows, length)`. Samples are padded on the right to its length, and a shape may have rows
to spare. With a finite set, a device's memory has a peak that is known before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftline.errors import ConfigError

Shape = tuple[int, int]

# What one more forward costs, in tokens: weights are read and kernels launched whatever its size.
_FORWARD_TOKENS = 256
_MOST_SHAPES, _MOST_LENGTHS = 64, 32
# Lengths are multiples: matrix kernels are fastest on whole tiles.
_TILE, _SMALL_TILE, _SMALL = 64, 16, 512


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward: `members` are places in the lengths that were split, at most one row each."""

    shape: Shape
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchTable:
    """The shapes of a run's target forwards."""

    shapes: tuple[Shape, ...]

    @property
    def longest(self) -> int:
        return max(length for _, length in self.shapes)

    @property
    def most_tokens(self) -> int:
        """Padded tokens of the largest shape."""
        return max(rows * length for rows, length in self.shapes)

    def split(self, lengths: Sequence[int]) -> list[Batch]:
        """Batches that hold each of `lengths` (tokens) once, with the fewest padded tokens.

        Samples are sorted by length and cut into runs of neighbours; of all such cuts the cheapest
        is taken, where a forward costs its padded tokens and a constant. Raises ConfigError for a
        sample that no shape holds.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        if order and lengths[order[0]] > self.longest:
            raise ConfigError(
                f"a conversation of {lengths[order[0]]} tokens fits into no shape of the target's "
                f"batches, the longest is {self.longest}; make target.batches longer or null"
            )
        # cheapest[i]: the cost of the samples from order[i] on, and the shape that order[i] is in.
        cheapest: list[tuple[int, Shape]] = [(0, (0, 0))] * (len(order) + 1)
        for i in reversed(range(len(order))):
            cheapest[i] = min(
                (
                    rows * length + _FORWARD_TOKENS + cheapest[min(i + rows, len(order))][0],
                    (rows, length),
                )
                for rows, length in self.shapes
                if length >= lengths[order[i]]
            )
        batches, begin = [], 0
        while begin < len(order):
            shape = cheapest[begin][1]
            batches.append(Batch(shape, tuple(order[begin : begin + shape[0]])))
            begin += shape[0]
        return batches


def derive_table(
    lengths: Sequence[int], *, batch_tokens: int, most_rows: int, pack_members_hint: int
) -> BatchTable:
    """A table for samples of `lengths` tokens, the largest shape first.

    The lengths are those that leave the least padding over all samples, the longest included, each
    with powers of two of rows, in all about 64 shapes at most. No shape has more than `batch_tokens`
    padded tokens or `most_rows` rows, nor more rows than a pack of `pack_members_hint` samples fills.
    Raises ConfigError for a sample longer than `batch_tokens`.
    """
    longest = max(lengths)
    if longest > batch_tokens:
        raise ConfigError(
            f"the longest conversation has {longest} tokens and a target forward may have "
            f"{batch_tokens}; raise token_budget or lower data.max_length"
        )
    best: list[Shape] = []
    for ladder in _fitted_lengths(lengths, batch_tokens):
        shapes = [
            (1 << power, length)
            for length in ladder
            for power in range(most_rows.bit_length())
            if 1 << power <= max(1, min(most_rows, batch_tokens // length, pack_members_hint))
        ]
        if best and len(shapes) > _MOST_SHAPES:
            break
        best = shapes
    return BatchTable(_by_size(best))


def check_table(shapes: Sequence[Shape], longest: int, batch_tokens: int) -> BatchTable:
    """The table of a user's shapes, largest first; raises ConfigError for one that cannot serve
    conversations of up to `longest` tokens within `batch_tokens` padded tokens per forward."""
    given = [(rows, length) for rows, length in shapes]
    if not given:
        raise ConfigError("target.batches=[]: name at least one [rows, length], or null")
    bad = [list(s) for s in given if s[0] < 1 or s[1] < 1]
    if bad:
        raise ConfigError(f"target.batches={bad}: rows and length are 1 or more")
    twice = sorted({s for s in given if given.count(s) > 1})
    if twice:
        raise ConfigError(f"target.batches names {list(map(list, twice))} more than once")
    large = [list(s) for s in given if s[0] * s[1] > batch_tokens]
    if large:
        raise ConfigError(
            f"target.batches={large}: a forward may have token_budget={batch_tokens} tokens, padding "
            "included; lower rows or length"
        )
    table = BatchTable(_by_size(given))
    if table.longest < longest:
        raise ConfigError(
            f"target.batches: the longest conversation has {longest} tokens and the longest shape "
            f"{table.longest}; add [1, {longest}] or lower data.max_length"
        )
    if not any(rows == 1 and length >= longest for rows, length in given):
        raise ConfigError(
            f"target.batches has no shape of one row that holds the longest conversation, {longest} "
            f"tokens, so it could only run beside empty rows; add [1, {table.longest}]"
        )
    return table


def _fitted_lengths(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Ascending lengths for 1, 2, ... shapes that pad `lengths` least, in all up to `_MOST_LENGTHS`.

    The last is that of the longest sample, none is above `most`.
    """
    found = np.asarray(lengths, np.int64)
    tiles = np.where(found <= _SMALL, _SMALL_TILE, _TILE)
    options = np.unique(np.minimum(-(-found // tiles) * tiles, most))
    within = np.searchsorted(np.sort(found), options, side="right")
    # cost[j]: padded tokens of all samples up to options[j] when that is the last length chosen;
    # before[k][j]: the length chosen before it, of k + 1 in all.
    cost = within * options
    before = [np.full(len(options), -1)]
    while len(before) < min(_MOST_LENGTHS, len(options)):
        ahead = (within[:, None] - within[None, :]) * options[:, None] + cost[None, :]
        ahead[np.triu_indices(len(options))] = np.iinfo(np.int64).max // 2
        before.append(ahead.argmin(1))
        cost = ahead.min(1)
    ladders = []
    for count in range(1, len(before) + 1):
        at, ladder = len(options) - 1, []
        for step in reversed(range(count)):
            ladder.append(int(options[at]))
            at = int(before[step][at])
        ladders.append(ladder[::-1])
    return ladders


def _by_size(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Largest first: what is allocated for one shape serves those after it."""
    return tuple(sorted(shapes, key=lambda s: (-s[0] * s[1], -s[1])))
