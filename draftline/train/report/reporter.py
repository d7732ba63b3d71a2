"""A run's numbers on their way from the drafters to the log."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.runtime.memory import MemoryBaseline
from draftline.runtime.ring import WaitMeter
from draftline.train.report.trackers import Trackers
from draftline.train.step.heldout import HeldOutScore
from draftline.train.step.totals import summarize

log = logging.getLogger(__name__)

# Step, totals, when its last step was queued, and what was measured after it.
_Report = tuple[int, list[float], float, HeldOutScore | None]


@dataclass(frozen=True, slots=True)
class Scale:
    """What turns steps into rates: `rows` and `tokens` per step, `steps` of the whole run."""

    rows: int
    tokens: int
    steps: int


class Reporter:
    """Takes totals from the lead's thread, and writes metrics in the thread that calls `drain`."""

    def __init__(
        self,
        scale: Scale,
        *,
        rate_at: Callable[[int], float],
        epoch_at: Callable[[int], int],
        spent_before_s: float,
        first_step: int,
    ) -> None:
        """`rate_at(step)` and `epoch_at(step)` are the learning rate and epoch of 0-based `step`."""
        self._scale = scale
        self._rate_at, self._epoch_at = rate_at, epoch_at
        self._spent_before_s = spent_before_s
        self._reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
        self._began = time.perf_counter()
        self._logged = (first_step, self._began)
        self._paused_s = 0.0
        self._waits: Mapping[str, Sequence[WaitMeter]] = {}
        self._carried: dict[str, float] = {}
        self._memory = MemoryBaseline([])

    def begin(self, memory: MemoryBaseline, waits: Mapping[str, Sequence[WaitMeter]]) -> None:
        """Everything is warm: the clock starts."""
        self._memory, self._waits = memory, waits
        for meters in waits.values():
            _read(meters)
        self._began = time.perf_counter()
        self._logged = (self._logged[0], self._began)

    @property
    def seconds(self) -> float:
        """Training time so far, earlier processes of the run included."""
        return self._spent_before_s + time.perf_counter() - self._began

    def put(
        self, step: int, sums: list[float], at: float, score: HeldOutScore | None = None
    ) -> None:
        """The totals up to `step`, whose last step was queued at `at` (perf_counter), and what was
        measured after it."""
        self._reports.put((step, sums, at, score))

    def drain(self, trackers: Trackers) -> None:
        """Writes what has come; raises RunError for a loss or gradient that was not finite."""
        while not self._reports.empty():
            self._write(trackers, *self._reports.get())

    def _write(
        self,
        trackers: Trackers,
        step: int,
        sums: list[float],
        at: float,
        score: HeldOutScore | None,
    ) -> None:
        values: dict[str, Any] = summarize(sums)
        before, since = self._logged
        self._logged = (step, at)
        whole_s = max(at - since, 1e-9)
        # Measuring is not training: rates are those of steps.
        seconds = max(whole_s - self._paused_s, 1e-9)
        self._paused_s = 0.0 if score is None else score.heldout_s
        rate = (step - before) / seconds
        values |= {
            "learning_rate": self._rate_at(step - 1),
            "epoch": self._epoch_at(step - 1),
            "seconds": self._spent_before_s + at - self._began,
            "step_ms": 1000 / rate,
            "tokens_per_s": rate * self._scale.tokens,
            "rows_per_s": rate * self._scale.rows,
            "eta_s": (self._scale.steps - step) / rate,
        }
        for side, meters in self._waits.items():
            # A wait is measured when it ends; what began before this stretch fills it at most.
            waited = self._carried.get(side, 0.0) + _read(meters)
            whole = whole_s * len(meters)
            values[f"{side}_waited_pct"] = 100 * min(waited, whole) / whole
            self._carried[side] = max(0.0, waited - whole)
        for change in self._memory.changes():
            values[f"reserved_gib/{change.device}"] = change.reserved_bytes / 2**30
            values[f"allocator_calls/{change.device}"] = change.allocator_calls
        if score is not None:
            values |= score.metrics()
        trackers.metrics(step, values)
        if values["bad_steps"] or values["bad_packs"]:
            raise RunError(
                f"a non-finite loss or gradient in the {step - before} steps up to {step} (those "
                "updates were skipped); lower train.learning_rate or look for damaged features, "
                "then continue with --resume --accept-changes where a checkpoint was written"
            )

    def say_memory(self, runlog: RunLog) -> None:
        """What the allocators did since the seal, in the log and as events."""
        for change in self._memory.changes():
            runlog.event("memory", asdict(change))
            log.log(
                logging.INFO if change.flat else logging.WARNING,
                "memory of %s since the seal: reserved %.2f GiB, changed by %.1f MiB; %d allocator "
                "calls, %d device allocations, %d retries",
                change.device,
                change.reserved_bytes / 2**30,
                change.reserved_change_bytes / 2**20,
                change.allocator_calls,
                change.device_allocations,
                change.retries,
            )


def _read(meters: Sequence[WaitMeter]) -> float:
    return sum(meter.read() for meter in meters)
