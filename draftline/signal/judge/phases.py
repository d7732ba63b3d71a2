"""The phases of a run on one device, and the stretches in which its memory should stand still."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from draftline.signal.judge.shape import IDLE_BYTES, TOLERANCE_BYTES, is_line
from draftline.signal.trace import Column, Samples, Steps, Trace

PAUSES = ("evaluate", "checkpoint")
GAP = "not recorded"  # nothing is known of it
_GAP_PERIODS = 5
_RARE = 0.05
_THINNED_S = 4.5  # the recorder writes at least every four seconds
# Steps left out after each pause and at the start: a cache that was emptied fills, kernels load.
SETTLING_STEPS = 3
# A plateau at the end of an unmarked recording counts as the steady state from here on.
_PLATEAU_READINGS = 20
_PLATEAU_SHARE = 0.25
# Without a mark or a plateau at most this share of a recording is taken for warm-up, and never more time:
# what rises for hours is no start.
_WARM_SHARE = 0.4
LONGEST_START_S = 900.0
_QUIET_STEPS = 8
_WORKING_READINGS = 5


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase from `from_s` to `to_s` (the trace's clock); `marked` by the program, or inferred."""

    name: str
    from_s: float
    to_s: float
    marked: bool

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


def find_phases(trace: Trace, samples: Samples | None, steps: Steps | None) -> list[Phase]:
    """The phases of one device in order, from the program's marks, else its steps, else its memory."""
    ends = [column.time_s for column in (samples, steps) if column is not None]
    ends = [times for times in ends if len(times)]
    if not ends:
        return []
    first, last = min(float(t[0]) for t in ends), max(float(t[-1]) for t in ends)
    marks = [e for e in trace.events if e.kind == "phase"]
    if any(mark.text == "run" for mark in marks):
        done = last if steps is None or not len(steps.time_s) else float(steps.time_s[-1])
        found = _marked([(e.time_s, e.text) for e in marks], first, last, done)
        warmed = any(phase.name == "warm" for phase in found)
        return found if warmed or steps is None else _warmed_in_run(found, steps)
    if steps is not None and len(steps.time_s) > SETTLING_STEPS:
        return _from_steps(steps, first, last)
    if samples is not None:
        return _from_episodes(samples)
    return []


def find_gaps(time_s: Column) -> npt.NDArray[np.intp]:
    """Indices of the readings after which nothing was recorded for long: more than five usual periods,
    where that is rare, and in any case more than the recorder leaves out of what tells nothing new."""
    between = np.diff(time_s)
    if len(between) < 2:
        return np.empty(0, np.intp)
    long = between > _GAP_PERIODS * float(np.median(between))
    if long.mean() > _RARE:
        long &= between > max(_GAP_PERIODS * float(np.quantile(between, 0.9)), _THINNED_S)
    return np.flatnonzero(long)


def observed(time_s: Column) -> float:
    """Seconds from the first reading to the last, without the gaps."""
    if len(time_s) < 2:
        return 0.0
    return float(time_s[-1] - time_s[0] - np.diff(time_s)[find_gaps(time_s)].sum())


