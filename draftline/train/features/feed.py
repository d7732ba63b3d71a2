"""The one order in which packs are consumed, whatever machines, targets and drafters there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draftline.data.packing import Pack


@dataclass(frozen=True, slots=True)
class Share:
    """What part of each step's packs this machine takes, and how it deals them out.

    A step has `machines * drafters * accumulate` packs. Machine `rank` takes its stretch of them and
    deals it to its drafters in turn, so that adding up over packs, drafters and machines in order
    adds in the packs' own order wherever one of the three is one.
    """

    drafters: int
    accumulate: int = 1
    machines: int = 1
    rank: int = 0

    @property
    def packs_per_step(self) -> int:
        return self.machines * self.drafters * self.accumulate


@dataclass(frozen=True, slots=True)
class Position:
    """Where a pack lies: `number` counts packs from the run's first, `place` in its `epoch`."""

    number: int
    epoch: int
    place: int


@dataclass(frozen=True, slots=True)
class Job:
    """A pack to compute: `step` (0-based) and global `number`, for local `drafter`, as the
    `sequence`-th since the start of this process that the drafter gets."""

    step: int
    number: int
    drafter: int
    sequence: int
    pack: Pack


class Feed:
    """Deals out jobs in order to whichever worker asks; safe from any thread."""

    def __init__(
        self,
        packs_of: Callable[[int], Sequence[Pack]],
        share: Share,
        start: Position,
        *,
        first_step: int,
        total_steps: int,
    ) -> None:
        """`packs_of(epoch)` are the packs of an epoch in order; `start` is where `first_step` begins."""
        self._packs_of = packs_of
        self._share = share
        self._lock = threading.Lock()
        # Epoch and the number of its first pack, for every epoch that was begun.
        self._epochs = [(start.epoch, start.number - start.place)]
        self._jobs = self._deal(start, first_step, total_steps)

    def next(self) -> Job | None:
        """The next job of this machine, None after the last."""
        with self._lock:
            return next(self._jobs, None)

    def position(self, number: int) -> Position:
        """Where pack `number` lies; it is at most the next one to be dealt out."""
        epoch, first = next(e for e in reversed(self._epochs) if e[1] <= number)
        return Position(number, epoch, number - first)

    def _deal(self, start: Position, first_step: int, total_steps: int) -> Iterator[Job]:
        share = self._share
        local = share.drafters * share.accumulate
        packs = self._sequence(start)
        number = start.number
        for step in range(first_step, total_steps):
            for place in range(share.packs_per_step):
                pack = next(packs)
                machine, mine = divmod(place, local)
                if machine == share.rank:
                    turn, drafter = divmod(mine, share.drafters)
                    sequence = (step - first_step) * share.accumulate + turn
                    yield Job(step, number, drafter, sequence, pack)
                number += 1

    def _sequence(self, start: Position) -> Iterator[Pack]:
        epoch, place = start.epoch, start.place
        while True:
            packs = self._packs_of(epoch)
            yield from packs[place:]
            epoch, place = epoch + 1, 0
            self._epochs.append((epoch, self._epochs[-1][1] + len(packs)))
