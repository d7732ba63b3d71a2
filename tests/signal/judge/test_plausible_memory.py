"""Memory that moves in ways that look like something else: a wrong cause is worse than none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftline.signal.judge.verdict import judge
from tests.support.faulty_runs import MARKS, STEPS
from tests.support.plausible import AT, QUIET, causes, compiled_at, said, slow
from tests.support.traces import (
    CONTEXT_MIB,
    EAGER,
    FLOOR_MIB,
    RESERVED_MIB,
    TOTAL_MIB,
    Trace,
    counter,
    run,
    shot,
    stairs,
)

EXCURSIONS = np.where((AT % 80 > 60) & (AT % 80 < 67), RESERVED_MIB + 500, RESERVED_MIB)
SHORT = {
    "twice more for a moment": EXCURSIONS,
    "two falls": np.where(np.isin(AT, [80, 140]), 900.0, RESERVED_MIB),
    "two rises close together": stairs(STEPS, [150, 153], RESERVED_MIB, 300),
}


@pytest.mark.parametrize("name", SHORT)
def test_what_the_allocator_itself_does_is_no_other_process(name: str) -> None:
    trace = run(marks=MARKS, reserved=SHORT[name])
    assert "other_process" not in causes(trace)


def test_a_list_of_processes_with_gaps_is_no_other_process() -> None:
    trace = run(marks=MARKS, by_process=True, others=lambda t: 5000.0)
    samples = trace.samples[0]
    hidden = np.arange(len(samples.time_s)) % 5 == 2
    gaps = {pid: np.where(hidden, np.nan, used) for pid, used in samples.by_process.items()}
    assert causes(replace(trace, samples=(replace(samples, by_process=gaps),))) <= QUIET


def test_flushes_whose_retries_are_unknown_are_not_said_to_have_none() -> None:
    trace = run(marks=MARKS, retries=None, reserved=np.where(AT % 10 == 9, 620.0, RESERVED_MIB))
    assert "without a failed allocation" not in said(trace)


@pytest.mark.parametrize("marked", [True, False])
def test_evaluations_that_keep_200_mib_each_are_not_called_a_pause(marked: bool) -> None:
    each = list(range(20, STEPS, 20))
    pauses = [(n - after, name) for n in each for after, name in ((1, "evaluate"), (0, "run"))]
    trace = run(
        marks=[*MARKS, *pauses] if marked else (),
        step_s=slow(each, 0.5),
        allocated=stairs(STEPS, each, FLOOR_MIB, 200),
        reserved=stairs(STEPS, each, RESERVED_MIB, 200),
    )
    assert "pause" not in causes(trace)


@pytest.mark.parametrize("counted", [True, False], ids=["counter", "event"])
def test_a_run_that_ends_out_of_memory_is_not_healthy(counted: bool) -> None:
    if counted:
        trace = run(marks=MARKS, ooms=[199])
    else:
        trace = run(marks=MARKS, events=[(199, "oom", "tried to allocate 9 GiB")])
    assert "healthy" not in causes(trace)
    assert judge(trace).exit_code == 3


def test_a_run_that_ends_out_of_memory_says_so() -> None:
    trace = run(
        marks=MARKS,
        ooms=[199],
        retries=[199],
        events=[(199, "oom", "tried to allocate 9 GiB")],
        beside_mib=141_000,
    )
    assert "out of memory" in said(trace).lower()


def test_two_recompiles_do_not_hide_retries() -> None:
    trace = run(
        marks=MARKS, **compiled_at(50, 90, recompiles=[50, 90]), retries=list(range(20, STEPS, 2))
    )
    assert "allocator_retries" in causes(trace)


def test_a_leak_reckons_with_what_the_device_held_while_it_ran() -> None:
    held = 100_000.0 + 5.0 * AT
    trace = run(marks=MARKS, allocated=held, reserved=held + 900, after_s=5.0)
    left = (TOTAL_MIB - held[-1] - 900 - CONTEXT_MIB) / 5.0
    words = said(trace)
    steps = float(words.split("out of memory in about ")[1].split(" steps")[0].replace(",", ""))
    assert steps == pytest.approx(left, rel=0.05)


def test_a_leak_that_is_recorded_for_half_of_the_run() -> None:
    floor = FLOOR_MIB + 5.0 * AT
    floor[100:] = np.nan
    trace = run(marks=MARKS, allocated=floor, reserved=3000.0)
    grows = float(said(trace).split("grows by ")[1].split(" MiB")[0])
    assert grows == pytest.approx(5.0, rel=0.05)


def test_a_leak_in_a_short_run() -> None:
    trace = run(21, marks=MARKS, allocated=FLOOR_MIB + 50.0 * np.arange(21), reserved=3000.0)
    grows = float(said(trace).split("grows by ")[1].split(" MiB")[0])
    assert grows == pytest.approx(50.0, rel=0.05)


def test_retries_of_a_counter_that_started_anew() -> None:
    retries = np.r_[counter([20, 40, 60, 80], 100), np.zeros(100)]
    assert causes(run(marks=MARKS, retries=retries)) == {"allocator_retries"}


def test_requests_a_step_of_a_program_that_started_anew() -> None:
    calls = np.r_[counter(900, 100), counter(900, 100)]
    trace = run(marks=MARKS, expects=["compiled"], **(EAGER | {"allocator_calls": calls}))
    figure = float(said(trace).split(" memory requests per step")[0].rsplit(" ", 1)[1])
    assert figure == pytest.approx(900, rel=0.05)


def test_fragments_around_small_things_that_are_kept() -> None:
    at = list(range(20, STEPS, 12))
    trace = run(
        marks=MARKS,
        reserved=stairs(STEPS, at, 2000.0, 256),
        allocated=stairs(STEPS, at, FLOOR_MIB, 8),
        inactive=stairs(STEPS, at, 60.0, 240),
    )
    assert "fragmentation" in causes(trace)


@pytest.mark.parametrize("history", ["load", "forward pass", "two layers at a time"])
def test_a_snapshot_of_one_growth_is_no_leak(history: str) -> None:
    level = {
        "load": np.linspace(0, 16_000, 400),
        "forward pass": np.r_[np.full(9, 9000.0), 9000 + np.linspace(0, 70_000, 200)],
        "two layers at a time": 9000 + 400.0 * (np.arange(200) // 10),
    }[history]
    assert "leak" not in causes(Trace(snapshots=(shot(level.tolist()),)))


def test_layers_that_thaw_in_three_stages_are_no_sure_leak() -> None:
    level = stairs(STEPS, [40, 90, 140], 0.0, 100)
    trace = run(marks=MARKS, allocated=FLOOR_MIB + level, reserved=3000 + level)
    found = judge(trace).devices[0].causes[0]
    assert (found.cause, found.confidence) != ("leak", "high")


def test_a_leak_beside_two_captures_is_a_leak() -> None:
    level = 5.0 * AT
    trace = run(
        marks=MARKS,
        captures=[2, 60, 120],
        graph_replays=1,
        allocated=FLOOR_MIB + level,
        reserved=RESERVED_MIB + level,
    )
    assert "leak" in causes(trace)