def _from_episodes(samples: Samples) -> list[Phase]:
    """The phases of every program's stay on the device, cut where nothing was recorded.

    A gap, or a stretch in which the device is idle, ends a stay where memory is another afterwards; what
    goes on behind a gap is one stay, and the gap none of its time.
    """
    known = np.isfinite(samples.used_bytes)
    times, used, util = samples.time_s[known], samples.used_bytes[known], samples.util_pct[known]
    whole = samples.time_s
    # A reading without a value was made: it is no gap.
    gaps: list[int] = [
        int(n) for n in np.searchsorted(times, whole[find_gaps(whole)], side="right") - 1
    ]
    gaps = [n for n in gaps if 0 <= n < len(times) - 1]
    ends = {n for n in gaps if _ended(used, n)} | set(_idle_starts(used, util))
    found: list[Phase] = []
    for first, last in pairwise([0, *sorted(n + 1 for n in ends), len(times)]):
        inside = [n for n in gaps if first <= n < last - 1]
        clock = times[first:last].copy()
        for n in inside:  # the clock stands still in a gap
            clock[n + 1 - first :] -= times[n + 1] - times[n]
        clock += np.arange(last - first) * 1e-6  # and rises all the same
        if ends and used[first:last].max() <= IDLE_BYTES:
            # A single reading that computes without memory parts no idle stretch.
            joined = found.pop() if found and found[-1].name == "idle" else None
            start = float(times[first]) if joined is None else joined.from_s
            found.append(Phase("idle", start, float(times[last - 1]), marked=False))
            continue
        stay = replace(
            samples,
            time_s=clock,
            used_bytes=used[first:last],
            util_pct=util[first:last],
            by_process={},
        )
        for phase in _from_memory(stay):
            a, b = (int(np.searchsorted(clock, at)) + first for at in (phase.from_s, phase.to_s))
            cuts = [n for n in inside if a <= n < b]
            for start, stop in pairwise([a - 1, *cuts, b]):
                low, high = float(times[start + 1]), float(times[min(stop, last - 1)])
                if high > low:
                    found.append(replace(phase, from_s=low, to_s=high))
    found += [Phase(GAP, float(times[n]), float(times[n + 1]), marked=False) for n in gaps]
    return sorted(found, key=lambda phase: phase.from_s)


def _ended(used: Column, gap: int) -> bool:
    """Whether the program before a gap is gone behind it, or another one has come."""
    before, after = float(used[gap]), float(used[gap + 1])
    return after < 0.5 * before - TOLERANCE_BYTES or before < 0.5 * after - TOLERANCE_BYTES


def _idle_starts(used: Column, util: Column) -> list[int]:
    """Readings before each stretch without any program between two with one, and its last reading."""
    idle = (used <= IDLE_BYTES) & ~(util > 0)
    edges = np.flatnonzero(np.diff(idle.astype(int))).tolist()
    found: list[int] = []
    for start, stop in pairwise(edges):
        if idle[start + 1] and stop - start >= _WORKING_READINGS:
            found += [start, stop]
    return found


def _marked(marks: list[tuple[float, str]], first: float, last: float, done: float) -> list[Phase]:
    """`done` is when the last step ended: a program that does not mark its end goes on until then."""
    found: list[Phase] = []
    if marks[0][0] > first and marks[0][1] != "load":
        found.append(Phase("load", first, marks[0][0], marked=False))
    for (start, name), (end, _) in pairwise([*marks, (max(last, marks[-1][0]), "")]):
        if found and found[-1].name == name:
            start = found.pop().from_s
        if end > start:
            found.append(Phase(name, start, end, marked=True))
    if found and found[-1].name == "run" and found[-1].from_s < done < found[-1].to_s:
        run = found.pop()
        found += [replace(run, to_s=done), Phase("end", done, run.to_s, marked=False)]
    return found


def _warmed_in_run(phases: list[Phase], steps: Steps) -> list[Phase]:
    """The first run phase of a program that marks no warm-up, split where its steps have settled."""
    index = next((i for i, phase in enumerate(phases) if phase.name == "run"), None)
    if index is None:
        return phases
    run = phases[index]
    inside = (steps.time_s > run.from_s) & (steps.time_s <= run.to_s)
    if inside.sum() <= SETTLING_STEPS + _QUIET_STEPS:
        return phases
    part = replace(
        steps,
        number=steps.number[inside],
        time_s=steps.time_s[inside],
        wall_ms=steps.wall_ms[inside],
        values={name: column[inside] for name, column in steps.values.items()},
    )
    settled = float(part.time_s[_settled(part)])
    warm = Phase("warm", run.from_s, settled, marked=False)
    return [*phases[:index], warm, replace(run, from_s=settled), *phases[index + 1 :]]


def _from_steps(steps: Steps, first: float, last: float) -> list[Phase]:
    begin = (
        float(steps.time_s[0] - steps.wall_ms[0] / 1000) if np.isfinite(steps.wall_ms[0]) else None
    )
    begin = float(steps.time_s[0]) if begin is None else max(first, begin)
    settled = float(steps.time_s[_settled(steps)])
    done = float(steps.time_s[-1])
    parts = [("load", first, begin), ("warm", begin, settled), ("run", settled, done)]
    parts.append(("end", done, last))
    return [Phase(name, a, b, marked=False) for name, a, b in parts if b > a]


