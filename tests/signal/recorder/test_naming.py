"""Which of the driver's devices is `cuda:N`."""

from __future__ import annotations

import pytest

from draftline.signal.recorder.counters import CudaDevice
from draftline.signal.recorder.naming import DeviceNames, driver_name
from draftline.signal.recorder.nvml import Device
from tests.support.fake_cuda import FakeCuda, idle, stats

DRIVER = [Device(str(i), f"GPU-{uuid}", "NVIDIA H200", None) for i, uuid in enumerate("abcd")]
MIG = [*DRIVER, Device("MIG-e", "MIG-e", "NVIDIA H200 MIG 1g.18gb", None)]


@pytest.mark.parametrize(
    ("uuid", "driver", "visible", "name"),
    [
        ("d", DRIVER, "3,1", "3"),
        ("D", DRIVER, None, "3"),  # in whatever case
        ("d", DRIVER, "1,3", "3"),  # the uuid is right where CUDA orders by speed
        ("e", MIG, "MIG-e", "MIG-e"),
        (None, DRIVER, "3,1", "3"),
        ("x", [], " 3, 1", "3"),
        (None, [], "GPU-d", "0"),
        (None, [], "", "0"),
        (None, [], None, "0"),
    ],
)
def test_driver_name(
    uuid: str | None, driver: list[Device], visible: str | None, name: str
) -> None:
    assert driver_name(CudaDevice(0, "NVIDIA H200", uuid, None), driver, visible) == name


def test_a_number_beyond_the_visible_ones_is_its_own() -> None:
    assert driver_name(CudaDevice(2, "", None, None), [], "5,6") == "2"


def test_devices_are_named_when_they_are_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([idle(), stats()], uuids=["d", "b"]).install(monkeypatch)
    names = DeviceNames(lambda: DRIVER)
    described = {"index": 1, "uuid": "GPU-b", "name": "NVIDIA H200", "total_bytes": 1000}
    assert names.look() == {"cuda:1": described}
    assert names.look() == {}
    cuda.devices[0] = stats()
    assert names.look() == {"cuda:0": described | {"index": 3, "uuid": "GPU-d"}}
    assert names.by_ordinal == {1: "1", 0: "3"}
    assert names.in_use == {"1", "3"}
    assert set(names.described) == {"cuda:0", "cuda:1"}


def test_a_mig_instance_has_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(uuids=["e"]).install(monkeypatch)
    described = DeviceNames(lambda: MIG).look()["cuda:0"]
    assert (described["index"], described["uuid"]) == (None, "MIG-e")
