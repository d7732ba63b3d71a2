"""nvidia-smi dmon and pmon: whichever columns, with times or without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Trace
from tests.support.recordings import MIB, START_S, dmon, pmon, query_csv, used_mib, write


def read(path: Path, text: str) -> Trace:
    return read_trace([write(path / "log.txt", text)])


@pytest.mark.parametrize("times", ["", "T", "D" + "T"])
def test_dmon(tmp_path: Path, times: str) -> None:
    trace = read(tmp_path, dmon(gpus=2, times=times))
    assert trace.devices == ["0", "1"]
    for g, samples in enumerate(trace.samples):
        np.testing.assert_array_equal(samples.used_bytes, [used_mib(n, g) * MIB for n in range(30)])
        np.testing.assert_array_equal(samples.util_pct, np.arange(30))
        assert samples.dated == (times == "DT")
        assert samples.time_s[0] == (START_S if times == "DT" else 0)
        np.testing.assert_array_equal(np.diff(samples.time_s), 1)
    assert any("1 s between them is assumed" in note for note in trace.notes) == (times == "")


def test_dmon_as_csv(tmp_path: Path) -> None:
    lines = [", ".join(line.replace("# ", "#").split()) for line in dmon(times="").splitlines()]
    trace = read(tmp_path, "\n".join(lines) + "\n")
    assert trace.samples[0].used_bytes[-1] == used_mib(29) * MIB


def test_times_run_on_past_midnight(tmp_path: Path) -> None:
    lines = ["#Time         gpu     fb", "#HH:MM:SS     Idx     MB"]
    lines += [f" 23:59:{50 + n}       0   {1000 + n}" for n in range(10)]
    lines += [f" 00:00:{n:02d}       0   {1010 + n}" for n in range(10)]
    (samples,) = read(tmp_path, "\n".join(lines) + "\n").samples
    np.testing.assert_array_equal(samples.time_s, np.arange(20))
    np.testing.assert_array_equal(samples.used_bytes, (1000 + np.arange(20)) * MIB)


def test_times_without_a_date_are_laid_beside_a_dated_file(tmp_path: Path) -> None:
    later = dmon(samples=8, times="T")
    trace = read_trace(
        [
            write(tmp_path / "q", query_csv(columns="timestamp uuid used")),
            write(tmp_path / "d", later),
        ]
    )
    own = next(s for s in trace.samples if s.device == "0")
    assert own.dated
    assert own.time_s[0] == START_S
    assert any("without a date were laid beside" in note for note in trace.notes)


def test_no_column_of_memory(tmp_path: Path) -> None:
    text = (
        "# gpu    pwr  gtemp     sm    mem\n# Idx      W      C      %      %\n"
        + "    0    371     51     97     40\n" * 9
    )
    trace = read(tmp_path, text)
    assert np.isnan(trace.samples[0].used_bytes).all()
    assert trace.samples[0].util_pct[0] == 97
    assert any("dmon -s mu" in note for note in trace.notes)


def test_missing_values_and_bad_rows(tmp_path: Path) -> None:
    rows = dmon(times="DT").splitlines()
    rows[4] = rows[4].replace("580", "-")
    rows[6] = "   20261129   13:40:04   "
    trace = read(tmp_path, "\n".join(rows) + "\n")
    (samples,) = trace.samples
    assert np.isnan(samples.used_bytes).sum() == 1
    assert len(samples.used_bytes) == 29
    assert "1 line(s) could not be read" in trace.notes


def test_rows_before_the_first_header(tmp_path: Path) -> None:
    rows = dmon(times="DT").splitlines()[5:]
    (samples,) = read(tmp_path, "\n".join(rows) + "\n").samples
    assert len(samples.used_bytes) == 27


@pytest.mark.parametrize("times", ["", "T"])
def test_pmon(tmp_path: Path, times: str) -> None:
    trace = read(tmp_path, pmon(times=times))
    assert trace.devices == ["0", "1"]
    busy, idle = trace.samples
    assert set(busy.by_process) == {4242, 4300}
    np.testing.assert_array_equal(busy.by_process[4300], [0.0] * 10 + [300 * MIB] * 20)
    np.testing.assert_array_equal(busy.by_process[4242], [used_mib(n) * MIB for n in range(30)])
    np.testing.assert_array_equal(busy.used_bytes, sum(busy.by_process.values()))
    assert not idle.by_process
    assert len(idle.time_s) == 30
    assert any("sum of the processes" in note for note in trace.notes)


def test_pmon_without_memory_does_not_take_shares_for_bytes(tmp_path: Path) -> None:
    text = (
        "# gpu        pid  type    sm   mem   command\n# Idx          #   C/G     %     %   name\n"
    )
    text += "    0       4242     C    97    40   python\n" * 9
    (samples,) = read(tmp_path, text).samples
    assert np.isnan(samples.used_bytes).all()


def test_many_processes_cost_few_columns(tmp_path: Path) -> None:
    lines = ["# gpu         pid   type     fb   command"]
    for n in range(300):
        lines += [f"    0       {pid}     C   {10 * pid}      x" for pid in (1, 2, 3, 100 + n)]
    trace = read(tmp_path, "\n".join(lines) + "\n")
    assert len(trace.samples[0].by_process) == 16
    assert {3, 399} <= trace.samples[0].by_process.keys()
    assert any("of 303 processes the 16" in note for note in trace.notes)
