"""All that happens between two steps, in its order: go on, finished, held-out measurement, totals,
comparison, checkpoint. Drafter 0, the lead, decides; the others learn of it and give what it needs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from draftline.config.schema import Config
from draftline.runlog import RunLog
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.nodes import Nodes
from draftline.runtime.reduce import Reducer
from draftline.runtime.workers import Stopped, Worker
from draftline.train.features.feed import Position
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.report.reporter import Reporter
from draftline.train.save.saver import Saver
from draftline.train.step.heldout import HeldOut, HeldOutScore
from draftline.train.step.step import TrainStep

log = logging.getLogger(__name__)

Turn = Callable[[], AbstractContextManager[None]]

# Seconds between two looks at whether the disk is done and whether the crew stops.
_LOOK_S = 0.1
# Decisions that are remembered, in steps; no drafter is further behind the lead than one.
_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """After which steps, counted from 1, what is done. `eval_every` is None where nothing is held out."""

    total: int
    log_every: int
    eval_every: int | None
    check_every: int
    checkpoint_every: int

    @classmethod
    def of(cls, config: Config, total: int, *, held_out: bool) -> Schedule:
        """That of a run of `total` steps; `held_out` says that there are held-out conversations."""
        return cls(
            total,
            config.train.log_every,
            config.train.eval_every if held_out else None,
            config.topology.check_every,
            config.train.checkpoint_every,
        )

    def measures(self, step: int) -> bool:
        """Whether the lead is measured on held-out conversations."""
        return self.eval_every is not None and (step % self.eval_every == 0 or step == self.total)

    def reports(self, step: int) -> bool:
        """Whether totals are read."""
        return step % self.log_every == 0 or step == self.total or self.measures(step)

    def compares(self, step: int) -> bool:
        """Whether the drafters' weights are compared."""
        return step % self.check_every == 0

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is taken."""
        return step % self.checkpoint_every == 0


class Lead:
    """The step boundary of a run. Each drafter's thread calls `goes_on` before a step, `cross` when the
    step is queued, and `leave` after its last one; `index` is its drafter.

    `done` is the number of steps that are queued, `score` the last held-out measurement.
    """

    def __init__(
        self,
        schedule: Schedule,
        steps: Sequence[TrainStep],
        *,
        first_step: int,
        tokens_per_step: int,
        position: Callable[[int], Position],
        interrupted: threading.Event,
        heldout: HeldOut | None,
        reducer: Reducer,
        reporter: Reporter,
        saver: Saver | None,
        nodes: Nodes | None,
        gate: CompileGate,
        watch: MemoryWatch,
        runlog: RunLog,
        began: float,
        deadline_s: float,
    ) -> None:
        """`position(step)` is where the pack after `step` steps lies; `saver` is None on a machine that
        writes no checkpoints, `heldout` on one that does not measure; the run `began` then
        (perf_counter)."""
        self.schedule, self.heldout = schedule, heldout
        self.done = self._first = first_step
        self.score: HeldOutScore | None = None
        self._began = began
        self._steps, self._tokens, self._position = list(steps), tokens_per_step, position
        self._interrupted, self._nodes = interrupted, nodes
        self._reducer, self._reporter, self._saver = reducer, reporter, saver
        self._gate, self._watch, self._runlog = gate, watch, runlog
        # Less than anybody's own patience with the lead: other drafters' and other machines'.
        self._patience_s = deadline_s / 2
        self._owed = False
        self._condition = threading.Condition()
        self._decided: dict[int, bool] = {}
        # By drafter the step whose totals are on their way to the host.
        self._reading: list[int | None] = [None] * len(steps)
        self._sums: dict[int, list[list[float]]] = {}
        self._queued: dict[int, float] = {}
        self._scores: dict[int, HeldOutScore] = {}

    def goes_on(self, index: int, worker: Worker, step: int) -> bool:
        """Whether 0-based `step` is trained: the same answer for every drafter of every machine."""
        worker.doing("step boundary", step)
        if index != 0:
            with self._condition:
                worker.wait_until(
                    self._condition, lambda: step in self._decided, "drafter-0's decision to go on"
                )
                return self._decided[step]
        stop = self._interrupted.is_set()
        if self._nodes is not None:
            stop = self._nodes.agree(stop)
        with self._condition:
            recent = {s: a for s, a in self._decided.items() if s > step - _REMEMBERED}
            self._decided = {**recent, step: step < self.schedule.total and not stop}
            self._condition.notify_all()
            return self._decided[step]

    def cross(self, index: int, worker: Worker, step: int, turn: Turn) -> None:
        """Everything that is due when `step` steps are queued. `turn` is entered for work on the device."""
        schedule, lead = self.schedule, index == 0
        worker.doing("step boundary", step)
        if lead:
            self._finished(step)
        if lead and self.heldout is not None and schedule.measures(step):
            self._measure(worker, self.heldout, step, turn)
        self._report(index, worker)
        if schedule.reports(step):
            self._steps[index].totals.begin_read()
            self._reading[index] = step
        if schedule.compares(step):
            self.compare(index, worker, step)
        if lead and self._saver is not None and (self._owed or schedule.saves(step)):
            self._save(worker, self._saver, step)

    def leave(self, index: int, worker: Worker) -> None:
        """Reports what was not yet reported."""
        self._report(index, worker)

    def _finished(self, step: int) -> None:
        self.done = step
        self._watch.step(step, self._tokens)
        if step == self._first + 1:
            seconds = round(time.perf_counter() - self._began, 2)
            self._runlog.event("first_step", {"seconds": seconds})
        if self.schedule.reports(step):
            self._queued[step] = time.perf_counter()

    def _measure(self, worker: Worker, heldout: HeldOut, step: int, turn: Turn) -> None:
        score = heldout.measure(turn, lambda: worker.doing("held-out measurement", step))
        self.score = self._scores[step] = score

    def _report(self, index: int, worker: Worker) -> None:
        """Hands on the totals whose read was begun a step ago, so that no host waits for its device."""
        step = self._reading[index]
        if step is None:
            return
        self._reading[index] = None
        worker.doing("report", step)
        sums = self._steps[index].totals.finish_read()
        with self._condition:
            given = self._sums.setdefault(step, [])
            given.append(sums)
            self._condition.notify_all()
            if index != 0:
                return
            worker.wait_until(
                self._condition,
                lambda: len(given) == len(self._steps),
                "the totals of the other drafters",
            )
            sums = _added(self._sums.pop(step))
        self._gate.check()
        if self._nodes is not None:
            sums = _added(self._nodes.gather(sums))
        self._reporter.put(step, sums, self._queued.pop(step), self._scores.pop(step, None))

    def compare(self, index: int, worker: Worker, step: int) -> None:
        """Raises RunError, in one drafter's thread, when the drafters' weights differ in a bit."""
        worker.doing("comparison of the drafters", step)
        with worker.waiting("the other drafters' checksums"), called_off():
            self._reducer.check_replicas(index, self._steps[index].optimizer.working, step)

    def _save(self, worker: Worker, saver: Saver, step: int) -> None:
        """Takes a checkpoint, unless the one before is still being written and goes on being so: then at
        the first boundary that finds it written. A slow disk makes nobody wait for long."""
        worker.doing("checkpoint", step)
        until = time.monotonic() + self._patience_s
        while not saver.ready(0.0 if self._owed else _LOOK_S):
            worker.check()
            if self._owed:
                return
            if time.monotonic() > until:
                self._put_off(step)
                return
        self._owed = False
        with self._watch.phase("checkpoint"):
            saver.save(step, self._position(step), self._reporter.seconds)

    def _put_off(self, step: int) -> None:
        self._owed = True
        self._runlog.event("checkpoint_put_off", {"step": step})
        log.warning(
            "checkpoint of step %d: the one before it is still being written after another %.0f s; "
            "training goes on, and a checkpoint is taken when that is done. Is the disk of run.dir "
            "slow or full?",
            step,
            self._patience_s,
        )


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


@contextlib.contextmanager
def called_off() -> Iterator[None]:
    """The reducer's own failure is raised in one thread; in the others it only ends the work."""
    try:
        yield
    except threading.BrokenBarrierError:
        raise Stopped from None
