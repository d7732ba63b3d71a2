"""What one device's part of a trace shows in its steady state, in the terms that causes are judged by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from draftline.signal.judge.breaks import come_regularly, find_breaks, split_at
from draftline.signal.judge.phases import (
    GAP,
    PAUSES,
    Phase,
    find_gaps,
    find_phases,
    observed,
    steady_windows,
)
from draftline.signal.judge.shape import (
    IDLE_BYTES,
    TOLERANCE_BYTES,
    Shape,
    counted,
    find_shape,
    level_of,
)
from draftline.signal.trace import MIB, Column, Event, Program, Samples, Snapshot, Steps, Trace
from draftline.signal.words import duration

# The allocator's own figures are exact: what moves by less is one small segment.
ALLOCATOR_TOLERANCE_BYTES = 2 * MIB


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
        return found if self.steps is None else split_at(found, self.steps, self.breaks)

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
        """Which steps [n] had an unmarked pause in them."""
        return np.zeros(0, bool) if self.steps is None else find_breaks(self.steps)

    @property
    def count(self) -> int:
        """Steps in the steady state, those between two sparse records included."""
        return int(self.between.sum()) if self.steps is not None else 0

    @cached_property
    def between(self) -> Column:
        """Steps that each steady record stands for."""
        assert self.steps is not None
        return np.diff(self.steps.number, prepend=np.nan)[self.inside]

    def _column(self, name: str) -> Column | None:
        return None if self.steps is None else self.steps.known(name)

    def known(self, name: str) -> bool:
        return self._column(name) is not None

    def _growth(self, name: str) -> Column | None:
        """Growth of a total up to each record [n] since the one before; NaN before it is first known.

        An unknown record hands its growth on to the next known one; a counter that fell was reset, so
        its new reading is its growth.
        """
        column = self._column(name)
        if column is None:
            return None
        at = np.maximum.accumulate(np.where(np.isfinite(column), np.arange(len(column)), -1))
        filled = np.where(at >= 0, column[at], np.nan)
        growth = np.diff(filled, prepend=np.nan)
        reset: Column = np.where(growth < 0, filled.clip(min=0), growth)
        return reset

    def gained(self, name: str) -> Column:
        """Growth of a total at each steady record; empty where it is unknown."""
        growth = self._growth(name)
        return np.empty(0) if growth is None else _finite(growth[self.inside])

    def grown(self, name: str) -> float | None:
        """Growth of a total over the steady state, None where it is unknown."""
        growth = self.gained(name)
        return float(growth.sum()) if len(growth) else None

    def since_first(self, name: str) -> float | None:
        """Growth of a total from the first record to the last, None where it is unknown."""
        growth = self._growth(name)
        return None if growth is None else float(np.nansum(growth))

    def total(self, name: str) -> float | None:
        """What a total counted over the whole run, pauses left out; None where it is unknown."""
        growth = self._growth(name)
        if growth is None or self.steps is None:
            return None
        column = self.steps.values[name]
        first = float(column[np.isfinite(column)][0])
        times = self.steps.time_s
        before = np.r_[-np.inf, times[:-1]]
        paused = np.zeros(len(times), bool)
        for phase in self.phases:
            if phase.name in PAUSES:
                paused |= (times > phase.from_s) & (before < phase.to_s)
        paused[0] = False
        return first + float(np.nansum(np.where(paused, 0.0, growth)))

    def steps_between(self, name: str) -> float:
        """Steps from the first to the last steady record in which a level is known, pauses left out."""
        column = self._column(name)
        if column is None or self.steps is None:
            return 0.0
        found = 0.0
        for start, stop in self.windows:
            times = self.steps.time_s
            held = (times >= start) & (times <= stop) & self.inside & np.isfinite(column)
            if held.any():
                numbers = self.steps.number[held]
                found += float(numbers[-1] - numbers[0])
        return found

    def level_growth(self, name: str) -> Column:
        """Change of a level at each steady record; NaN where it is unknown."""
        column = self._column(name)
        return np.empty(0) if column is None else np.diff(column, prepend=np.nan)[self.inside]

    def level(self, name: str) -> Column:
        """Readings of a level at the steady records."""
        column = self._column(name)
        if column is None:
            return np.empty(0)
        return _finite(column[self.inside])

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
        column = self._column(name)
        if column is None or self.steps is None:
            return Shape("unknown", f"{name} is not recorded")
        kept = np.where(self.inside, column, np.nan)
        return find_shape(self.steps.time_s, kept, self.windows, ALLOCATOR_TOLERANCE_BYTES)

    @cached_property
    def seen(self) -> Shape:
        """Of the device's memory as the driver sees it."""
        if self.samples is None:
            return Shape("unknown", "the device was not sampled")
        if not np.isfinite(self.samples.used_bytes).any():
            return Shape("unknown", "the files hold no memory in use (memory.used) of this device")
        samples = self.samples
        used = samples.used_bytes
        known = used[np.isfinite(used)]
        busy = np.nan_to_num(samples.util_pct, nan=0.0) > 0
        if not self._holds_memory and known.max() <= IDLE_BYTES and not busy.any():
            span = observed(samples.time_s)
            words = f"no program used it in {duration(span)}" if span else "no program uses it"
            return Shape("idle", words, level_of(used), float(known.min()), float(known.max()))
        stays = self._stays() if self.steps is None else []
        if len(stays) < 2:
            shape = find_shape(samples.time_s, used, self.sampled_windows)
            shape = shape if shape.level else replace(shape, level=level_of(used))
            return _across_gaps(shape, samples, self.sampled_windows)
        shapes = [find_shape(samples.time_s, used, [stay]) for stay in stays]
        worst = max(shapes, key=lambda s: (s.kind not in ("flat", "unknown"), s.range_bytes))
        told = [
            f"{one.kind} {one.level}: {one.words} ({counted(round(b - a), 'second')})"
            for one, (a, b) in zip(shapes, stays, strict=True)
        ]
        lost = float(np.diff(samples.time_s)[find_gaps(samples.time_s)].sum())
        unknown = f"; nothing is known of {lost:,.0f} s between" if lost else ""
        return replace(worst, words=f"{len(stays)} separate runs, {'; '.join(told[:4])}{unknown}")

    def _stays(self) -> list[tuple[float, float]]:
        """From when to when each of the programs was there that idle stretches and gaps separate."""
        found: list[list[float]] = []
        new, ran = True, False
        for phase in self.phases:
            if phase.name in ("load", "run") and (new or (phase.name == "load" and ran)):
                found.append([phase.from_s, phase.to_s])
                new = False
            elif phase.name in ("load", "run"):
                found[-1][1] = phase.to_s
            new = new or phase.name in ("idle", "end")
            ran = phase.name == "run" or (ran and phase.name == GAP)
        return [(a, b) for a, b in found]

    @property
    def _holds_memory(self) -> bool:
        """Whether the program's own steps say that it holds memory of this device."""
        held = self._column("reserved_bytes")
        return held is not None and float(np.nanmax(held)) > 0

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
        own = pids.get(self.program.pid or -1)
        if own is not None:
            # Where this program is not in the list, the list was not to be had.
            told = np.isfinite(own)
            times = samples.time_s[told]
            shapes = [
                (find_shape(times, np.nan_to_num(column[told]), self.sampled_windows), pid)
                for pid, column in pids.items()
                if pid != self.program.pid
            ]
            moving = [s for s in shapes if s[0].kind not in ("flat", "unknown") or s[0].cycles]
            return max(moving, key=lambda s: s[0].range_bytes, default=None)
        held = self._column("reserved_bytes")
        if held is None or self.steps is None:
            return None
        at = np.searchsorted(self.steps.time_s, samples.time_s, side="right") - 1
        rest = samples.used_bytes - np.where(at >= 0, held[at], np.nan)
        shape = find_shape(samples.time_s, rest, self.sampled_windows)
        # A sample may come before the step's record of what it sees: short excursions say nothing.
        return None if shape.kind in ("flat", "unknown") else (shape, None)

    def kept_by_pauses(self, name: str) -> tuple[int, float] | None:
        """How many pauses raised a level's low readings and by how many bytes in the median, the first
        pause left out; None unless three quarters of at least three did, by more than readings vary
        within the stretches between them."""
        column = self._column(name)
        if column is None or self.steps is None:
            return None
        times = self.steps.time_s
        lows, spreads = [], []
        for start, stop in self.windows:
            level = _finite(column[(times >= start) & (times <= stop)])
            if len(level):
                low, high = np.quantile(level, (0.1, 0.9))
                lows.append(float(low))
                spreads.append(float(high - low))
        kept = np.diff(lows)[1:]
        if len(kept) < 3 or (kept > ALLOCATOR_TOLERANCE_BYTES).mean() < 0.75:
            return None
        usual = float(np.median(kept))
        return (len(kept), usual) if usual > np.median(spreads) else None

    @cached_property
    def pauses(self) -> list[str]:
        """What interrupted the steps, in words; empty where nothing did."""
        runs = [phase for phase in self.phases if phase.name == "run"]
        begun = -np.inf if self.steps is None else float(self.steps.time_s[0])
        marked = [
            phase
            for phase in self.phases
            if phase.name in PAUSES
            and runs
            and max(begun, runs[0].from_s) <= phase.from_s < runs[-1].from_s
        ]
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
            if not come_regularly(self.breaks & running):
                length = np.empty(0)
        else:
            length = np.empty(0)
        if (count := len(length)) >= 2:
            found.append(
                f"{count} regular breaks of about {np.median(length):.1f} s that nobody marked, as "
                "evaluations or checkpoints make"
            )
        return found


def _across_gaps(shape: Shape, samples: Samples, windows: list[tuple[float, float]]) -> Shape:
    """A flat shape is none where memory was another behind a gap: how it came there nobody saw."""
    gaps = find_gaps(samples.time_s)
    if not len(gaps) or not windows:
        return shape
    times, used = samples.time_s, samples.used_bytes
    inside = [n for n in gaps if min(used[n], used[n + 1]) > IDLE_BYTES]
    jumps = np.array([used[n + 1] - used[n] for n in inside if shape.kind == "flat"])
    lost = float(np.diff(times)[gaps].sum())
    words = f"{shape.words}; {lost:,.0f} s were not recorded"
    if len(jumps) and np.nanmax(np.abs(jumps)) > TOLERANCE_BYTES:
        most = float(jumps[np.nanargmax(np.abs(jumps))]) / MIB
        words += (
            f", and behind a gap memory is {abs(most):,.0f} MiB {'more' if most > 0 else 'less'}"
        )
        return replace(shape, kind="unknown", words=words)
    return replace(shape, words=words)


def _finite(column: Column) -> Column:
    found: Column = column[np.isfinite(column)]
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
