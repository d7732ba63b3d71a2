"""Devices: which one a run uses, and what the machine has."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import DeviceError

log = logging.getLogger(__name__)

# What a name stands for in `--devices`: GiB as torch reports them.
_KNOWN_GIB = {"H200": 139.8}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A GPU's name and memory in bytes; its index is its place in the list of the visible ones."""

    name: str
    total_bytes: int
    free_bytes: int


def visible_devices(choices: Choices) -> tuple[DeviceFacts, ...]:
    """Every GPU that this process can use, by index; empty on a machine without.

    The driver is asked, since CUDA would take some hundred MiB on every GPU that it is asked about, a
    neighbour's included. Where the driver's answer may not be CUDA's, CUDA is asked all the same, which
    is recorded.
    """
    count = torch.cuda.device_count()
    found = _ask_driver() if count else ()
    if len(found) == count:
        return found
    choices.record(
        "devices",
        wanted="the driver's list of GPUs",
        got="CUDA's, asked on each GPU",
        reason="the driver does not say which GPUs CUDA shows",
    )
    return tuple(_ask_cuda(index) for index in range(count))


def _ask_cuda(index: int) -> DeviceFacts:
    free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(torch.cuda.get_device_properties(index).name, total, free)


def _ask_driver() -> tuple[DeviceFacts, ...]:
    """The GPUs that CUDA shows, as NVML describes them; none where that cannot be told."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, or one that is too old
        return ()
    try:
        count = nvml.nvmlDeviceGetCount()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        names = [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        found = []
        for index in shown_by_cuda(names, uuids, os.environ):
            memory = nvml.nvmlDeviceGetMemoryInfo(handles[index])
            found.append(DeviceFacts(names[index], int(memory.total), int(memory.free)))
        return tuple(found)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def shown_by_cuda(
    names: Sequence[str], uuids: Sequence[str], variables: Mapping[str, str]
) -> list[int]:
    """Which of the driver's GPUs CUDA shows under the environment's `variables`, in CUDA's order.

    It ends at the first that only CUDA knows: GPUs that differ are numbered by their speed unless
    CUDA_DEVICE_ORDER says otherwise, parts of GPUs (MIG) by rules of their own.
    """
    same_order = len(set(names)) == 1 or variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    wanted = variables.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(len(names))) if same_order else []
    shown: list[int] = []
    for word in (part.strip() for part in wanted.split(",")):
        places = [i for i, uuid in enumerate(uuids) if len(word) > 4 and uuid.startswith(word)]
        if word.isdigit() and int(word) < len(names):
            places = [int(word)] if same_order else []
        # CUDA, too, stops at the first that it does not know, and takes no GPU twice.
        if len(places) != 1 or places[0] in shown:
            break
        shown += places
    return shown


def free_host_bytes() -> int | None:
    """Bytes that this process can still take: the machine's, or the container's where it is less.

    None where the system does not say (it is no Linux).
    """
    free = None
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        room = max(0, int(limit[0]) - int(used[0]))
        free = room if free is None else min(free, room)
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def parse_devices(text: str) -> tuple[DeviceFacts, ...]:
    """GPUs that are only thought of: `8x141` is eight of 141 GiB each, all of it free; `0x0` none.

    `8xH200` are eight whose speed is known too. Raises DeviceError for anything else.
    """
    count, _, size = text.partition("x")
    known = {name.lower(): gib for name, gib in _KNOWN_GIB.items()}
    try:
        number, gib = int(count), known.get(size.lower()) or float(size)
    except ValueError:
        number, gib = -1, 0.0
    # No GPUs of some size are more likely a slip than 0x0, which says that there is none.
    if not (0 <= number <= 4096 and 0 <= gib < 2**20) or (number == 0) != (gib == 0):
        raise DeviceError(
            f"--devices {text} is not COUNTxGIB such as 8x141, nor COUNTxNAME such as 8xH200; "
            f"only {', '.join(_KNOWN_GIB)} is a known name, and 0x0 plans for a CPU"
        )
    name = f"NVIDIA {size.upper()}" if size.lower() in known else f"GPU of {gib:g} GiB"
    return (DeviceFacts(name, int(gib * 2**30), int(gib * 2**30)),) * number


def pick_device(wanted: str, choices: Choices) -> torch.device:
    """The device `wanted` (auto, cpu, cuda, cuda:N); raises DeviceError when it is not there."""
    count = torch.cuda.device_count()
    if wanted == "auto":
        device = torch.device("cuda", 0) if count else torch.device("cpu")
        reason = f"{count} CUDA device(s) visible" if count else "no CUDA device is visible"
        choices.record("run.device", wanted="auto", got=str(device), reason=reason)
    else:
        try:
            device = torch.device(wanted)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise DeviceError(f"run.device={wanted} is not one of auto, cpu, cuda, cuda:N")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
    if device.type == "cuda":
        if device.index >= count:
            raise DeviceError(
                f"run.device={wanted}: {count} CUDA device(s) visible; use cpu, or cuda:0.."
                f"{count - 1}"
                if count
                else f"run.device={wanted}: no CUDA device is visible (driver, container, or "
                "CUDA_VISIBLE_DEVICES); use run.device=cpu"
            )
        keep_float32_exact([device])
    return device


def keep_float32_exact(devices: Sequence[torch.device]) -> None:
    """Turns off TF32 where a run uses a GPU: drafters are compared with float32 references."""
    if any(device.type == "cuda" for device in devices):
        torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Makes `device`, and `stream` if given, the calling thread's current ones; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def describe_device(device: torch.device) -> str:
    """Name and memory of a device, such as `NVIDIA H200, 139.7 GiB`."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`, queued on the current stream: the host does not wait for the copy."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        # From pageable memory the copy would wait for everything queued before it.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Waits for everything queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
