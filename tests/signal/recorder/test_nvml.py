"""The driver's readings: what NVML refuses, hides or splits is unknown, and never zero."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.recorder.nvml import (
    MIB,
    Device,
    Nvml,
    Reading,
    SmiProgram,
    Unavailable,
    driver_facts,
    open_source,
    parse_rows,
    process_bytes,
    told_processes,
)
from tests.support.fake_nvml import (
    ALL_ONES,
    GIB,
    FakeNvml,
    NoPermission,
    NotSupported,
    NVMLError,
    gpu,
)


def read_one(handle: dict[str, Any]) -> Reading:
    (reading,) = Nvml(FakeNvml([handle])).read(None)
    return reading


def test_everything_known() -> None:
    reading = read_one(gpu())
    assert (reading.device, reading.used_bytes, reading.total_bytes) == ("0", 3 * GIB, 140 * GIB)
    assert (reading.util_pct, reading.processes) == (87.0, {11: 2 * GIB, 12: GIB})


def test_an_old_driver_counts_its_own_reserve_as_used() -> None:
    assert read_one(gpu(memory=None)).used_bytes == 4 * GIB


@pytest.mark.parametrize("refusal", [NotSupported(), NoPermission()])
def test_refused_values_are_unknown_one_by_one(refusal: Exception) -> None:
    without_memory = read_one(gpu(memory=refusal, memory_with_reserve=refusal))
    assert (without_memory.used_bytes, without_memory.total_bytes) == (None, None)
    assert without_memory.util_pct == 87.0
    assert read_one(gpu(util=refusal)).util_pct is None
    assert read_one(gpu(compute=refusal, graphics=refusal)).processes is None
    assert read_one(gpu(graphics=refusal)).processes == {11: 2 * GIB, 12: GIB}
    refused = dict.fromkeys(
        ("memory", "memory_with_reserve", "util", "compute", "graphics"), refusal
    )
    assert read_one(gpu(**refused)).is_empty


def test_a_container_that_hides_processes_knows_none_of_them() -> None:
    assert read_one(gpu(compute=[])).processes is None
    assert read_one(gpu(compute=[], memory=(2 * MIB, 140 * GIB))).processes == {}


@pytest.mark.parametrize("held", [ALL_ONES, None, -1])
def test_a_process_whose_memory_is_not_told_is_there_all_the_same(held: int | None) -> None:
    assert read_one(gpu(compute=[(11, held)])).processes == {11: None}


def test_a_process_in_both_lists_counts_once() -> None:
    assert told_processes([[(1, None)], [(1, 5)]], GIB) == {1: 5}
    assert told_processes([[(1, 5)], [(1, None)]], GIB) == {1: 5}
    assert told_processes([None, None], GIB) is None


@given(st.one_of(st.none(), st.integers()))
def test_process_memory_is_possible_or_unknown(value: int | None) -> None:
    held = process_bytes(value)
    assert held is None or (held == value and 0 <= held < 2**60)


def test_mig_instances_are_devices_and_their_utilisation_is_unknown() -> None:
    part = gpu(uuid="MIG-11", name="H200 MIG 1g.18gb", memory=(GIB, 16 * GIB), util=5)
    split = gpu(mig=(1, 1), parts=[part], memory=NoPermission(), memory_with_reserve=NoPermission())
    source = Nvml(FakeNvml([gpu(uuid="GPU-00", mig=(0, 0)), split]))
    assert [device.name for device in source.devices()] == ["0", "1", "MIG-11"]
    whole, parent, instance = source.read(None)
    assert whole.util_pct == 87.0
    assert (parent.used_bytes, parent.util_pct) == (None, None)
    assert (instance.device, instance.used_bytes, instance.util_pct) == ("MIG-11", GIB, None)
    assert [reading.device for reading in source.read({"MIG-11"})] == ["MIG-11"]
    assert source.devices()[2].bare_uuid == "11"


def test_a_lost_device_makes_the_source_unavailable() -> None:
    fake = FakeNvml([gpu()])
    source = Nvml(fake)
    fake.gpus[0]["memory"] = NVMLError("GPU is lost")
    with pytest.raises(Unavailable, match="GPU is lost"):
        source.read(None)


def test_nvml_that_cannot_start_is_unavailable_and_closed_again() -> None:
    with pytest.raises(Unavailable, match="no driver"):
        Nvml(FakeNvml([], init=NVMLError("no driver")))
    broken = FakeNvml([gpu(uuid=NVMLError("reset required"))])
    with pytest.raises(Unavailable, match="reset required"):
        Nvml(broken)
    assert broken.open == 0
    fake = FakeNvml([gpu()])
    Nvml(fake).close()
    assert fake.open == 0


def program(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def no_module(name: str) -> Any:
    raise ImportError(name)


def test_without_pynvml_the_program_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = "1, GPU-bb, NVIDIA H200, 1225, 143771, [N/A]"
    smi = program(tmp_path, f'echo "$@" > {tmp_path}/asked; echo "{row}"')
    source = open_source(no_module, lambda name: smi)
    assert "sampled by nvidia-smi, once a second at most: the Python module pynvml" in caplog.text
    (reading,) = source.read(None)
    assert (reading.device, reading.used_bytes, reading.total_bytes) == (
        "1",
        1225 * MIB,
        143771 * MIB,
    )
    assert (reading.util_pct, reading.processes) == (None, None)
    assert source.devices()[0].uuid == "GPU-bb"
    assert source.read({"0"}) == []
    assert source.hz_limit == 1.0
    assert "--format=csv,noheader,nounits" in (tmp_path / "asked").read_text()


def test_nvml_is_preferred() -> None:
    fake = FakeNvml([gpu()])
    assert isinstance(open_source(lambda name: fake, lambda name: None), Nvml)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'NVIDIA-SMI has failed: no driver'; exit 9", "no driver"),
        ("exit 3", "exit 3"),
    ],
)
def test_a_program_that_fails_says_why(tmp_path: Path, script: str, said: str) -> None:
    with pytest.raises(Unavailable, match=said):
        SmiProgram(program(tmp_path, script))


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(Unavailable, match="timed out after 5"):
        SmiProgram("nvidia-smi")


def test_with_neither_both_reasons_are_said() -> None:
    with pytest.raises(Unavailable, match=r"pynvml is not there.*no program nvidia-smi"):
        open_source(no_module, lambda name: None)
    dead = FakeNvml([], init=NVMLError("Driver Not Loaded"))
    with pytest.raises(Unavailable, match=r"Driver Not Loaded.*no program nvidia-smi"):
        open_source(lambda name: dead, lambda name: None)


CELL = st.one_of(st.text(max_size=6), st.from_regex(r"[0-9.²]{0,5}( MiB)?", fullmatch=True))


@given(st.lists(CELL, min_size=5, max_size=7))
def test_no_cell_breaks_a_row(cells: list[str]) -> None:
    for device, reading in parse_rows(", ".join(cells), 1.0):
        assert (device.name, reading.processes) == (reading.device, None)
        assert reading.used_bytes is None or reading.used_bytes >= 0


# driver_facts


class FakeSource:
    hz_limit = 1.0

    def __init__(self) -> None:
        self.closed = False

    def devices(self) -> list[Device]:
        return [Device("0", "GPU-a", "NVIDIA H200", 10), Device("MIG-1", "MIG-1", "", None)]

    def read(self, names: object) -> list[Reading]:
        return []

    def close(self) -> None:
        self.closed = True


def refuse() -> None:
    raise NVMLError("uninitialised")


def use_nvml(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))


def test_gpus_and_driver_come_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nvml(
        monkeypatch,
        nvmlSystemGetDriverVersion=lambda: b"580.159.04",
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
    )
    source = FakeSource()
    facts = driver_facts(lambda: source)
    assert facts["driver"] == "580.159.04"
    assert facts["driver_cuda"] == "12.4"
    assert facts["gpus"] == [
        {"index": "0", "uuid": "GPU-a", "name": "NVIDIA H200", "total_bytes": 10},
        {"index": "MIG-1", "uuid": "MIG-1", "name": "", "total_bytes": None},
    ]
    assert source.closed
    assert json.loads(json.dumps(facts)) == facts


def test_a_driver_that_tells_no_version_leaves_the_gpus_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_nvml(monkeypatch, nvmlSystemGetDriverVersion=refuse)
    facts = driver_facts(FakeSource)
    assert facts["driver"] is None
    assert len(facts["gpus"]) == 2


def test_without_a_driver_the_gpus_are_unknown_and_not_none_at_all() -> None:
    def missing() -> FakeSource:
        raise Unavailable("no driver")

    assert driver_facts(missing) == {"gpus": None, "driver": None, "driver_cuda": None}
