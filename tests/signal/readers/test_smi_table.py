"""Plain nvidia-smi, logged in a loop or by watch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.signal.readers.read import read_trace
from draftline.signal.readers.screen import replay
from draftline.signal.readers.smi_table import recognises
from draftline.signal.trace import Trace
from tests.support.recordings import MIB, START_S, TRACES, table, used_mib, write


def read(path: Path, text: str) -> Trace:
    return read_trace([write(path / "nvidia-smi.log", text)])


def loop(tables: int = 20, **options: bool) -> str:
    return "".join(table(n, gpus=2, **options) for n in range(tables))


@pytest.mark.parametrize("old", [False, True])
def test_loop(tmp_path: Path, old: bool) -> None:
    trace = read(tmp_path, loop(old=old))
    assert trace.devices == ["0", "1"]
    for g, samples in enumerate(trace.samples):
        np.testing.assert_array_equal(samples.used_bytes, [used_mib(n, g) * MIB for n in range(20)])
        np.testing.assert_array_equal(samples.time_s, START_S + np.arange(20))
        np.testing.assert_array_equal(samples.util_pct, np.arange(20))
        assert samples.total_bytes == 143771 * MIB
    assert trace.samples[0].by_process[4242][0] == (used_mib(0) - 400) * MIB
    assert trace.samples[1].by_process == {}
    if not old:
        assert np.isnan(trace.samples[0].by_process[4300]).all()
    assert trace.notes == ()


def test_lines_of_date_give_the_zone(tmp_path: Path) -> None:
    """`date; nvidia-smi`, in a shell that speaks UTC while nvidia-smi's own line names no zone."""
    text = "".join(f"Sun Nov 29 11:40:{n:02d} UTC 2026\n{table(n)}" for n in range(20))
    (samples,) = read(tmp_path, text).samples
    np.testing.assert_array_equal(samples.time_s, START_S - 2 * 3600 + np.arange(20))


def test_no_dates(tmp_path: Path) -> None:
    text = "".join("".join(table(n).splitlines(keepends=True)[1:]) for n in range(20))
    (samples,) = read(tmp_path, text).samples
    assert not samples.dated
    assert len(samples.time_s) == 20


def test_hidden_processes_are_unknown(tmp_path: Path) -> None:
    """In a container no process is listed, whatever runs."""
    trace = read(tmp_path, loop(processes=False))
    assert all(samples.by_process == {} for samples in trace.samples)


def test_processes_that_end_hold_nothing(tmp_path: Path) -> None:
    text = loop() + "".join(table(n, gpus=2, processes=False) for n in range(20, 30))
    held = read(tmp_path, text).samples[0].by_process[4242]
    np.testing.assert_array_equal(held[20:], 0.0)
    assert (held[:20] > 0).all()


def test_mig_instances_are_not_the_device(tmp_path: Path) -> None:
    trace = read(tmp_path, "".join(table(n, mig=True) for n in range(10)))
    assert trace.devices == ["0", "0/gi7/ci0"]
    whole, instance = trace.samples
    assert whole.used_bytes[0] == used_mib(0) * MIB
    assert np.isnan(whole.util_pct).all()
    np.testing.assert_array_equal(instance.used_bytes, (100 + np.arange(10)) * MIB)
    assert instance.total_bytes == 20096 * MIB
    assert instance.by_process[4242][0] == 90 * MIB
    assert not whole.by_process.get(4242, np.zeros(1)).any()
    assert any("MIG instances" in note for note in trace.notes)


def test_cut_off_in_a_table(tmp_path: Path) -> None:
    text = loop(6)
    (first, second) = read(tmp_path, text[: text.rindex("|   1  NVIDIA")]).samples
    assert (len(first.time_s), len(second.time_s)) == (6, 5)


@pytest.mark.parametrize("name", ["watch-80-columns.txt", "watch-100-columns.txt"])
def test_watch(name: str) -> None:
    """What `watch` writes are changes to a screen, of which each is a table."""
    trace = read_trace([TRACES / name])
    (samples,) = trace.samples
    np.testing.assert_array_equal(samples.used_bytes, (1000 + 137 * np.arange(1, 7)) * MIB)
    np.testing.assert_array_equal(samples.util_pct, 7 * np.arange(1, 7))
    assert samples.total_bytes == 143771 * MIB
    assert 2 <= samples.time_s[-1] - samples.time_s[0] < 4
    if name == "watch-100-columns.txt":
        assert samples.by_process[12345][0] == 637 * MIB


def test_colours_are_left_out(tmp_path: Path) -> None:
    text = loop().replace("MiB /", "\x1b[32mMiB\x1b[0m /")
    assert len(read(tmp_path, text).samples[0].time_s) == 20


def test_screen_puts_broken_lines_together() -> None:
    drawn = "\x1b[H\x1b[2J\x1b[1;20H\x1b[1;1H| left part\x1b[2;3Hright |\x1b[3;1H| next |\x1b[1;1H"
    assert next(iter(replay([drawn[:30], drawn[30:]]))) == [
        "| left part           right |",
        "| next |",
    ]


def test_screen_erases() -> None:
    drawn = "abc\r\n\x1b[2;1Hdef\x1b[2;2H\x1b[K\x1b[1;2H\x1b[2Xx\by"
    assert list(replay([drawn]))[-1] == ["ay", "d"]


def test_long_lines_take_no_square_of_their_length() -> None:
    assert not recognises("| 1 2 C " * 200_000)
    assert not recognises("|" + " " * 1_000_000)
