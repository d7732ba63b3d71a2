"""Phases from marks, steps or memory alone, and the stretches of steady state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.judge.evidence import gather
from draftline.signal.judge.phases import SETTLING_STEPS, Phase, find_phases, steady_windows
from draftline.signal.judge.verdict import judge
from draftline.signal.trace import Samples
from tests.support.traces import (
    CONTEXT_MIB,
    RESERVED_MIB,
    START_S,
    Event,
    Trace,
    run,
    sampled,
    shifted,
    stairs,
)

MARKS = ((-1, "load"), (0, "warm"), (4, "run"))
PLATEAU_MIB = RESERVED_MIB + CONTEXT_MIB


def phases(trace: Trace) -> list[Phase]:
    samples = trace.samples[0] if trace.samples else None
    return find_phases(trace, samples, trace.steps[0] if trace.steps else None)


def names(trace: Trace) -> list[str]:
    return [phase.name for phase in phases(trace)]


def named(trace: Trace, name: str) -> Phase:
    return next(phase for phase in phases(trace) if phase.name == name)


def end_of(trace: Trace, step: int) -> float:
    return float(trace.steps[0].time_s[step])


def test_marks_are_the_phases() -> None:
    trace = run(marks=[*MARKS, (99, "evaluate"), (100, "run")])
    assert names(trace) == ["load", "warm", "run", "evaluate", "run", "end"]
    assert [phase.marked for phase in phases(trace)] == [True] * 5 + [False]
    warm = named(trace, "warm")
    assert warm.from_s == pytest.approx(end_of(trace, 0), abs=0.01)
    assert warm.to_s == pytest.approx(end_of(trace, 4), abs=0.01)


def test_what_precedes_the_first_mark_is_the_load() -> None:
    trace = run(marks=[(0, "warm"), (4, "run")])
    first = phases(trace)[0]
    assert (first.name, first.from_s, first.marked) == ("load", START_S, False)


def test_a_run_ends_with_its_last_step_though_the_samples_go_on() -> None:
    trace = run(marks=MARKS, after_s=60)
    assert named(trace, "run").to_s == end_of(trace, -1)
    assert phases(trace)[-1].name == "end"
    assert phases(trace)[-1].seconds == pytest.approx(60, abs=0.3)


def test_a_marked_end_is_kept() -> None:
    trace = run(marks=[*MARKS, (199, "end")])
    assert names(trace) == ["load", "warm", "run", "end"]
    assert phases(trace)[-1].marked


def test_the_same_mark_again_changes_nothing() -> None:
    once = run(marks=[*MARKS, (99, "evaluate"), (101, "run")])
    again = run(
        marks=[*MARKS, (4, "run"), (60, "run"), (99, "evaluate"), (100, "evaluate"), (101, "run")]
    )
    assert phases(again) == phases(once)


@pytest.mark.parametrize("marks", [(), ((-1, "load"),), ((-1, "warm"),), ((50, "evaluate"),)])
def test_without_a_mark_of_the_run_steps_tell(marks: tuple[tuple[int, str], ...]) -> None:
    trace = run(marks=marks)
    assert names(trace) == ["load", "warm", "run", "end"]
    assert not any(phase.marked for phase in phases(trace))
    found = named(trace, "run")
    assert end_of(trace, 0) < found.from_s < end_of(trace, 10)
    assert found.to_s == end_of(trace, -1)


def test_marks_of_an_earlier_run_take_nothing_from_this_one() -> None:
    old = [(-900, "load"), (-800, "run"), (-500, "evaluate"), (-490, "run"), (-100, "end")]
    trace = run(marks=MARKS)
    before = tuple(Event(START_S + at, "phase", name) for at, name in old)
    both = replace(trace, events=before + trace.events)
    assert phases(both)[-4:] == phases(trace)
    steps = trace.steps[0]
    assert steady_windows(phases(both), steps) == steady_windows(phases(trace), steps)


mark_names = st.sampled_from(["load", "warm", "run", "evaluate", "checkpoint", "end", "", "tune"])


@given(
    marks=st.lists(st.tuples(st.floats(-50, 80), mark_names), max_size=12), counted=st.booleans()
)
@settings(max_examples=120, deadline=None)
def test_phases_never_overlap(marks: list[tuple[float, str]], counted: bool) -> None:
    said = tuple(Event(START_S + at, "phase", name) for at, name in sorted(marks))
    trace = replace(run(counted=counted), events=said)
    found = phases(trace)
    assert all(phase.seconds > 0 for phase in found)
    assert all(a.to_s <= b.from_s for a, b in pairwise(found))
    windows = steady_windows(found, trace.steps[0] if counted else None)
    assert all(start < stop for start, stop in windows)
    runs = [phase for phase in found if phase.name == "run"]
    assert all(any(p.from_s <= a and b <= p.to_s for p in runs) for a, b in windows)


@given(seconds=st.integers(-(2**30), 2**30), marked=st.booleans(), counted=st.booleans())
@settings(max_examples=20, deadline=None)
def test_phases_move_with_the_clock(seconds: int, marked: bool, counted: bool) -> None:
    trace = run(marks=MARKS if marked else (), counted=counted)
    moved = phases(shifted(trace, seconds))
    assert [p.name for p in moved] == names(trace)
    for one, other in zip(phases(trace), moved, strict=True):
        assert other.from_s - one.from_s == pytest.approx(seconds, abs=1e-5)
        assert other.seconds == pytest.approx(one.seconds, abs=1e-5)


def test_a_warm_up_of_many_compiles_is_no_run() -> None:
    trace = run(compiles=list(range(40)), frames=list(range(40)))
    assert named(trace, "run").from_s == pytest.approx(end_of(trace, 40), abs=0.1)


def test_a_warm_up_longer_than_the_run_still_leaves_a_run() -> None:
    trace = run(40, compiles=list(range(40)), frames=list(range(40)))
    found = named(trace, "run")
    assert found.from_s <= end_of(trace, 10)
    assert found.to_s == end_of(trace, -1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_handful_of_steps_is_no_run(steps: int) -> None:
    trace = replace(run(steps), samples=())
    assert "run" not in names(trace)


def memory(*parts: tuple[float, float], util: float = 97.0) -> Trace:
    """Readings at 5 Hz: each part is seconds and MiB."""
    return sampled(np.concatenate([np.full(round(5 * s), mib) for s, mib in parts]), util_pct=util)


def test_memory_alone_shows_load_run_and_exit() -> None:
    trace = memory((3, 4), (1, 400), (2, 900), (30, PLATEAU_MIB), (3, 4))
    assert names(trace) == ["load", "run", "end"]
    found = named(trace, "run")
    assert found.from_s - START_S == pytest.approx(6, abs=0.3)
    assert found.to_s - START_S == pytest.approx(36, abs=0.3)


def test_an_exit_in_parts_is_not_of_the_run() -> None:
    trace = memory((3, 4), (30, 9000), (0.4, 4000), (0.4, 1200), (0.4, 600), (3, 4))
    assert named(trace, "run").to_s - START_S == pytest.approx(33, abs=0.3)


def test_an_idle_tail_that_computes_nothing_is_not_of_the_run() -> None:
    trace = sampled(np.full(300, 9000.0), util_pct=np.r_[np.full(200, 97.0), np.zeros(100)])
    used = trace.samples[0].used_bytes
    used[:20] = 0
    assert named(trace, "run").to_s - START_S == pytest.approx(0.2 * 199, abs=0.3)


def test_a_device_that_never_moves_is_one_run() -> None:
    assert [(p.name, round(p.seconds, 1)) for p in phases(memory((30, 9000)))] == [("run", 29.8)]


def test_unknown_readings_are_no_idle_ones() -> None:
    trace = memory((3, 4), (30, PLATEAU_MIB), (3, 4))
    trace.samples[0].used_bytes[60:70] = np.nan
    trace.samples[0].util_pct[:] = np.nan
    assert named(trace, "run").seconds == pytest.approx(30, abs=0.5)


def test_a_long_warm_up_in_memory_is_left_out() -> None:
    trace = sampled(stairs(300, [20, 50, 80, 110], 4.0, 800))
    assert named(trace, "run").from_s - START_S >= 0.2 * 109


def test_nothing_has_no_phases() -> None:
    assert phases(Trace()) == []
    assert phases(sampled([])) == []


def test_the_first_steps_after_a_mark_are_not_steady() -> None:
    trace = run(marks=[*MARKS, (99, "evaluate"), (100, "run")])
    (a, b), (c, d) = steady_windows(phases(trace), trace.steps[0])
    assert a == end_of(trace, 4 + SETTLING_STEPS)
    assert b == pytest.approx(end_of(trace, 99), abs=0.01)
    assert c == end_of(trace, 100 + SETTLING_STEPS)
    assert d == end_of(trace, -1)


def test_a_stretch_too_short_to_settle_is_no_steady_state() -> None:
    marks = [*MARKS, *((n, "evaluate" if n % 6 else "run") for n in range(99, 130, 3))]
    trace = run(marks=marks)
    for start, stop in steady_windows(phases(trace), trace.steps[0]):
        inside = (trace.steps[0].time_s > start) & (trace.steps[0].time_s <= stop)
        assert inside.any()


def windows(trace: Trace) -> list[tuple[float, float]]:
    return gather(trace)[0].windows


def breaks(trace: Trace) -> list[int]:
    return [int(n) for n in np.flatnonzero(gather(trace)[0].breaks)]


def test_unmarked_pauses_are_cut_out() -> None:
    every = [50, 100, 150]
    trace = run(step_s={-1: 0.04} | dict.fromkeys(every, 1.5))
    assert breaks(trace) == every
    found = windows(trace)
    assert len(found) == 4
    for step, (_, before), (after, _) in zip(every, found, found[1:], strict=False):
        assert before == end_of(trace, step - 1)
        assert after == end_of(trace, step + SETTLING_STEPS)


def test_one_long_lull_is_cut_out_and_a_short_one_is_not() -> None:
    assert breaks(run(step_s={-1: 0.04, 120: 5.0})) == [120]
    assert breaks(run(step_s={-1: 0.04, 120: 0.2})) == []


@pytest.mark.parametrize("name", ["compiles", "frames", "recompiles", "retries"])
def test_a_step_that_compiled_or_retried_is_no_pause(name: str) -> None:
    every = [50, 100, 150]
    slow = {-1: 0.04} | dict.fromkeys(every, 1.5)
    assert breaks(run(step_s=slow, **{name: [0, *every]})) == []


def test_steps_that_are_often_long_are_no_pauses() -> None:
    every = list(range(10, 200, 5))
    assert breaks(run(step_s={-1: 0.04} | dict.fromkeys(every, 0.2))) == []


def test_irregular_long_steps_are_no_pauses() -> None:
    assert breaks(run(step_s={-1: 0.04} | dict.fromkeys([20, 25, 120], 0.2))) == []


@pytest.mark.parametrize(
    ("rises_h", "shape"),
    [((1, 2, 4, 8), "staircase"), ((5,), "flat"), ((), "flat"), ((0.1,), "flat")],
)
def test_hours_of_growth_are_no_start(rises_h: tuple[float, ...], shape: str) -> None:
    """Ten hours of a busy device of which only its memory is known."""
    times = np.arange(0, 36000, 5.0)
    used = 40 * 2.0**30 + sum((times >= 3600 * h) * 2.0**31 for h in rises_h)
    util = np.where(times < 60, 0.0, 98.0)
    samples = Samples("0", times, np.broadcast_to(used, times.shape).copy(), util)
    [device] = judge(Trace(samples=(samples,))).devices
    assert device.shape == shape
    assert next(p.seconds for p in device.phases if p.name == "run") > 34000