def _settled(steps: Steps) -> int:
    """Index of the step after which no step, or for some steps none, compiled or took device memory."""
    count = len(steps.time_s)
    moving = np.zeros(count, bool)
    for name in ("frames", "compiles", "captures", "device_allocations"):
        column = steps.known(name)
        if column is not None:
            moving[1:] |= np.diff(column) > 0
    # What moved in the first half only was a long warm-up.
    last = int(np.flatnonzero(moving)[-1]) if moving.any() else 0
    if SETTLING_STEPS <= last < count // 2 and count - last >= _PLATEAU_READINGS:
        return last
    limit = max(SETTLING_STEPS, min(count // 4, 30))
    for index in range(SETTLING_STEPS, limit):
        if not moving[index + 1 : index + 1 + _QUIET_STEPS].any():
            return index
    return min(limit, count - 1)


def _from_memory(samples: Samples) -> list[Phase]:
    """Idle, rise, plateau and exit of a device of which only the memory is known."""
    known = np.isfinite(samples.used_bytes)
    times, used = samples.time_s[known], samples.used_bytes[known]
    if len(times) < 2:
        return []
    idle = min(float(used[0]), float(used[-1]))
    busy = np.flatnonzero(used > idle + max(0.05 * (used.max() - idle), TOLERANCE_BYTES))
    if len(busy) == 0 or used.max() - idle <= TOLERANCE_BYTES or is_line(times, used):
        return [Phase("run", float(times[0]), float(times[-1]), marked=False)]
    start, stop = int(busy[0]), int(busy[-1])
    # A device that computes is in use, though its memory has not risen since the recording began.
    computes = (samples.util_pct[known] > 0).astype(float)
    in_a_row = np.convolve(computes, np.ones(_WORKING_READINGS), "valid")
    steady = np.flatnonzero(in_a_row > _WORKING_READINGS - 0.5)
    start = min([start, *steady[:1].tolist()])
    # The program's exit frees in parts: leave out what is below half of the usual level at the end.
    usual = float(np.median(used[start : stop + 1]))
    while stop > start and used[stop] < idle + 0.5 * (usual - idle):
        stop -= 1
    # A device that computes nothing any more at the end waits for the exit.
    working = np.flatnonzero(~(samples.util_pct[known][: stop + 1] == 0))
    if len(working) and working[-1] > start:
        stop = int(working[-1])
    begin = _plateau(times[start : stop + 1], used[start : stop + 1]) + start
    parts = [
        ("load", times[0], times[begin]),
        ("run", times[begin], times[stop]),
        ("end", times[stop], times[-1]),
    ]
    return [Phase(name, float(a), float(b), marked=False) for name, a, b in parts if b > a]


def _plateau(times: Column, used: Column) -> int:
    """Index from which the memory stands still to the end, if that is long enough; else of the first
    reading near its later level."""
    highest = np.maximum.accumulate(used[::-1])[::-1]
    lowest = np.minimum.accumulate(used[::-1])[::-1]
    still = int(np.argmax(highest - lowest <= TOLERANCE_BYTES))
    length = float(times[-1] - times[0])
    share = float(times[-1] - times[still]) / length if length else 0.0
    short = float(times[still] - times[0]) <= LONGEST_START_S
    if short and len(times) - still >= _PLATEAU_READINGS and share >= _PLATEAU_SHARE:
        return still
    if is_line(times, used):
        return 0
    later = times >= times[0] + min(_WARM_SHARE * length, LONGEST_START_S)
    level, low = float(np.median(used[later])), float(used[0])
    reached = int(np.argmax(used >= low + 0.9 * (level - low)))
    return min(reached, int(np.argmax(later)))


def steady_windows(phases: list[Phase], steps: Steps | None) -> list[tuple[float, float]]:
    """The `run` stretches without the first steps after each mark or pause."""
    windows = []
    for phase in phases:
        if phase.name != "run":
            continue
        start = phase.from_s
        if steps is not None and phase.marked:
            inside = steps.time_s[(steps.time_s > phase.from_s) & (steps.time_s <= phase.to_s)]
            if len(inside) <= SETTLING_STEPS:
                continue
            start = float(inside[SETTLING_STEPS - 1])
        windows.append((start, phase.to_s))
    return windows
