"""Made-up traces of training runs, as readers would give them, for tests of the judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from draftline.signal.trace import TOTALS, Column, Event, Program, Samples, Snapshot, Steps, Trace

START_S = 1795959600.0
MIB = 2.0**20
GIB = 2.0**30
TOTAL_MIB = 143_771
CONTEXT_MIB = 614
PID, OTHER_PID = 4242, 77
# What a compiled run of a small model on an H200 showed.
FLOOR_MIB, RESERVED_MIB, INACTIVE_MIB = 342.0, 1284.0, 60.0
COMPILED: Mapping[str, Any] = {
    "allocator_calls": 64,
    "frames": [0],
    "frames_ok": [0],
    "compiles": [0],
    "compile_s": [0],
    "graph_breaks": [],
    "recompiles": [],
    "recompile_limits": [],
    "capture_skips": [],
    "retries": [],
    "ooms": [],
}
EAGER: Mapping[str, Any] = COMPILED | {
    "allocator_calls": 900,
    "frames": [],
    "frames_ok": [],
    "compiles": [],
    "compile_s": [],
}
CAPTURED: Mapping[str, Any] = COMPILED | {
    "allocator_calls": [0] * 200 + [1] * 80,
    "graph_replays": 1,
    "captures": [2],
}

Level = float | Column | Sequence[float]
# Growth at each step, or the steps at which it grows by one (named twice: by two), or the raw counter.
Total = float | Sequence[int] | Column


def run(
    steps: int = 200,
    step_s: float | Mapping[int, float] = 0.04,
    *,
    allocated: Level | None = FLOOR_MIB,
    reserved: Level | None = RESERVED_MIB,
    inactive: Level | None = INACTIVE_MIB,
    peak: Level | None = None,
    tokens: Level | None = 8192.0,
    marks: Sequence[tuple[int, str]] = (),
    events: Iterable[tuple[int, str, str]] = (),
    expects: Iterable[str] = (),
    facts: Mapping[str, Any] | None = None,
    others: Callable[[float], float] | None = None,
    by_process: bool = False,
    beside_mib: float = 0.0,
    period_s: float = 0.2,
    sampled: bool = True,
    counted: bool = True,
    device: str = "0",
    every: int = 1,
    load_s: float = 3.0,
    after_s: float = 2.0,
    start_s: float = START_S,
    **totals: Total | None,
) -> Trace:
    """A run whose step ends are `step_s` apart (some longer: a mapping, -1 for the others) after
    `load_s` and a first step of 2 s.

    Levels are MiB at the end of each step; what the allocator held makes `device_allocations` and
    `device_frees` and, with a context, what the device shows. `totals` overrides COMPILED; None takes a
    counter out. `marks` and `events` come right after the end of the step they name (-1: at the start).
    `others` gives MiB that another process (or the program outside PyTorch) holds, by seconds since the
    start; `by_process` lets the samples tell them apart. `every` records every n-th step only.
    """
    lengths = np.full(steps, step_s[-1] if isinstance(step_s, Mapping) else step_s)
    lengths[0] = 2.0
    for index, length in (step_s if isinstance(step_s, Mapping) else {}).items():
        if index >= 0:
            lengths[index] = length
    ends = start_s + load_s + np.cumsum(lengths)
    held = None if reserved is None else column(reserved, steps)
    if held is not None and not np.ndim(reserved):
        held[: min(2, steps)] = 0.8 * held[-1]
    values: dict[str, Column] = {}
    for name, level, unit in (
        ("allocated_bytes", allocated, MIB),
        ("reserved_bytes", held, MIB),
        ("inactive_bytes", inactive, MIB),
        ("peak_bytes", peak, MIB),
        ("tokens", tokens, 1.0),
    ):
        if level is not None:
            values[name] = unit * column(level, steps)
    for name, total in {**COMPILED, **_segments(held), **totals}.items():
        assert name in TOTALS, name
        if total is not None:
            values[name] = counter(total, steps)
    kept = np.arange(0, steps, every)
    found = Steps(
        device,
        kept.astype(np.float64),
        ends[kept],
        1000 * np.diff(ends[kept], prepend=ends[0] - 2.0),
        {name: value[kept] for name, value in values.items()},
    )
    said = [Event(moment(ends, step, start_s), "phase", name) for step, name in marks]
    said += [Event(moment(ends, step, start_s), kind, text) for step, kind, text in events]
    samples = _samples(
        np.arange(start_s, ends[-1] + after_s, period_s), ends, held, others, by_process, beside_mib
    )
    return Trace(
        samples=(replace(samples, device=device),) if sampled else (),
        steps=(found,) if counted else (),
        events=tuple(sorted(said, key=lambda event: event.time_s)),
        program=Program("train.py", PID, frozenset(expects), facts or {}) if counted else None,
        sources=("made-up",),
    )


def column(level: Level, steps: int) -> Column:
    return np.array(np.broadcast_to(np.asarray(level, dtype=np.float64), (steps,)))


def counter(total: Total, steps: int) -> Column:
    if isinstance(total, np.ndarray):
        return total.astype(np.float64)
    if isinstance(total, int | float):
        return float(total) * np.arange(1, steps + 1)
    gained = np.zeros(steps)
    np.add.at(gained, np.asarray(list(total), dtype=np.intp), 1.0)
    return np.cumsum(gained)


def moment(ends: Column, step: int, start_s: float) -> float:
    return float(ends[step]) + 0.001 if step >= 0 else start_s


def _segments(held: Column | None) -> dict[str, Column]:
    if held is None:
        return {}
    change = np.diff(held, prepend=0.0)
    taken = np.where(change > 0, np.ceil(change / 512), 0)
    freed = np.where(change < 0, np.ceil(-change / 512), 0)
    return {"device_allocations": np.cumsum(taken), "device_frees": np.cumsum(freed)}


def _samples(
    times: Column,
    ends: Column,
    held: Column | None,
    others: Callable[[float], float] | None,
    by_process: bool,
    beside_mib: float,
) -> Samples:
    done = np.searchsorted(ends, times, side="right")
    levels = np.full(len(ends), RESERVED_MIB) if held is None else held
    own = np.where(done > 0, levels[np.maximum(done - 1, 0)], 0.0) + CONTEXT_MIB
    own = np.where(times > ends[-1] + 1.0, 0.0, own)
    other = np.array([others(t - times[0]) if others else 0.0 for t in times.tolist()])
    return Samples(
        "0",
        times,
        MIB * (own + other + beside_mib),
        np.where((times > ends[0] - 2.0) & (times < ends[-1]), 97.0, 0.0),
        MIB * TOTAL_MIB,
        {PID: MIB * own, OTHER_PID: MIB * other} if by_process else {},
    )


def sampled(used_mib: Level, period_s: float = 0.2, util_pct: Level = 97.0) -> Trace:
    """Nothing but a device's memory, MiB at each reading."""
    used = np.asarray(used_mib, dtype=np.float64)
    times = START_S + period_s * np.arange(len(used))
    return Trace(
        samples=(Samples("0", times, MIB * used, column(util_pct, len(used)), MIB * TOTAL_MIB),)
    )


