"""What is counted in the steady state: unknown is never zero, sparse records count every step."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.trace import LEVELS, TOTALS
from tests.support.faulty_runs import MARKS
from tests.support.traces import (
    EAGER,
    FLOOR_MIB,
    GIB,
    MIB,
    OTHER_PID,
    RESERVED_MIB,
    START_S,
    Event,
    Trace,
    counter,
    renamed,
    run,
    saw,
    stairs,
)


def seen(trace: Trace) -> Evidence:
    return gather(trace)[0]


def a_step(evidence: Evidence, name: str) -> float:
    grown = evidence.grown(name)
    assert grown is not None
    return grown / evidence.count


def with_column(trace: Trace, name: str, column: object) -> Trace:
    steps = trace.steps[0]
    return replace(
        trace, steps=(replace(steps, values={**steps.values, name: np.asarray(column, float)}),)
    )


def test_growth_and_steps_of_the_steady_state() -> None:
    found = seen(run(marks=MARKS, retries=[0, 2, 50, 50, 150]))
    assert found.count == 192
    assert found.grown("retries") == 3
    assert found.since_first("retries") == 4
    assert found.total("retries") == 5
    assert a_step(found, "allocator_calls") == 64
    assert found.seconds == pytest.approx(192 * 0.04, abs=0.01)


@pytest.mark.parametrize("every", [2, 5, 10])
def test_sparse_records_give_the_same_figures_a_step(every: int) -> None:
    options = {"marks": MARKS, "allocated": FLOOR_MIB + 3.0 * np.arange(600)}
    dense, sparse = (
        seen(run(600, **EAGER, every=n, **options))  # type: ignore[arg-type]
        for n in (1, every)
    )
    assert a_step(sparse, "allocator_calls") == a_step(dense, "allocator_calls") == 900
    assert sparse.count == pytest.approx(dense.count, rel=0.1)
    for found in (dense, sparse):
        assert found.floor.net_bytes / found.count == pytest.approx(3 * MIB, rel=0.05)
    assert sparse.floor.kind == dense.floor.kind == "slope"


@pytest.mark.parametrize("name", TOTALS)
def test_a_total_that_is_absent_or_nan_is_unknown(name: str) -> None:
    absent = run(marks=MARKS, **{name: None})
    for trace in (absent, with_column(absent, name, np.full(200, np.nan))):
        found = seen(trace)
        assert not found.known(name)
        assert found.grown(name) is None
        assert found.since_first(name) is None
        assert found.total(name) is None
        assert len(found.gained(name)) == 0


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_that_is_absent_or_nan_is_unknown(name: str) -> None:
    trace = run(marks=MARKS)
    values = {key: value for key, value in trace.steps[0].values.items() if key != name}
    absent = replace(trace, steps=(replace(trace.steps[0], values=values),))
    for unknown in (absent, with_column(trace, name, np.full(200, np.nan))):
        assert len(seen(unknown).level(name)) == 0
    if name in ("allocated_bytes", "reserved_bytes"):
        shape = seen(absent).floor if name == "allocated_bytes" else seen(absent).held
        assert (shape.kind, name in shape.words) == ("unknown", True)


@given(hidden=st.sets(st.integers(0, 199), max_size=120))
@settings(max_examples=30, deadline=None)
def test_gaps_neither_add_nor_hide_growth(hidden: set[int]) -> None:
    raw = counter(list(range(0, 200, 3)), 200)
    column = raw.copy()
    column[list(hidden)] = np.nan
    found = seen(run(marks=MARKS, retries=column))
    since, grown = found.since_first("retries"), found.grown("retries")
    known = column[np.isfinite(column)]
    assert since == known[-1] - known[0]
    assert grown is None or 0 <= grown <= since


def test_what_grew_while_a_reading_was_missing_is_counted() -> None:
    column = counter([100] * 7, 200)
    column[100] = np.nan
    assert seen(run(marks=MARKS, retries=column)).grown("retries") == 7
    half = counter(900, 200)
    half[100::2] = np.nan
    assert a_step(seen(run(marks=MARKS, allocator_calls=half)), "allocator_calls") == 900


def test_a_counter_that_was_reset_never_counts_backwards() -> None:
    reset = np.r_[counter(64, 100), counter(64, 100)]
    found = seen(run(marks=MARKS, allocator_calls=reset))
    grown = found.grown("allocator_calls")
    assert grown is not None
    assert grown == pytest.approx(192 * 64, rel=0.02)


def test_steps_that_a_pause_touches_are_not_counted() -> None:
    paused = run(
        marks=[*MARKS, (99, "evaluate"), (100, "run")],
        step_s={-1: 0.04, 100: 2.0},
        allocator_calls=np.r_[counter(64, 100), counter(64, 100) + 500_000],
    )
    assert a_step(seen(paused), "allocator_calls") == 64
    unmarked = run(
        step_s={-1: 0.04, 100: 2.0},
        allocator_calls=np.r_[counter(64, 100), counter(64, 100) + 500_000],
    )
    assert a_step(seen(unmarked), "allocator_calls") == 64


def test_events_of_other_devices_and_times_are_not_this_ones() -> None:
    trace = run(
        marks=[*MARKS, (99, "evaluate"), (100, "run")],
        events=[(1, "recompile", "early"), (120, "recompile", "late")],
        step_s={-1: 0.04, 100: 1.0},
    )
    elsewhere = Event(START_S + 9, "recompile", "elsewhere", device="7")
    during = Event(float(trace.steps[0].time_s[100]) - 0.5, "recompile", "evaluating")
    found = seen(replace(trace, events=(*trace.events, elsewhere, during)))
    assert [e.text for e in found.events("recompile")] == ["late"]
    everywhere = {e.text for e in found.events("recompile", steady=False)}
    assert everywhere == {"early", "late", "evaluating"}


def test_shapes_of_device_allocator_and_floor_are_told_apart() -> None:
    found = seen(
        run(
            marks=MARKS,
            allocated=FLOOR_MIB + 2.0 * np.arange(200),
            reserved=stairs(200, [60, 130], 2000.0, [300, 500]),
            others=lambda t: 800.0 * (t * 2 % 2 < 1),
        )
    )
    assert found.floor.kind == "slope"
    assert found.held.kind == "staircase"
    assert found.seen.kind in ("sawtooth", "volatile")


def test_a_sample_at_the_edge_of_a_pause_is_not_judged() -> None:
    trace = run(
        marks=[*MARKS, (99, "evaluate"), (100, "run")],
        step_s={-1: 0.04, 100: 2.0},
        others=lambda t: 3000.0 * (8.9 < t < 11.1),  # a little before and after the marks
    )
    assert seen(trace).seen.kind == "flat"
    assert seen(trace).seen.range_bytes == 0


def busy(t: float) -> float:
    return 9000.0 if t % 2 < 1 else 5000.0


def test_another_process_that_moves_is_told_by_its_id() -> None:
    found = seen(run(marks=MARKS, by_process=True, others=busy)).others
    assert found is not None
    assert (found[0].kind, found[1]) == ("sawtooth", OTHER_PID)
    assert seen(run(marks=MARKS, by_process=True, others=lambda t: 900.0)).others is None


@pytest.mark.parametrize("renumbered", [True, False])
def test_a_program_that_is_not_in_the_list_is_not_told_apart(renumbered: bool) -> None:
    trace = run(marks=MARKS, by_process=renumbered, others=busy)
    samples = trace.samples[0]
    elsewhere = {pid + 1: used for pid, used in samples.by_process.items()}  # another namespace
    found = seen(replace(trace, samples=(replace(samples, by_process=elsewhere),))).others
    assert found is not None
    assert (found[0].kind, found[1]) == ("sawtooth", None)


def test_others_are_unknown_without_samples_and_while_the_allocator_moves() -> None:
    assert seen(run(marks=MARKS, sampled=False)).others is None
    assert seen(run(marks=MARKS, reserved=saw(200, 20, 900, 2000))).others is None


def test_pauses_in_words() -> None:
    assert seen(run(marks=MARKS)).pauses == []
    marks = [
        *MARKS,
        (49, "evaluate"),
        (50, "run"),
        (99, "checkpoint"),
        (100, "run"),
        (149, "evaluate"),
    ]
    slow = {-1: 0.04, 50: 2.0, 100: 0.5, 150: 2.0}
    marked = run(marks=[*marks, (150, "run")], step_s=slow)
    evaluated, saved = seen(marked).pauses
    assert re.fullmatch(r"2 .*evaluat.* 2\.0 s", evaluated)
    assert re.fullmatch(r"1 .*checkpoint.* 0\.5 s", saved)
    unmarked = run(step_s={-1: 0.04} | dict.fromkeys([50, 100, 150], 1.5))
    (words,) = seen(unmarked).pauses
    assert re.match(r"3 .* 1\.5 s", words)
    assert "mark" in words


def test_each_device_has_its_own_evidence() -> None:
    one, two = run(marks=MARKS), renamed(run(marks=MARKS, retries=[50]), "1")
    both = replace(one, samples=one.samples + two.samples, steps=two.steps + one.steps)
    first, second = gather(both)
    assert (first.device, first.grown("retries")) == ("0", 0)
    assert (second.device, second.grown("retries")) == ("1", 1)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_counters_crash_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    anything = st.one_of(st.just(np.nan), st.floats(-1e18, 1e18))
    trace = run(max(count, 2), marks=MARKS[:2] if data.draw(st.booleans()) else ())
    for name in data.draw(st.sets(st.sampled_from([*TOTALS, *LEVELS]), max_size=4)):
        size = len(trace.steps[0].time_s)
        column = data.draw(st.lists(anything, min_size=size, max_size=size))
        trace = with_column(trace, name, column)
    found = seen(trace)
    for name in TOTALS:
        grown = found.grown(name)
        assert grown is None or (np.isfinite(grown) and grown >= 0)
    for shape in (found.held, found.floor, found.seen):
        assert shape.words
    assert found.count >= 0
    assert found.seconds >= 0


def test_a_device_without_readings_in_the_run_is_unknown() -> None:
    trace = run(marks=MARKS)
    samples = trace.samples[0]
    blind = replace(
        trace, samples=(replace(samples, used_bytes=np.full_like(samples.used_bytes, np.nan)),)
    )
    assert seen(blind).seen.kind == "unknown"
    assert seen(run(marks=MARKS)).seen.high_bytes == pytest.approx((RESERVED_MIB + 614) * MIB)
    assert seen(run(marks=MARKS)).seen.high_bytes < 2 * GIB
