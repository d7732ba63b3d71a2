"""Queries of nvidia-smi as comma-separated values, in whatever columns they were asked for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.readers.columns import read_bytes, read_quantity
from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Trace
from tests.support.recordings import (
    BUSES,
    MIB,
    START_S,
    UUIDS,
    header,
    query_csv,
    query_lines,
    stamp,
    used_mib,
    write,
)
from tests.support.trace_checks import assert_same

TIMED = ("timestamp", "index", "used", "util")


def read(path: Path, text: str) -> Trace:
    return read_trace([write(path / "a.csv", text)])


def bare(text: str) -> str:
    """As --format=csv,nounits."""
    return text.replace(" MiB", "").replace(" %", "")


def assert_ramp(trace: Trace, gpus: int = 1) -> None:
    """The devices and memory of `query_lines`."""
    assert trace.devices == [str(g) for g in range(gpus)]
    for g, samples in enumerate(trace.samples):
        np.testing.assert_allclose(samples.used_bytes, [used_mib(q, g) * MIB for q in range(40)])
        assert samples.time_s[0] == pytest.approx(START_S + 0.002 * g, abs=1e-3)
        assert samples.dated


@pytest.mark.parametrize("order", list(itertools.permutations(TIMED))[::3])
def test_columns_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    whole = read(tmp_path, query_csv(gpus=2))
    assert_ramp(whole, gpus=2)
    for text in (
        query_csv(gpus=2, columns=" ".join(order)),
        bare(query_csv(gpus=2, columns=" ".join(order))),
    ):
        assert_same(read(tmp_path, text), whole)


@pytest.mark.parametrize("order", list(itertools.permutations((*TIMED, "total")))[::11])
@pytest.mark.parametrize("units", [True, False])
def test_no_header(tmp_path: Path, order: tuple[str, ...], units: bool) -> None:
    text = "\n".join(query_lines(gpus=2, columns=" ".join(order))) + "\n"
    trace = read(tmp_path, text if units else bare(text))
    assert_same(trace, read(tmp_path, query_csv(gpus=2, columns=" ".join(order))))
    assert trace.samples[0].total_bytes == 143771 * MIB
    assert f"{order.index('used') + 1} as memory in use" in trace.notes[0]


def test_header_in_the_middle_names_the_rows_before(tmp_path: Path) -> None:
    lines = query_lines()
    lines.insert(13, header())
    trace = read(tmp_path, "\n".join(lines) + "\n")
    assert_ramp(trace)
    assert trace.notes == ()


def test_header_again_with_other_columns(tmp_path: Path) -> None:
    other = "util used index timestamp"
    lines = [header(), *query_lines()[:20], header(other), *query_lines(columns=other)[20:]]
    assert_ramp(read(tmp_path, "\n".join(lines) + "\n"))


@pytest.mark.parametrize(
    "columns", ["timestamp uuid used", "timestamp bus used", "bus timestamp used uuid"]
)
def test_devices_named_otherwise(tmp_path: Path, columns: str) -> None:
    names = UUIDS if "uuid" in columns else BUSES
    trace = read(tmp_path, query_csv(gpus=2, columns=columns))
    assert trace.devices == sorted(names)
    assert [s.used_bytes[0] for s in trace.samples] == [used_mib(0, g) * MIB for g in range(2)]
    no_header = "\n".join(query_lines(gpus=2, columns=columns)) + "\n"
    assert_same(read(tmp_path, no_header), trace)


@pytest.mark.parametrize("columns", ["timestamp used util", "timestamp name used"])
def test_devices_not_named(tmp_path: Path, columns: str) -> None:
    one = read(tmp_path, query_csv(columns=columns))
    assert_ramp(one)
    assert "one device, called 0" in one.notes[0]
    two = read(tmp_path, query_csv(gpus=2, columns=columns))
    assert_ramp(two, gpus=2)
    assert "2 devices, named by their order" in two.notes[0]


def test_free_and_total_give_used(tmp_path: Path) -> None:
    trace = read(tmp_path, query_csv(columns="timestamp index total free"))
    assert_ramp(trace)
    assert "what the total leaves" in trace.notes[0]


def test_ambiguous_columns_are_unknown(tmp_path: Path) -> None:
    """Without a header, two columns of memory that both move, or a clock rate beside memory."""
    lines = query_lines(columns="timestamp index used free")
    trace = read(tmp_path, "\n".join(lines) + "\n")
    assert np.isnan(trace.samples[0].used_bytes).all()
    assert "cannot be told" in trace.notes[1]


def test_other_columns_are_not_memory(tmp_path: Path) -> None:
    columns = "timestamp power index temperature used memory_util util"
    assert_ramp(read(tmp_path, query_csv(columns=columns)))
    trace = read(tmp_path, "\n".join(query_lines(columns=columns)) + "\n")
    assert_ramp(trace)
    np.testing.assert_array_equal(trace.samples[0].util_pct[:3], [0, 7, 14])


@pytest.mark.parametrize("missing", ["[N/A]", "[Not Supported]", "N/A", "[Unknown Error]", "-", ""])
def test_missing_values_are_unknown(tmp_path: Path, missing: str) -> None:
    lines = [line.rsplit(",", 1)[0] + f", {missing}" for line in query_lines()]
    lines[5] = f"{stamp(START_S + 1)}, 0, {missing}, {missing}"
    trace = read(tmp_path, "\n".join([header(), *lines]) + "\n")
    assert np.isnan(trace.samples[0].util_pct).all()
    assert np.flatnonzero(np.isnan(trace.samples[0].used_bytes)).tolist() == [5]


@pytest.mark.parametrize("bad", ["1e400 MiB", "-5 MiB", "nan", "9" * 400, "12 parsec", "1_000 MiB"])
def test_impossible_values(tmp_path: Path, bad: str) -> None:
    lines = query_lines()
    lines[5] = f"{stamp(START_S + 1)}, 0, {bad}, 3 %"
    samples = read(tmp_path, "\n".join([header(), *lines]) + "\n").samples[0]
    assert len(samples.used_bytes) in (39, 40)
    assert np.isnan(samples.used_bytes[5]) or len(samples.used_bytes) == 39


def test_quantities() -> None:
    assert read_bytes("1225 MiB") == read_bytes("1225") == 1225 * MIB
    assert read_bytes("2 GiB") == 2048 * MIB
    assert read_bytes("4 %") is None
    assert read_quantity("371.55 W") == (371.55, "W")
    value, unit = read_quantity("[N/A]") or (0.0, "?")
    assert math.isnan(value)
    assert unit == ""


def test_compute_apps(tmp_path: Path) -> None:
    """Processes alone: their sum is the memory known of the device."""
    lines = ["timestamp, pid, process_name, used_gpu_memory [MiB], gpu_uuid"]
    for q in range(30):
        for pid, used in ((4242, 1000 + q), (4300, 300)):
            if pid == 4242 or q >= 10:
                name = "python, train.py" if pid == 4242 else "other"
                lines.append(f"{stamp(START_S + q)}, {pid}, {name}, {used} MiB, {UUIDS[0]}")
    (samples,) = read(tmp_path, "\n".join(lines) + "\n").samples
    assert samples.device == UUIDS[0]
    np.testing.assert_array_equal(samples.by_process[4300], [0.0] * 10 + [300 * MIB] * 20)
    np.testing.assert_array_equal(samples.used_bytes, sum(samples.by_process.values()))


def test_compute_apps_beside_a_query(tmp_path: Path) -> None:
    apps = "timestamp, gpu_uuid, pid, used_gpu_memory [MiB]\n" + "".join(
        f"{stamp(START_S + 0.2 * q + 0.01)}, {UUIDS[1]}, 4242, {1000 + q} MiB\n" for q in range(40)
    )
    rows = query_csv(gpus=2, columns="timestamp index uuid used")
    trace = read_trace([write(tmp_path / "q", rows), write(tmp_path / "a", apps)])
    assert trace.devices == ["0", "1"]
    assert not trace.samples[0].by_process
    held = trace.samples[1].by_process[4242]
    assert math.isnan(held[0])
    np.testing.assert_array_equal(held[1:], [(1000 + q) * MIB for q in range(39)])


def test_hidden_process_memory_is_unknown(tmp_path: Path) -> None:
    """Windows tells which processes there are, but not what they hold."""
    text = "pid, used_gpu_memory [MiB]\n" + "1584, [N/A]\n7500, [N/A]\n" * 5
    (samples,) = read(tmp_path, text).samples
    assert np.isnan(samples.used_bytes).all()
    assert np.isnan(samples.by_process[1584]).all()


def test_no_timestamps(tmp_path: Path) -> None:
    trace = read(tmp_path, query_csv(columns="index used"))
    assert not trace.samples[0].dated
    np.testing.assert_array_equal(trace.samples[0].time_s, np.arange(40))
    assert "1 s between them is assumed" in trace.notes[0]


def test_gaps_are_said(tmp_path: Path) -> None:
    lines = query_lines()
    trace = read(tmp_path, "\n".join([header(), *lines[:10], *lines[30:]]) + "\n")
    assert "1 gap(s) in the samples, the longest 4.2 s" in trace.notes[0]


def test_separated_by_semicolons_and_quoted(tmp_path: Path) -> None:
    text = query_csv().replace(",", ";")
    assert_ramp(read(tmp_path, text))
    quoted = "\n".join(
        ",".join(f'"{cell}"' for cell in line.split(", ")) for line in query_csv().splitlines()
    )
    assert_ramp(read(tmp_path, quoted + "\n"))


@settings(max_examples=15, deadline=None)
@given(st.permutations((*TIMED, "total", "uuid", "bus", "name", "power")))
def test_permuted_columns_tell_the_same(
    tmp_path_factory: pytest.TempPathFactory, order: list[str]
) -> None:
    path = tmp_path_factory.mktemp("smi")
    whole = read(path, query_csv(gpus=2, columns=" ".join(sorted(order))))
    assert_same(read(path, query_csv(gpus=2, columns=" ".join(order))), whole)


def test_a_uuid_cannot_command_a_terminal(tmp_path: Path) -> None:
    rows = [f"GPU-\x1b]0;x\x07{g}, {1000 + g} MiB" for g in (1, 2)] * 12
    trace = read(tmp_path, "\n".join(["uuid, memory.used [MiB]", *rows]) + "\n")
    assert trace.devices == ["GPU- ]0;x 1", "GPU- ]0;x 2"]
