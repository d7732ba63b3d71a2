"""Lines of recordings and of the per-step layout: what they hold, and runs, resets and damage in them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Event, Trace
from tests.support.recordings import START_S, json_lines, recording_rows, step_row, write
from tests.support.trace_checks import assert_same, assert_sound


def read(path: Path, rows: list[dict[str, Any]]) -> Trace:
    return read_trace([write(path / "a.jsonl", json_lines(rows))])


def test_recording(tmp_path: Path) -> None:
    trace = read(tmp_path, recording_rows())
    (samples,), (steps,) = trace.samples, trace.steps
    assert trace.program is not None
    assert (trace.program.pid, trace.program.expects) == (4242, {"compiled"})
    assert trace.program.facts == {"torch": "2.11.0"}
    assert samples.device == steps.device == "1"
    assert samples.total_bytes == 1e11
    assert len(samples.time_s) == 15
    np.testing.assert_array_equal(samples.by_process[4242][:10], 2.5e9)
    np.testing.assert_array_equal(steps.number, np.arange(60))
    np.testing.assert_array_equal(steps.values["allocator_calls"], 10 * np.arange(60))
    assert steps.known("retries") is None
    assert trace.events == (Event(START_S, "phase", "run"),)
    assert trace.notes == ()
    assert_sound(trace)


def test_unknown_processes_are_not_zero(tmp_path: Path) -> None:
    """A list of null is unknown; an empty one says that there is no process."""
    rows = [
        {"kind": "device", "time_s": START_S + n, "device": "0", "used_bytes": 1, "processes": told}
        for n, told in enumerate([{"7": 5}, {}, {"7": None}] + [None] * 5 + [{"7": 6}])
    ]
    (samples,) = read(tmp_path, rows).samples
    held = samples.by_process[7]
    assert held[:2].tolist() == [5, 0]
    assert math.isnan(held[2])
    assert math.isnan(held[7])
    assert held[8] == 6


def test_facts_that_come_later(tmp_path: Path) -> None:
    rows = recording_rows()
    devices = rows[0].pop("devices")
    later = {"kind": "facts", "time_s": START_S, "devices": devices, "facts": {"stance": "default"}}
    trace = read(tmp_path, [rows[0], later, *rows[1:]])
    assert trace.program is not None
    assert trace.program.facts == {"torch": "2.11.0", "stance": "default"}
    assert trace.samples[0].total_bytes == 1e11


def test_programs_devices_are_the_drivers(tmp_path: Path) -> None:
    rows = [
        row | ({"device": "cuda:0"} if row["kind"] == "step" else {}) for row in recording_rows()
    ]
    assert read(tmp_path, rows).devices == ["1"]
    unmapped = [
        {"kind": "step", "time_s": START_S + n, "device": "cuda:2", "step": n} for n in range(5)
    ]
    assert read(tmp_path, unmapped).devices == ["2"]


def test_second_start_is_another_run(tmp_path: Path) -> None:
    again = recording_rows(20, pid=77, start_s=START_S + 100)
    trace = read(tmp_path, recording_rows() + again)
    assert_same(trace, read(tmp_path, again))
    assert trace.notes == ("2 runs in one file: only the last one was kept",)


@pytest.mark.parametrize("restart", [0, 12])
def test_step_numbers_start_again(tmp_path: Path, restart: int) -> None:
    """Without a line that says so: a run continued from a checkpoint, or another one."""
    second = [step_row(n, t=START_S + 50 + 0.05 * n, allocs=9 * n) for n in range(restart, 40)]
    trace = read(tmp_path, [*(step_row(n) for n in range(30)), *second])
    np.testing.assert_array_equal(trace.steps[0].number, np.arange(restart, 40))
    assert "30 earlier steps left out" in trace.notes[0]


def test_counters_of_a_new_process(tmp_path: Path) -> None:
    """Step numbers go on after a restart, but all counters begin anew."""
    rows = [step_row(n) for n in range(30)]
    rows += [
        step_row(n, t=START_S + 60 + 0.05 * n, allocs=249 * (n - 29), dev_alloc=9)
        for n in range(30, 60)
    ]
    trace = read(tmp_path, rows)
    np.testing.assert_array_equal(trace.steps[0].number, np.arange(30, 60))


def test_counters_that_the_program_resets_run_on(tmp_path: Path) -> None:
    rows = [step_row(n, allocs=100 if n % 2 else 200) for n in range(30)]
    (steps,) = read(tmp_path, rows).steps
    assert len(steps.number) == 30
    np.testing.assert_array_equal(np.diff(steps.values["allocator_calls"])[1::2], 100)
    assert (np.diff(steps.values["allocator_calls"]) >= 0).all()


def test_steps_of_other_programs(tmp_path: Path) -> None:
    rows = [step_row(n, loss=1.0, nested={"a": [1]}, ok=True) for n in range(20)]
    rows[7]["err"] = "CUDA out of memory. Tried"
    rows[9]["err"] = "ValueError"
    trace = read(tmp_path, rows)
    (steps,) = trace.steps
    assert steps.device == "0"
    np.testing.assert_allclose(steps.time_s, START_S + 0.05 * np.arange(20) + 0.049)
    assert steps.known("frames_ok") is None
    assert [event.kind for event in trace.events] == ["oom", "error"]


def test_steps_without_times(tmp_path: Path) -> None:
    rows = [{"step": n, "wall_ms": 20.0, "reserved": 5 << 21} for n in range(20)]
    trace = read(tmp_path, rows)
    np.testing.assert_allclose(np.diff(trace.steps[0].time_s), 0.02)
    assert "durations were added up" in trace.notes[0]


def test_durations_are_filled_in(tmp_path: Path) -> None:
    rows = [
        {"step": n, "time_s": START_S + n, "wall_ms": None, "reserved": 5 << 21} for n in range(5)
    ]
    np.testing.assert_allclose(read(tmp_path, rows).steps[0].wall_ms, 1000.0)


def test_a_step_may_end_after_the_next(tmp_path: Path) -> None:
    rows = [step_row(n, wall_ms=400.0 if n == 10 else 49.0) for n in range(30)]
    trace = read(tmp_path, rows)
    np.testing.assert_array_equal(trace.steps[0].number, np.arange(30))
    assert_sound(trace)


def test_times_in_milliseconds_and_since_boot(tmp_path: Path) -> None:
    rows = [step_row(n, t=1000 * (START_S + n)) for n in range(9)]
    assert read(tmp_path, rows).steps[0].time_s[0] == pytest.approx(START_S + 0.049)
    trace = read(tmp_path, [step_row(n, t=5.0 + n) for n in range(9)])
    assert trace.steps[0].time_s[0] == pytest.approx(5.049)
    assert "do not count from 1970" in trace.notes[0]


@pytest.mark.parametrize(
    "value", ["1e400", "-3", "NaN", "Infinity", "1" * 400, '"x"', "true", "[1]", "{}"]
)
def test_impossible_numbers_are_unknown(tmp_path: Path, value: str) -> None:
    lines = json_lines([step_row(n) for n in range(9)]).splitlines()
    lines[4] = lines[4].replace(f'"allocated": {900 << 20}', f'"allocated": {value}')
    (steps,) = read_trace([write(tmp_path / "a", "\n".join(lines) + "\n")]).steps
    assert np.flatnonzero(np.isnan(steps.values["allocated_bytes"])).tolist() == [4]


def test_events_follow_a_clock_that_was_set_back(tmp_path: Path) -> None:
    rows = recording_rows(600)
    rows.insert(
        -20, {"kind": "phase", "time_s": rows[-20]["time_s"] - 0.001, "phase": "checkpoint"}
    )
    rows.insert(300, {"kind": "phase", "time_s": rows[300]["time_s"] - 0.001, "phase": "evaluate"})
    back = [row | {"time_s": row["time_s"] - 7.3 * (n >= 400)} for n, row in enumerate(rows)]
    trace, whole = read(tmp_path, back), read(tmp_path, rows)
    assert [e.text for e in trace.events] == ["run", "evaluate", "checkpoint"]
    for event, expected in zip(trace.events, whole.events, strict=True):
        assert event.time_s == pytest.approx(expected.time_s, abs=0.2)
    assert trace.steps[0].time_s == pytest.approx(whole.steps[0].time_s, abs=0.2)
    assert any("the clock went back 1 time(s), by 7 s" in note for note in trace.notes)


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    good = json_lines([step_row(n) for n in range(9)])
    odd = (
        "[" * 100_000
        + "\n"
        + "Traceback (most recent call last):\n"
        + '{"other": 1}\n'
        + '{"step": 9, "t'
    )
    trace = read_trace([write(tmp_path / "a", good + odd)])
    assert len(trace.steps[0].number) == 9
    assert trace.notes == (
        "3 line(s) could not be read",
        "1 line(s) of an unknown kind were left out",
        "the last line is cut off and was left out",
    )


ESCAPE = "\x1b]0;x\x07\x1b[2J"


def test_nothing_that_a_file_says_can_command_a_terminal(tmp_path: Path) -> None:
    rows = recording_rows()
    rows[0] |= {"program": f"p{ESCAPE}", "facts": {f"k{ESCAPE}": [f"v\n{ESCAPE}", {"n": 1}]}}
    at = {"time_s": START_S + 1}
    rows += [
        {"kind": "phase", "phase": f"run{ESCAPE}", **at},
        {"kind": "event", "event": f"odd{ESCAPE}", "text": f"a\r\nb{ESCAPE}", **at},
        {"kind": "facts", "facts": {"later": ESCAPE}, **at},
    ]
    trace = read(tmp_path, rows)
    assert trace.program is not None
    told = [trace.program.name, repr(trace.program.facts), *trace.devices]
    told += [word for event in trace.events for word in (event.kind, event.text)]
    assert all(word.isprintable() for word in told), told
    assert "\\x" not in repr(trace.program.facts)
    assert {"a b ]0;x [2J", "run ]0;x [2J"} <= {event.text for event in trace.events}
    log = {"event": "start", "config": {"run": {"name": ESCAPE}}, **at}
    text = json_lines([log, {"step": 1, "step_ms": 5.0, "reserved_gib/cuda:0": 1.0, **at}])
    (tmp_path / "events.jsonl").write_text(text)
    started = read_trace([tmp_path / "events.jsonl"]).program
    assert started is not None
    assert started.facts == {"config": {"run": {"name": "]0;x [2J"}}}


def test_what_a_program_tells_is_kept_to_some_depth(tmp_path: Path) -> None:
    rows = recording_rows()
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    rows[0]["facts"] = {"deep": deep, "n": 1}
    program = read(tmp_path, rows).program
    assert program is not None
    assert program.facts["n"] == 1
    assert len(repr(program.facts)) < 100


def test_a_name_of_a_file_is_printable(tmp_path: Path) -> None:
    (tmp_path / f"signal-{ESCAPE}.jsonl").write_text(json_lines(recording_rows()))
    (source,) = read_trace([tmp_path]).sources
    assert source.isprintable()
