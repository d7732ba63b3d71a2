"""The verdict as a whole: exit codes, JSON, one line, several devices, and what it must not depend on."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from draftline.signal.judge.shape import SHAPES
from draftline.signal.judge.verdict import Verdict, judge, report_lines
from draftline.signal.trace import join
from draftline.signal.words import CAUSES
from tests.support.faulty_runs import FAULTS, HEALTHY, MARKS
from tests.support.judged import first
from tests.support.traces import (
    EAGER,
    RESERVED_MIB,
    Trace,
    renamed,
    run,
    sampled,
    saw,
    shot,
    stairs,
)

ALL = {name: build for name, (_, _, build) in FAULTS.items()} | HEALTHY


def assert_sound(verdict: Verdict) -> None:
    """What every verdict holds to."""
    found = verdict.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found.keys() == {"devices", "verdict", "line", "notes"}
    assert found["verdict"] in ("healthy", "fault", "not_flat", "unknown", "flat", "idle")
    for device in found["devices"]:
        assert device.keys() == {"device", "shape", "level", "words", "phases", "causes"}
        assert device["shape"] in SHAPES
        assert device["causes"]
        assert "nan" not in device["words"].split()
        for cause in device["causes"]:
            assert cause.keys() == {"cause", "confidence", "evidence", "action"}
            assert cause["cause"] in CAUSES
            assert "nan" not in cause["evidence"].split()
            assert all(cause.values())
    assert verdict.exit_code in (0, 3, 4)
    assert (verdict.exit_code == 3) == (verdict.verdict in ("fault", "not_flat"))
    assert (verdict.exit_code == 4) == (verdict.verdict == "unknown")
    assert verdict.line
    assert "\n" not in verdict.line
    assert all("\n" not in line for line in report_lines(verdict))
    assert report_lines(verdict)[-1].startswith(f"verdict: {verdict.verdict}")


@pytest.mark.parametrize("marks", [MARKS, ()])
@pytest.mark.parametrize("parts", ["both", "counters", "samples"])
@pytest.mark.parametrize("name", ALL)
def test_every_verdict_is_sound(name: str, parts: str, marks: tuple[object, ...]) -> None:
    trace = ALL[name](marks=marks, sampled=parts != "counters", counted=parts != "samples")
    verdict = judge(trace)
    assert_sound(verdict)
    if parts == "both" or (parts == "counters" and not name.startswith("neighbour")):
        assert verdict.exit_code == (3 if name in FAULTS else 0)
        assert verdict.verdict == ("fault" if name in FAULTS else "healthy")


@pytest.mark.parametrize("name", HEALTHY)
def test_memory_alone_finds_no_fault_in_a_healthy_run(name: str) -> None:
    trace = replace(HEALTHY[name](marks=MARKS, counted=False), events=())
    verdict = judge(trace)
    assert (verdict.verdict, verdict.exit_code) == ("flat", 0)
    assert first(trace) == "unknown"
    assert "draftline watch" in verdict.devices[0].causes[0].action


@pytest.mark.parametrize("name", FAULTS)
def test_memory_alone_names_no_wrong_cause(name: str) -> None:
    trace = replace(FAULTS[name][2](marks=MARKS, counted=False), events=())
    assert first(trace) == "unknown"
    assert judge(trace).exit_code in (0, 3)


def test_nothing_at_all() -> None:
    verdict = judge(Trace())
    assert_sound(verdict)
    assert (verdict.verdict, verdict.exit_code, verdict.devices) == ("unknown", 4, ())
    assert verdict.line == "no device memory was recorded"


@pytest.mark.parametrize(
    "trace",
    [sampled([]), sampled([900.0] * 5), sampled([np.nan] * 90), run(3, sampled=False)],
    ids=["no sample", "few samples", "unknown samples", "few steps"],
)
def test_too_little_is_unknown_and_says_what_to_record(trace: Trace) -> None:
    verdict = judge(trace)
    assert_sound(verdict)
    assert (verdict.verdict, verdict.exit_code) == ("unknown", 4)
    assert verdict.devices[0].shape == "unknown"
    assert "record" in verdict.devices[0].causes[0].action


@pytest.mark.parametrize("steps", [1, 3])
def test_counters_of_too_few_steps_are_not_healthy_ones(steps: int) -> None:
    verdict = judge(run(steps))
    assert verdict.devices[0].causes[0].cause == "unknown"
    assert "in 0 steps" not in verdict.line


def test_samples_that_move_are_not_flat_without_a_cause() -> None:
    verdict = judge(sampled(saw(300, 20, 2000, 9000)))
    assert_sound(verdict)
    assert (verdict.verdict, verdict.exit_code) == ("not_flat", 3)
    assert verdict.devices[0].shape == "sawtooth"
    assert verdict.devices[0].causes[0].cause == "unknown"


def test_a_snapshot_alone() -> None:
    still = judge(Trace(snapshots=(shot([900.0] * 60),)))
    assert_sound(still)
    assert (still.verdict, still.exit_code) == ("unknown", 4)
    leaking = judge(Trace(snapshots=(shot(900 + saw(300, 20, 0, 300) + 9.0 * np.arange(300)),)))
    assert_sound(leaking)
    assert (leaking.verdict, leaking.exit_code) == ("fault", 3)


def test_marked_pauses_are_said_and_are_no_fault() -> None:
    marks = [*MARKS, (99, "evaluate"), (100, "run"), (149, "checkpoint"), (150, "run")]
    level = np.full(200, RESERVED_MIB)
    level[100:] += 900  # what the evaluation took stays with the allocator
    verdict = judge(run(marks=marks, reserved=level, step_s={-1: 0.04, 100: 2.0, 150: 2.0}))
    assert_sound(verdict)
    assert (verdict.verdict, verdict.exit_code) == ("healthy", 0)
    assert verdict.devices[0].shape == "flat"
    assert verdict.devices[0].causes[0].cause == "pause"
    assert re.search(r"1 .*evaluat.* 2\.0 s, 1 .*checkpoint.* 2\.0 s", verdict.line)


def test_the_worst_device_speaks() -> None:
    fine = run(marks=MARKS)
    moving = replace(renamed(sampled(saw(300, 20, 2000, 9000)), "3"), events=())
    retrying = replace(renamed(FAULTS["retries"][2](), "6"), events=())
    both = judge(join([fine, moving]))
    assert (both.verdict, both.exit_code) == ("not_flat", 3)
    assert both.line.startswith("GPU 3: ")
    three = judge(join([fine, moving, retrying]))
    assert (three.verdict, three.exit_code) == ("fault", 3)
    assert three.line.startswith("GPU 6: allocator_retries (high confidence): ")
    assert [device.device for device in three.devices] == ["0", "3", "6"]
    assert_sound(three)


def test_healthy_devices_speak_as_one() -> None:
    one = run(marks=MARKS)
    others = [replace(renamed(one, str(n)), events=()) for n in range(1, 4)]
    verdict = judge(join([one, *others]))
    assert (verdict.verdict, verdict.exit_code) == ("healthy", 0)
    assert "(and 3 more alike)" in verdict.line


def test_devices_have_their_names() -> None:
    assert judge(renamed(run(), "GPU-6f3a")).line.startswith("GPU-6f3a: ")
    assert judge(renamed(run(), "7")).line.startswith("GPU 7: ")


def test_notes_are_passed_on() -> None:
    trace = replace(run(), notes=("the last line is cut off",))
    assert judge(trace).to_dict()["notes"] == ["the last line is cut off"]
    assert "note: the last line is cut off" in report_lines(judge(trace))


def test_a_cause_without_an_action_has_no_next_line() -> None:
    lines = report_lines(judge(run(marks=MARKS)))
    assert not any(line.strip().startswith("next:") for line in lines)
    lines = report_lines(judge(FAULTS["flushes"][2](marks=MARKS)))
    assert any(line.strip().startswith("next: remove torch.cuda.empty_cache()") for line in lines)


def test_long_lists_of_phases_are_cut() -> None:
    marks = [*MARKS, *((n, "evaluate" if n % 20 else "run") for n in range(10, 190, 10))]
    phases = next(line for line in report_lines(judge(run(marks=marks))) if "phases:" in line)
    assert phases.count(",") == 8
    assert phases.endswith("more")


def test_growth_that_is_not_recorded_is_not_a_flat_run() -> None:
    trace = run(
        marks=MARKS, **EAGER, reserved=stairs(200, range(20, 200, 9), 2000.0, 100), sampled=False
    )
    assert judge(trace).devices[0].shape in ("slope", "staircase")
    unknown = replace(
        trace.steps[0], values={"allocator_calls": trace.steps[0].values["allocator_calls"]}
    )
    verdict = judge(replace(trace, steps=(unknown,)))
    assert verdict.devices[0].shape == "unknown"
    assert verdict.exit_code == 4


def test_a_snapshot_alone_shows_where_memory_lies_and_no_movement() -> None:
    [device] = judge(Trace(snapshots=(shot([1000.0] * 4),))).devices
    [cause] = device.causes
    assert cause.cause == "unknown"
    assert "holds 2,048 MiB in 30 segments: 1,024 MiB in use" in cause.evidence
    assert "9 MiB from train.py:7 step" in cause.evidence
