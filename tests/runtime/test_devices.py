"""Which device a run uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftline.choices import Choices
from draftline.errors import DeviceError
from draftline.runtime.devices import (
    DeviceFacts,
    describe_device,
    keep_float32_exact,
    on_device,
    parse_devices,
    pick_device,
    shown_by_cuda,
    synchronize,
    upload,
    visible_devices,
)
from tests.support.fake_nvml import GIB, MIB, FakeNvml, NVMLError, gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with two GPUs, as far as counting goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield monkeypatch
    torch.backends.cuda.matmul.allow_tf32 = before


def test_auto_takes_the_first_gpu_and_records_why(gpus: pytest.MonkeyPatch) -> None:
    choices = Choices()
    assert pick_device("auto", choices) == torch.device("cuda", 0)
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto", choices) == torch.device("cpu")
    seen = [(c.what, c.wanted, c.got, c.reason, c.fallback) for c in choices.entries]
    assert seen == [
        ("run.device", "auto", "cuda:0", "2 CUDA device(s) visible", False),
        ("run.device", "auto", "cpu", "no CUDA device is visible", False),
    ]


def test_a_named_device_is_no_automatic_choice(gpus: pytest.MonkeyPatch) -> None:
    choices = Choices()
    assert pick_device("cpu", choices) == torch.device("cpu")
    assert torch.backends.cuda.matmul.allow_tf32, "a CPU run changed CUDA's settings"
    assert pick_device("cuda:1", choices) == torch.device("cuda", 1)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert pick_device("cuda", choices) == torch.device("cuda", 0)
    assert choices.entries == []


def test_a_gpu_that_is_not_there_says_which_are(gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"run.device=cuda:2: 2 CUDA .* use cpu, or cuda:0..1"):
        pick_device("cuda:2", Choices())
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=rf"run.device={wanted}: no CUDA .*run.device=cpu"):
            pick_device(wanted, Choices())


@pytest.mark.parametrize("wanted", ["tpu", "gpu", "meta", "mps", "cuda:x", ""])
def test_another_kind_of_device_is_refused(wanted: str) -> None:
    with pytest.raises(DeviceError, match=rf"run.device={wanted} is not one of auto, cpu, cuda"):
        pick_device(wanted, Choices())


def test_a_cpu_is_described_and_needs_no_waiting() -> None:
    assert describe_device(torch.device("cpu")) == f"CPU, {torch.get_num_threads()} threads"
    synchronize(torch.device("cpu"))


def test_visible_gpus_are_listed_without_a_context_on_any(gpus: pytest.MonkeyPatch) -> None:
    """CUDA would make one on each GPU that it is asked about."""
    fake = FakeNvml([gpu(uuid="GPU-aaaa"), gpu(uuid="GPU-bbbb", memory_with_reserve=(MIB, GIB))])
    gpus.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    gpus.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for asks in ("mem_get_info", "get_device_properties", "init"):
        gpus.setattr(torch.cuda, asks, lambda *_, asks=asks: pytest.fail(f"asked CUDA: {asks}"))
    name = "NVIDIA H200"
    first, second = (
        DeviceFacts(name, 140 * GIB, 136 * GIB),
        DeviceFacts(name, GIB, GIB - MIB),
    )
    assert visible_devices(Choices()) == (first, second)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-aa")
    assert visible_devices(Choices()) == (second, first)
    assert fake.open == 0
    gpus.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_devices(Choices()) == ()


@pytest.mark.parametrize(
    "driver",
    [
        None,
        FakeNvml([], init=NVMLError("no driver")),
        FakeNvml([gpu()]),
        FakeNvml([gpu(memory_with_reserve=NVMLError("gone")), gpu()]),
        FakeNvml([gpu(name="NVIDIA L4"), gpu()]),
    ],
)
def test_cuda_is_asked_where_the_driver_does_not_say(
    gpus: pytest.MonkeyPatch, driver: FakeNvml | None
) -> None:
    gpus.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    gpus.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.delenv("CUDA_DEVICE_ORDER", raising=False)
    gpus.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 100 + index))
    gpus.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=f"gpu {index}")
    )
    choices = Choices()
    assert visible_devices(choices) == (
        DeviceFacts("gpu 0", 100, 10),
        DeviceFacts("gpu 1", 101, 11),
    )
    assert [entry.what for entry in choices.entries] == ["devices"]


ALIKE, UNLIKE = ["H200", "H200", "H200"], ["L4", "H200", "H200"]
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("names", "variables", "shown"),
    [
        (ALIKE, {}, [0, 1, 2]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": " 1 , GPU-cc"}, [1, 2]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "0,7,1"}, [0]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "0,0"}, [0]),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-1-2"}, []),
        (UNLIKE, {}, []),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1"}, []),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}, [1]),
        (UNLIKE, PCI, [0, 1, 2]),
        (UNLIKE, {"CUDA_VISIBLE_DEVICES": "1,0", **PCI}, [1, 0]),
    ],
)
def test_which_gpus_cuda_shows(
    names: list[str], variables: dict[str, str], shown: list[int]
) -> None:
    assert shown_by_cuda(names, ["GPU-aaa", "GPU-bbb", "GPU-ccc"], variables) == shown


def test_thought_of_gpus_have_all_their_memory_free() -> None:
    assert (
        parse_devices("2x80.5") == (DeviceFacts("GPU of 80.5 GiB", *[int(80.5 * 2**30)] * 2),) * 2
    )
    [known] = parse_devices("1xh200")
    assert known.name == "NVIDIA H200"
    assert known.free_bytes == int(139.8 * 2**30)
    assert parse_devices("0x0") == ()


@pytest.mark.parametrize(
    "text",
    [
        "8",
        "x",
        "8xx",
        "8x",
        "-1x80",
        "99999999999x1",
        "8x-3",
        "8xnan",
        "8xinf",
        "8xA9",
        "0xH200",
        "8x0",
    ],
)
def test_what_is_no_list_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match=f"--devices {text} is not COUNTxGIB"):
        parse_devices(text)


def test_tf32_goes_off_where_a_gpu_is_used(gpus: pytest.MonkeyPatch) -> None:
    keep_float32_exact([torch.device("cpu")])
    assert torch.backends.cuda.matmul.allow_tf32
    keep_float32_exact([torch.device("cpu"), torch.device("cuda", 1)])
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_device_and_its_stream_are_current_inside_only(gpus: pytest.MonkeyPatch) -> None:
    current: list[object] = []

    @contextmanager
    def enter(what: object) -> Iterator[None]:
        current.append(what)
        try:
            yield
        finally:
            current.pop()

    gpus.setattr(torch.cuda, "device", enter)
    gpus.setattr(torch.cuda, "stream", enter)
    with on_device(torch.device("cpu")):
        assert current == []
    with pytest.raises(KeyError), on_device(torch.device("cuda", 1)):  # noqa: PT012
        assert current == [torch.device("cuda", 1), None]
        raise KeyError
    with on_device(torch.device("cuda", 1), "a stream"):  # type: ignore[arg-type]
        assert current == [torch.device("cuda", 1), "a stream"]
    assert current == []


def test_an_uploaded_array_keeps_values_and_type_whatever_its_layout() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (array, array.T, array[::2, ::-1], array[:, 3]):
        tensor = upload(view, torch.device("cpu"))
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        assert tensor.tolist() == view.tolist()
