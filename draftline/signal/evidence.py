"""What one device's part of a trace shows in its steady state, in the terms that causes are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from draftline.signal.phases import (
    PAUSES,
    SETTLING_STEPS,
    Phase,
    find_phases,
    steady_windows,
)
from draftline.signal.shape import MIB, Shape, counted, find_shape
from draftline.signal.trace import Column, Event, Program, Samples, Snapshot, Steps, Trace

# The allocator's own figures are exact: what moves by less is one small segment.
ALLOCATOR_TOLERANCE_BYTES = 2 * MIB
# A step this much longer than the usual one had something else in it: an unmarked pause, if there are
# few of them and they come regularly. A single one must be longer.
_PAUSE_TIMES = 3.0
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.05
_LULL_TIMES = 8.0
_LULL_S = 0.25


@dataclass(frozen=True)
class Evidence:
    """One device: its `samples` (driver), `steps` (counters) and `snapshots`, whichever there are."""

    device: str
    trace: Trace
    samples: Samples | None
    steps: Steps | None
    snapshots: tuple[Snapshot, ...]

    @property
    def of_program(self) -> bool:
        """Whether the program may use this device: no steps say that it uses others."""
        return self.steps is not None or not self.trace.steps

    @cached_property
    def phases(self) -> list[Phase]:
        return find_phases(self.trace, self.samples, self.steps)

    @cached_property
    def windows(self) -> list[tuple[float, float]]:
        """The stretches of the steady state: of the run phases, between unmarked pauses."""
        found = steady_windows(self.phases, self.steps)
        if self.steps is None:
            return found
        times = self.steps.time_s
        for index in np.flatnonzero(self.breaks).tolist():
            after = float(times[min(index + SETTLING_STEPS, len(times) - 1)])
            before = float(times[index - 1])
            found = [
                part
                for start, stop in found
                for part in (
                    [(start, before), (after, stop)] if start < before < stop else [(start, stop)]
                )
                if part[1] > part[0]
            ]
        return found

    @property
    def program(self) -> Program:
        return self.trace.program or Program()

    @cached_property
    def sampled_windows(self) -> list[tuple[float, float]]:
        """The steady state for samples: one period less at each end, since a driver's reading and its
        time are not of the same moment."""
        if self.samples is None or len(self.samples.time_s) < 3:
            return self.windows
        period = float(np.median(np.diff(self.samples.time_s)))
        return [(a + period, b - period) for a, b in self.windows if b - a > 2 * period]

    @cached_property
    def seconds(self) -> float:
        """Length of the steady state."""
        return sum(stop - start for start, stop in self.windows)

    @cached_property
    def inside(self) -> npt.NDArray[np.bool_]:
        """Which steps [n] lie, with their whole length, in the steady state; the first never does."""
        if self.steps is None:
            return np.zeros(0, bool)
        times = self.steps.time_s
        found = np.zeros(len(times), bool)
        for start, stop in self.windows:
            held = (times >= start) & (times <= stop)
            found[1:] |= held[1:] & held[:-1]
        return found

    @cached_property
    def breaks(self) -> npt.NDArray[np.bool_]:
        """Which steps [n] had an unmarked pause in them: much longer than the usual step without a
        compile or a retry, rare, and at about equal distances."""
        steps = self.steps
        if steps is None or len(steps.time_s) < 3:
            return np.zeros(0 if steps is None else len(steps.time_s), bool)
        length = np.nan_to_num(np.diff(steps.time_s, prepend=np.nan), nan=0.0)
        usual = float(np.median(length[1:]))
        long = (length > _PAUSE_TIMES * usual) & (length > usual + _PAUSE_S)
        for name in ("compiles", "frames", "recompiles", "retries"):
            column = steps.known(name)
            if column is not None:
                long[1:] &= ~(np.diff(column) > 0)
        apart = np.diff(np.flatnonzero(long))
        regular = len(apart) >= 1 and float(np.ptp(apart)) <= 0.5 * float(np.median(apart))
        if regular and long.sum() <= max(2.0, _PAUSE_SHARE * len(long)):
            return long
        found: npt.NDArray[np.bool_] = long & (length > max(_LULL_TIMES * usual, _LULL_S))
        return found

    @property
    def count(self) -> int:
        """Steps in the steady state, those between two sparse records included."""
        return int(self.between.sum()) if self.steps is not None else 0

    @cached_property
    def between(self) -> Column:
        """Steps that each steady record stands for."""
        assert self.steps is not None
        return np.diff(self.steps.number, prepend=np.nan)[self.inside]

    def known(self, name: str) -> bool:
        return self.steps is not None and self.steps.known(name) is not None

    def gained(self, name: str) -> Column:
        """Growth of a total at each steady record; empty where it is unknown."""
        column = self.steps.known(name) if self.steps is not None else None
        if column is None:
            return np.empty(0)
        growth = np.diff(column, prepend=np.nan)[self.inside]
        return growth[np.isfinite(growth)]

    def grown(self, name: str) -> float | None:
        """Growth of a total over the steady state, None where it is unknown."""
        growth = self.gained(name)
        return float(growth.clip(min=0).sum()) if len(growth) else None

    def since_first(self, name: str) -> float | None:
        """Growth of a total from the first record to the last, None where it is unknown."""
        column = self.steps.known(name) if self.steps is not None else None
        if column is None:
            return None
        known = column[np.isfinite(column)]
        return float(known[-1] - known[0])

    def total(self, name: str) -> float | None:
        """The last known reading of a total, over the whole run."""
        column = self.steps.known(name) if self.steps is not None else None
        return None if column is None else float(column[np.isfinite(column)][-1])

    def level(self, name: str) -> Column:
        """Readings of a level at the steady records."""
        column = self.steps.known(name) if self.steps is not None else None
        if column is None:
            return np.empty(0)
        values = column[self.inside]
        return values[np.isfinite(values)]

    def events(self, kind: str, *, steady: bool = True) -> list[Event]:
        """Events of this device, and those of none that are its program's, in the steady state or in the
        whole trace."""
        return [
            event
            for event in self.trace.events
            if event.kind == kind
            and (event.device == self.device or (event.device is None and self.of_program))
            and (not steady or any(a <= event.time_s <= b for a, b in self.windows))
        ]

    def _shape(self, name: str) -> Shape:
        column = self.steps.known(name) if self.steps is not None else None
        if column is None or self.steps is None:
            return Shape("unknown", f"{name} is not recorded")
        kept = np.where(self.inside, column, np.nan)
        return find_shape(self.steps.time_s, kept, self.windows, ALLOCATOR_TOLERANCE_BYTES)

    @cached_property
    def seen(self) -> Shape:
        """Of the device's memory as the driver sees it."""
        if self.samples is None:
            return Shape("unknown", "the device was not sampled")
        return find_shape(self.samples.time_s, self.samples.used_bytes, self.sampled_windows)

    @cached_property
    def held(self) -> Shape:
        """Of what the caching allocator holds."""
        return self._shape("reserved_bytes")

    @cached_property
    def floor(self) -> Shape:
        """Of what tensors occupy between two steps."""
        return self._shape("allocated_bytes")

    @cached_property
    def others(self) -> tuple[Shape, int | None] | None:
        """The memory of the other process that moves most, and its id; where processes are hidden, the
        device's own while this program's allocator stands still, and None. None where it cannot be told."""
        samples = self.samples
        if samples is None:
            return None
        pids = samples.by_process
        own = self.program.pid
        if pids and own in pids:
            shapes = [
                (find_shape(samples.time_s, np.nan_to_num(column), self.sampled_windows), pid)
                for pid, column in pids.items()
                if pid != own
            ]
            moving = [s for s in shapes if s[0].kind not in ("flat", "unknown") or s[0].cycles]
            return max(moving, key=lambda s: s[0].range_bytes, default=None)
        if self.held.kind == "flat" and self.seen.kind != "unknown":
            return self.seen, None
        return None

    @cached_property
    def pauses(self) -> list[str]:
        """What interrupted the steps, in words; empty where nothing did."""
        marked = [phase for phase in self.phases if phase.name in PAUSES]
        found = []
        for name in PAUSES:
            lengths = [phase.seconds for phase in marked if phase.name == name]
            if lengths:
                noun = "evaluation" if name == "evaluate" else name
                found.append(f"{counted(len(lengths), noun)} of about {np.median(lengths):.1f} s")
        if not marked and self.steps is not None:
            times = self.steps.time_s
            running = np.zeros(len(times), bool)
            for phase in self.phases:
                if phase.name == "run":
                    running |= (times > phase.from_s) & (times <= phase.to_s)
            length = np.diff(times, prepend=np.nan)[self.breaks & running]
        else:
            length = np.empty(0)
        if (count := len(length)) >= 2:
            found.append(
                f"{count} regular breaks of about {np.median(length):.1f} s that nobody marked, as "
                "evaluations or checkpoints make"
            )
        return found


def gather(trace: Trace) -> list[Evidence]:
    """The evidence of every device of a trace."""
    return [
        Evidence(
            device=name,
            trace=trace,
            samples=next((s for s in trace.samples if s.device == name), None),
            steps=next((s for s in trace.steps if s.device == name), None),
            snapshots=tuple(s for s in trace.snapshots if s.device == name),
        )
        for name in trace.devices
    ]
