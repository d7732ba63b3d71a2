"""A run's directory, and recordings that grow while they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from draftline.errors import ConfigError
from draftline.signal.readers import rows as kept
from draftline.signal.readers.read import read_trace
from draftline.signal.readers.recording import RecordingTail
from draftline.signal.trace import Event
from tests.support.recordings import START_S, TRACES, json_lines, recording_rows, step_row, write
from tests.support.trace_checks import assert_same, assert_sound


def run_directory(path: Path, starts: int = 1) -> Path:
    """Logs of a run of 20 steps on two GPUs with a start, and continued `starts` - 1 times."""
    events, metrics = [], []
    for s in range(starts):
        at = START_S + 1000 * s
        events += [
            {"time_s": at, "event": "start", "config": "abc", "versions": {"torch": "2.11.0"}},
            {"time_s": at + 1, "event": "choice", "what": "x", "wanted": "a", "got": "b"},
            {"time_s": at + 5, "event": "sealed", "compiled": [], "seconds": 5.0},
            {"time_s": at + 9, "event": "checkpoint", "step": 10},
        ]
        metrics += [
            {
                "time_s": at + 5 + 0.1 * n,
                "step": 20 * s + n,
                "step_ms": 50.0,
                "tokens_per_s": 1000.0,
                "loss": 3.0,
                "reserved_gib/cuda:0": 2.0,
                "allocator_calls/cuda:0": 7 * n,
                "reserved_gib/cuda:1": 1.0,
            }
            for n in range(2, 21, 2)
        ]
    events.append(
        {"time_s": at + 30, "event": "failed", "error": "OutOfMemoryError: CUDA out of memory"}
    )
    path.mkdir()
    write(path / "events.jsonl", json_lines(events))
    write(path / "metrics.jsonl", json_lines(metrics))
    return path


def test_run_directory(tmp_path: Path) -> None:
    trace = read_trace([run_directory(tmp_path / "run")])
    assert trace.devices == ["0", "1"]
    first = trace.steps[0]
    np.testing.assert_array_equal(first.number, np.arange(2, 21, 2))
    np.testing.assert_array_equal(first.values["reserved_bytes"], 2 * 2.0**30)
    np.testing.assert_allclose(first.values["tokens"], 50.0)
    marks = [(event.kind, event.text) for event in trace.events]
    assert marks[:4] == [("phase", p) for p in ("load", "run", "checkpoint", "run")]
    assert marks[4][0] == "oom"
    assert trace.program is not None
    assert trace.program.name == "draftline train"
    assert trace.program.facts["versions"] == {"torch": "2.11.0"}


def test_continued_run_keeps_the_last_start(tmp_path: Path) -> None:
    trace = read_trace([run_directory(tmp_path / "run", starts=2)])
    np.testing.assert_array_equal(trace.steps[0].number, np.arange(22, 41, 2))
    assert any("since its last start" in note for note in trace.notes)


def test_recording_beside_a_runs_log_knows_better(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    write(run / "signal.jsonl", json_lines(recording_rows(start_s=START_S + 5)))
    trace = read_trace([run])
    assert trace.devices == ["1"]
    assert len(trace.steps[0].number) == 60
    assert [e.kind for e in trace.events] == ["phase", "oom"]
    assert trace.program is not None
    assert trace.program.pid == 4242


def test_stale_recording_of_an_earlier_start(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", starts=2)
    write(run / "signal.jsonl", json_lines(recording_rows()))
    trace = read_trace([run])
    assert len(trace.steps[0].number) == 10
    assert any("signal.jsonl is of an earlier run" in note for note in trace.notes)


def test_recordings_of_ranks_in_a_directory(tmp_path: Path) -> None:
    second = [row | ({"device": "5"} if row.get("device") else {}) for row in recording_rows(pid=9)]
    write(tmp_path / "signal.jsonl", json_lines(recording_rows()))
    write(tmp_path / "signal-rank1.jsonl.gz", gzip.compress(json_lines(second).encode()))
    write(tmp_path / "notes.txt", "nothing of this")
    assert read_trace([tmp_path]).devices == ["1", "5"]


def test_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without signal.jsonl, events.jsonl and metrics"):
        read_trace([tmp_path])


def test_tail_tells_what_came(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    tail = RecordingTail(path)
    assert tail.poll() == []
    lines = json_lines(recording_rows()).splitlines(keepends=True)
    write(path, "".join(lines[:20]) + lines[20][:9])
    assert tail.poll() == [json.loads(line) for line in lines[:20]]
    assert tail.poll() == []
    with path.open("a") as file:
        file.write(lines[20][9:] + "".join(lines[21:]))
    assert len(tail.poll()) == len(lines) - 20
    assert_same(tail.trace(), read_trace([path]))
    assert_same(tail.trace(), read_trace([path]))  # looking changes nothing


def test_tail_follows_a_new_run_and_a_new_file(tmp_path: Path) -> None:
    path = write(tmp_path / "signal.jsonl", json_lines(recording_rows()))
    tail = RecordingTail(path)
    tail.poll()
    again = recording_rows(10, pid=77, start_s=START_S + 100)
    with path.open("a") as file:
        file.write(json_lines(again))
    tail.poll()
    assert tail.trace().program.pid == 77  # type: ignore[union-attr]
    assert len(tail.trace().steps[0].number) == 10
    path.unlink()
    write(path, json_lines([step_row(n) for n in range(5)]))
    tail.poll()
    assert tail.trace().program is None
    assert len(tail.trace().steps[0].number) == 5


def test_tail_keeps_the_latest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LATEST_STEPS", 50)
    monkeypatch.setattr(kept, "LATEST_SAMPLES", 20)
    monkeypatch.setattr(kept, "LATEST_EVENTS", 10)
    rows = recording_rows(1000)
    for n in range(200):
        at = START_S + 0.25 * n
        rows.append(
            {"kind": "event", "time_s": at, "event": "recompile", "device": "1", "text": str(n)}
        )
    tail = RecordingTail(write(tmp_path / "a", json_lines(rows)))
    tail.poll()
    trace = tail.trace()
    assert 50 <= len(trace.steps[0].number) < 100
    assert trace.steps[0].number[-1] == 999
    assert 20 <= len(trace.samples[0].time_s) < 40
    assert trace.events[0] == Event(START_S, "phase", "run")
    assert trace.events[-1].text == "199"
    assert len(trace.events) < 30
    assert_sound(trace)


def test_tail_of_a_shared_trace(tmp_path: Path) -> None:
    text = gzip.decompress((TRACES / "leak.steps.jsonl.gz").read_bytes())
    tail = RecordingTail(write(tmp_path / "leak", text))
    tail.poll()
    assert_same(tail.trace(), read_trace([TRACES / "leak.steps.jsonl.gz"]))