def shot(history_mib: Sequence[float], period_s: float = 0.04, device: str = "0") -> Snapshot:
    """A memory snapshot with that history of allocated memory."""
    level = MIB * np.asarray(history_mib, dtype=np.float64)
    history = np.column_stack([period_s * np.arange(len(level)), level])
    return Snapshot(
        device, 2 * GIB, 1 * GIB, 0.0, 30, history, 0, 0, ((9 * MIB, "train.py:7 step"),)
    )


def saw(count: int, tooth: int, low: float, high: float) -> Column:
    """Linear from low to high within `tooth` entries, then low again."""
    return low + (high - low) * (np.arange(count) % tooth) / max(tooth - 1, 1)


def stairs(count: int, at: Sequence[int], low: float, rise: float | Sequence[float]) -> Column:
    """`low`, higher by `rise` from each of the entries `at` on."""
    level = np.full(count, low)
    for index, height in zip(at, np.broadcast_to(rise, (len(at),)), strict=True):
        level[index:] += height
    return level


def shifted(trace: Trace, seconds: float) -> Trace:
    """The same, at another time."""
    return replace(
        trace,
        samples=tuple(replace(s, time_s=s.time_s + seconds) for s in trace.samples),
        steps=tuple(replace(s, time_s=s.time_s + seconds) for s in trace.steps),
        events=tuple(replace(e, time_s=e.time_s + seconds) for e in trace.events),
    )


def raised(trace: Trace, mib: float) -> Trace:
    """The same, with so much more on the device all the time."""
    return replace(
        trace,
        samples=tuple(replace(s, used_bytes=s.used_bytes + MIB * mib) for s in trace.samples),
    )


def resampled(trace: Trace, period_s: float) -> Trace:
    """The same samples, read at other moments (each time the last reading is repeated)."""
    found = []
    for s in trace.samples:
        times = np.arange(s.time_s[0], s.time_s[-1], period_s)
        last = np.searchsorted(s.time_s, times, side="right") - 1
        by_process = {pid: used[last] for pid, used in s.by_process.items()}
        found.append(
            replace(
                s,
                time_s=times,
                used_bytes=s.used_bytes[last],
                util_pct=s.util_pct[last],
                by_process=by_process,
            )
        )
    return replace(trace, samples=tuple(found))


def renamed(trace: Trace, device: str) -> Trace:
    """The same, on another device."""
    return replace(
        trace,
        samples=tuple(replace(s, device=device) for s in trace.samples),
        steps=tuple(replace(s, device=device) for s in trace.steps),
    )
