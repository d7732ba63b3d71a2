"""The boundary between two steps: what the lead does there, and how the other drafters learn of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from draftline.runtime.workers import Worker
from draftline.train.step.heldout import HeldOutScore


@dataclass(frozen=True, slots=True)
class Duties:
    """What the lead does at the boundaries of a step; all in its thread.

    `go_on(step)` is asked before step `step` (0-based); `finished(step)` is called when `step` steps
    are queued; `report(step, sums)` gets the totals up to `step`, added up over this machine's
    drafters. `reports(step)` says whether totals are read after `step` steps, `compares(step)` whether
    the drafters are compared, `measures(step)` whether the lead is measured on held-out answers;
    `measured(step, score)` gets that after `finished` and before `report`.
    """

    go_on: Callable[[int], bool]
    finished: Callable[[int], None]
    report: Callable[[int, list[float]], None]
    reports: Callable[[int], bool]
    compares: Callable[[int], bool]
    measures: Callable[[int], bool]
    measured: Callable[[int, HeldOutScore], None]


class Boundary:
    """How the drafters learn what the lead decided, and the lead their totals."""

    def __init__(self, drafters: int) -> None:
        self._drafters = drafters
        self._condition = threading.Condition()
        self._decided: dict[int, bool] = {}
        self._sums: dict[int, list[list[float]]] = {}

    def decide(self, step: int, answer: bool) -> None:
        with self._condition:
            self._decided = {
                step: answer,
                **{s: a for s, a in self._decided.items() if s >= step - 8},
            }
            self._condition.notify_all()

    def decision(self, step: int, worker: Worker) -> bool:
        with self._condition:
            worker.wait_until(
                self._condition, lambda: step in self._decided, "drafter-0's decision to go on"
            )
            return self._decided[step]

    def give(self, step: int, sums: list[float]) -> None:
        with self._condition:
            self._sums.setdefault(step, []).append(sums)
            self._condition.notify_all()

    def collect(self, step: int, worker: Worker) -> list[float]:
        """The totals of all drafters up to `step`, added up."""
        with self._condition:
            worker.wait_until(
                self._condition,
                lambda: len(self._sums.get(step, ())) == self._drafters,
                "the totals of the other drafters",
            )
            return [sum(column) for column in zip(*self._sums.pop(step), strict=True)]
