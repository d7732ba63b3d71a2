"""Files of one run on one clock, and steps on the device that they were made on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Trace
from tests.support.recordings import (
    MIB,
    START_S,
    UUIDS,
    json_lines,
    query_csv,
    recording_rows,
    stamp,
    step_row,
    write,
)

HOUR = 3600.0


def used(time_s: float, base: int = 900) -> int:
    """MiB of a device on which the steps of `steps` run."""
    return 0 if time_s < START_S else base + int(min(time_s - START_S, 30.0) * 100)


def smi(
    path: Path, *, zone_h: float = 0, before_s: float = 10, after_s: float = 10, gpus: int = 1
) -> Path:
    """A query at 5 Hz around a minute of steps, on a wall clock `zone_h` ahead of UTC. Steps run on
    the last GPU; the first ones stand still."""
    lines = ["timestamp, index, memory.used [MiB]"]
    for time_s in np.arange(
        START_S - before_s, START_S + 60 + after_s, 0.2 if before_s < 1000 else 20
    ):
        for g in range(gpus):
            held = used(time_s) if g == gpus - 1 else 5000
            lines.append(f"{stamp(time_s + zone_h * HOUR)}, {g}, {held} MiB")
    return write(path, "\n".join(lines) + "\n")


def steps(path: Path, device: str | None = None) -> Path:
    rows = []
    for n in range(600):
        row = step_row(
            n, t=START_S + 0.1 * n, wall_ms=99.0, reserved=int(used(START_S + 0.1 * n) * MIB)
        )
        rows.append(row if device is None else row | {"device": device})
    return write(path, json_lines(rows))


def shift_of(trace: Trace) -> float:
    """Seconds between where the device's ramp begins and where it should."""
    (samples,) = (s for s in trace.samples if s.used_bytes.min() == 0)
    return float(samples.time_s[np.flatnonzero(samples.used_bytes)[0]]) - START_S


@pytest.mark.parametrize("zone_h", [0, 2, -8, 5.75, 9.5, 14])
def test_local_times_are_moved(tmp_path: Path, zone_h: float) -> None:
    trace = read_trace([smi(tmp_path / "smi", zone_h=zone_h), steps(tmp_path / "steps")])
    assert abs(shift_of(trace)) < 1
    said = [note for note in trace.notes if "local times were moved" in note]
    assert len(said) == (zone_h != 0)
    assert all(f"by {-zone_h:+g} h" in note for note in said)


@pytest.mark.parametrize("zone_h", [-2, 0, 3])
def test_long_file_is_laid_where_memory_moves_with_the_steps(tmp_path: Path, zone_h: float) -> None:
    """Hours around a minute of steps overlap them under many zones; only one of them fits."""
    long = smi(tmp_path / "smi", zone_h=zone_h, before_s=5 * HOUR, after_s=5 * HOUR)
    trace = read_trace([long, steps(tmp_path / "steps")])
    assert abs(shift_of(trace)) <= 20


def test_files_of_other_days(tmp_path: Path) -> None:
    trace = read_trace([smi(tmp_path / "smi", zone_h=300), steps(tmp_path / "steps")])
    assert len(trace.samples) == len(trace.steps) == 1
    assert any("are not those of the other files" in note for note in trace.notes)


def test_steps_go_to_the_only_device(tmp_path: Path) -> None:
    lines = smi(tmp_path / "smi").read_text().replace(", 0, ", ", 3, ")
    trace = read_trace([write(tmp_path / "smi", lines), steps(tmp_path / "steps")])
    assert trace.devices == ["3"]


def test_steps_go_where_memory_moves_with_them(tmp_path: Path) -> None:
    trace = read_trace([smi(tmp_path / "smi", gpus=3), steps(tmp_path / "steps")])
    assert trace.steps[0].device == "2"
    assert any("memory of 2 moves with them" in note for note in trace.notes)


def test_steps_that_fit_several_devices(tmp_path: Path) -> None:
    text = query_csv(300, gpus=2)
    rows = [step_row(n, allocated=MIB, reserved=2 * MIB) for n in range(40)]
    trace = read_trace([write(tmp_path / "a", text), write(tmp_path / "b", json_lines(rows))])
    assert trace.steps[0].device == "0"
    assert any("several would fit: 0 was assumed" in note for note in trace.notes)


def test_uuids_become_indices(tmp_path: Path) -> None:
    """The recording knows which index the uuid of the other file has."""
    by_uuid = query_csv(100, gpus=2, columns="timestamp uuid used")
    recording = write(tmp_path / "a", json_lines(recording_rows()))
    trace = read_trace([write(tmp_path / "b", by_uuid), recording])
    assert trace.devices == ["1", UUIDS[0]]
    assert trace.steps[0].device == "1"


def test_two_tools_on_one_device_are_not_mixed(tmp_path: Path) -> None:
    """They differ in what counts as used, and would look like memory that moves."""
    query = write(tmp_path / "a", query_csv(400, gpus=2))
    recording = write(tmp_path / "b", json_lines(recording_rows()))
    trace = read_trace([query, recording])
    second = next(s for s in trace.samples if s.device == "1")
    assert second.used_bytes.max() < 3e9
    assert second.total_bytes == 1e11
    assert np.nanmax(second.by_process[4242]) == 2.5e9
    assert any(
        "several files sampled GPU 1: the longest (query) was used" in n for n in trace.notes
    )


def with_program(rows: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [row | ({"pid": pid} if row["kind"] == "start" else {}) for row in rows]


def test_ranks_of_one_run(tmp_path: Path) -> None:
    first = recording_rows()
    second = [
        row | ({"device": "5"} if row.get("device") else {}) for row in with_program(first, 9)
    ]
    trace = read_trace(
        [write(tmp_path / "a", json_lines(first)), write(tmp_path / "b", json_lines(second))]
    )
    assert trace.devices == ["1", "5"]
    assert [len(s.number) for s in trace.steps] == [60, 60]


def test_two_programs_on_one_device(tmp_path: Path) -> None:
    a = write(tmp_path / "a", json_lines(recording_rows()))
    b = write(tmp_path / "b", json_lines(recording_rows(pid=9)))
    trace = read_trace([a, b])
    assert [s.device for s in trace.steps] == ["1", "1"]
    said = (
        "several programs made steps on device 1: only those of process 4242 are judged; diagnose each "
        "of the other recordings by itself"
    )
    assert said in trace.notes


def test_recording_of_an_earlier_run(tmp_path: Path) -> None:
    a = write(tmp_path / "a", json_lines(recording_rows(start_s=START_S + 500, pid=9)))
    b = write(tmp_path / "b", json_lines(recording_rows()))
    trace = read_trace([a, b])
    assert trace.program is not None
    assert trace.program.pid == 9
    assert len(trace.steps) == 1
    assert any("b is of an earlier run" in note for note in trace.notes)


def test_undated_rows_stay_beside(tmp_path: Path) -> None:
    bare = write(tmp_path / "a", query_csv(columns="index used"))
    trace = read_trace([bare, steps(tmp_path / "steps")])
    assert not trace.samples[0].dated
    assert trace.samples[0].device == trace.steps[0].device == "0"
