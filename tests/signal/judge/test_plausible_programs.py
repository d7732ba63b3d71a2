"""Programs that do nothing wrong, or one thing wrong, in ways that look like something else.

A wrong cause is worse than none: each names what may be said of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftline.signal.judge.verdict import judge
from draftline.signal.trace import join
from draftline.signal.words import FAULTS
from tests.support.faulty_runs import MARKS, STEPS
from tests.support.plausible import AT, QUIET, causes, compiled_at, said, slow
from tests.support.traces import (
    CAPTURED,
    COMPILED,
    EAGER,
    FLOOR_MIB,
    MIB,
    RESERVED_MIB,
    START_S,
    Event,
    counter,
    run,
    saw,
    shifted,
    stairs,
)

both_ways = pytest.mark.parametrize("marks", [MARKS, ()], ids=["marked", "unmarked"])


EVALUATED = [50, 100, 150]
NO_FAULT: dict[str, dict[str, object]] = {
    "gradients of several micro-batches live between steps": {
        "allocated": FLOOR_MIB + np.where(AT % 4 == 3, 0.0, 300.0),
        "allocator_calls": counter(64, STEPS) + 32 * (AT % 4),
    },
    "micro-batches of changing number": {
        "reserved": stairs(STEPS, [10, 22, 47], 3000.0, [512, 256, 128]),
        "tokens": 4096.0 * (1 + AT % 5),
        "peak": FLOOR_MIB + 300.0 * (1 + AT % 5),
    },
    "a finder changes the batch once": {
        "reserved": stairs(STEPS, [100], RESERVED_MIB, 2000),
        "tokens": np.where(AT < 100, 8192.0, 16384.0),
        "peak": np.where(AT < 100, 900.0, 1800.0),
    },
    "a second model once": {
        "reserved": stairs(STEPS, [100], RESERVED_MIB, 800),
        "allocated": stairs(STEPS, [100], FLOOR_MIB, 800),
    },
    "an average from step 150 on": {
        "reserved": stairs(STEPS, [150], RESERVED_MIB, 342),
        "allocated": stairs(STEPS, [150], FLOOR_MIB, 342),
    },
    "NCCL starts lazily": {"others": lambda t: 900.0 * (t > 8)},
    "NCCL starts lazily, late": {"others": lambda t: 900.0 * (t > 11)},
    "a cache of keys that each sequence resets": {
        "allocated": saw(STEPS, 40, FLOOR_MIB, FLOOR_MIB + 800),
        "reserved": 2500.0,
    },
    "a cache of keys and a few long sequences": {
        "allocated": saw(STEPS, 90, FLOOR_MIB, FLOOR_MIB + 1500),
        "reserved": 3000.0,
    },
    "empty_cache once": {"reserved": np.where(AT == 99, 620.0, RESERVED_MIB)},
    "evaluations that pass unmarked": {"step_s": slow(EVALUATED, 1.5)},
    "evaluations that take a segment each": {
        "step_s": slow(EVALUATED, 1.0),
        "reserved": stairs(STEPS, EVALUATED, RESERVED_MIB, 64),
    },
    "a log line each ten steps": {"step_s": slow(list(range(10, STEPS, 10)), 0.08)},
    "a neighbour that stands still": {"others": lambda t: 60_000.0, "by_process": True},
    "a neighbour that ends": {"others": lambda t: 6000.0 * (t < 11), "by_process": True},
    "a neighbour that starts": {"others": lambda t: 6000.0 * (t > 8)},
    "a late compile, once": compiled_at(120),
    "kernels load lazily": {"others": lambda t: 2.0 * (t > 7) + 3.0 * (t > 9) + 2.0 * (t > 11)},
    "workers that pin memory of the host": {"allocator_calls": counter(64, STEPS) + 2 * (AT // 7)},
}


@both_ways
@pytest.mark.parametrize("name", NO_FAULT)
def test_programs_that_do_nothing_wrong(name: str, marks: tuple[tuple[int, str], ...]) -> None:
    trace = run(STEPS, marks=marks, **NO_FAULT[name])  # type: ignore[arg-type]
    assert causes(trace) <= QUIET
    assert judge(trace).exit_code == 0
    assert causes(replace(trace, steps=(), program=None, events=())) <= QUIET
    assert causes(replace(trace, samples=())) <= QUIET


@both_ways
def test_compiles_in_the_first_steps_only(marks: tuple[tuple[int, str], ...]) -> None:
    early = list(range(1, 7))
    trace = run(marks=marks, **compiled_at(*early, recompiles=early), step_s=slow(early, 0.8))
    assert causes(trace) <= QUIET


def test_a_run_that_is_marked_before_its_first_step() -> None:
    early = list(range(1, 10))
    trace = run(marks=[(-1, "run")], **compiled_at(*early), step_s=slow(early, 0.8))
    assert causes(trace) <= QUIET


@both_ways
def test_a_second_model_that_is_compiled_once(marks: tuple[tuple[int, str], ...]) -> None:
    trace = run(
        marks=marks,
        compiles=[0, 100, 100],  # its forward, and its backward in the same step
        frames=[0, 100],
        recompiles=[],
        reserved=stairs(STEPS, [100], RESERVED_MIB, 800),
        allocated=stairs(STEPS, [100], FLOOR_MIB, 800),
    )
    assert "recompiling" not in causes(trace)


@both_ways
def test_a_curriculum_of_four_stages(marks: tuple[tuple[int, str], ...]) -> None:
    trace = run(
        marks=marks,
        reserved=stairs(STEPS, [50, 100, 150], RESERVED_MIB, [600, 800, 1000]),
        tokens=np.repeat([2048.0, 4096.0, 6144.0, 8192.0], 50),
    )
    found = judge(trace).devices[0].causes[0]
    assert (found.cause, found.confidence) != ("unbounded_shapes", "high")


def test_a_graph_that_is_captured_by_hand_needs_no_dynamo() -> None:
    trace = run(marks=MARKS, **(CAPTURED | {"frames": [], "frames_ok": [], "compiles": []}))
    assert causes(trace) <= QUIET


@pytest.mark.parametrize("as_event", [True, False])
def test_one_function_that_is_not_captured_beside_a_captured_step(as_event: bool) -> None:
    if as_event:
        trace = run(marks=MARKS, events=[(2, "capture_skip", "cpu device")], **CAPTURED)
    else:
        trace = run(marks=MARKS, **(CAPTURED | {"capture_skips": [1]}))
    assert causes(trace) <= QUIET


def test_a_graph_break_in_an_evaluation_is_none_of_the_step() -> None:
    trace = run(
        marks=[*MARKS, (99, "evaluate"), (100, "run")],
        step_s={-1: 0.04, 100: 2.0},
        **compiled_at(100, 100, graph_breaks=[100]),
    )
    assert judge(trace).devices[0].causes[0].confidence != "high" or causes(trace) <= QUIET


def test_a_parity_check_against_eager_flex_in_the_warm_up() -> None:
    trace = run(marks=MARKS, events=[(0, "eager_flex", "called without torch.compile")])
    assert judge(trace).devices[0].causes[0].confidence != "high"


def test_a_retry_in_an_evaluation_is_not_of_the_warm_up() -> None:
    trace = run(
        marks=[*MARKS, (99, "evaluate"), (100, "run")], step_s={-1: 0.04, 100: 2.0}, retries=[100]
    )
    assert "warmed up" not in said(trace)


def test_steps_that_are_long_because_they_capture_are_no_pauses() -> None:
    again = list(range(30, STEPS, 30))
    trace = run(
        captures=[2, *again],
        graph_replays=1,
        reserved=np.where(np.isin(AT, again), 900.0, RESERVED_MIB),
        step_s=slow(again, 0.2),
    )
    assert "pause" not in causes(trace)


@pytest.mark.parametrize("kind", ["eager_flex", "graph_break", "recompile_limit", "force_eager"])
def test_a_device_beside_the_program_has_no_fault(kind: str) -> None:
    if kind == "force_eager":
        trace = run(marks=MARKS, expects=["compiled"], facts={"stance": "force_eager"})
    else:
        trace = run(marks=MARKS, events=[(0, kind, "x")])
    samples = trace.samples[0]
    idle = replace(samples, device="1", used_bytes=np.full(len(samples.time_s), 4 * MIB))
    own, other = judge(replace(trace, samples=(samples, idle))).devices
    assert own.faults
    assert not other.faults


def test_a_previous_programs_marks_and_events_are_not_this_ones() -> None:
    trace = run(marks=MARKS)
    before = tuple(
        Event(START_S + at, "phase", name) for at, name in [(-900, "run"), (-500, "end")]
    )
    assert causes(replace(trace, events=before + trace.events)) == {"healthy"}


def test_evaluations_of_a_previous_program_interrupt_nothing() -> None:
    trace = run(marks=MARKS)
    marks = [(-900, "run"), (-500, "evaluate"), (-490, "run"), (-100, "end")]
    before = tuple(Event(START_S + at, "phase", name) for at, name in marks)
    assert causes(replace(trace, events=before + trace.events)) == {"healthy"}


def test_a_check_before_the_first_step_interrupts_nothing() -> None:
    trace = run(marks=[(-1, "evaluate"), (0, "warm"), (4, "run")])
    assert causes(trace) == {"healthy"}


def test_two_programs_in_one_recording_have_no_cause_made_up() -> None:
    first, second = run(marks=MARKS), shifted(run(marks=MARKS), 40)
    a, b = first.steps[0], second.steps[0]
    steps = replace(
        a,
        number=np.r_[a.number, b.number + len(a.number)],
        time_s=np.r_[a.time_s, b.time_s],
        wall_ms=np.r_[a.wall_ms, b.wall_ms],
        values={name: np.r_[a.values[name], b.values[name]] for name in a.values},
    )
    x, y = first.samples[0], second.samples[0]
    samples = replace(
        x,
        time_s=np.r_[x.time_s, y.time_s],
        used_bytes=np.r_[x.used_bytes, y.used_bytes],
        util_pct=np.r_[x.util_pct, y.util_pct],
    )
    events = first.events + second.events
    both = replace(first, steps=(steps,), samples=(samples,), events=events)
    assert causes(both) <= QUIET
    assert causes(replace(both, steps=(), events=())) <= QUIET
    assert causes(replace(both, events=())) <= QUIET
    assert not causes(join([first, second])) & FAULTS


def test_eager_programs_that_never_meant_to_compile() -> None:
    without = {**dict.fromkeys(COMPILED), "allocator_calls": 900, "retries": []}
    assert causes(run(marks=MARKS, **without)) == {"healthy"}
    assert "if the program means to run eagerly, this is no fault" in "".join(
        cause.action for cause in judge(run(marks=MARKS, **EAGER)).devices[0].causes
    )


def test_dynamo_counters_that_were_reset_do_not_mean_that_nothing_was_compiled() -> None:
    reset = np.where(AT < 100, 1.0, 0.0)
    trace = run(marks=MARKS, frames=reset, frames_ok=reset, compiles=reset)
    assert causes(trace) <= QUIET


def test_a_program_that_loads_compiled_code_is_not_surely_uncompiled() -> None:
    trace = run(marks=MARKS, expects=["compiled"], frames=None, frames_ok=None, compiles=[])
    assert judge(trace).devices[0].causes[0].confidence != "high" or causes(trace) <= QUIET
