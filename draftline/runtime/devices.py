"""Devices: which one a run uses, and what the machine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

# What a name stands for in `--devices`: GiB as torch reports them.
_KNOWN_GIB = {"H200": 139.8}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A GPU's name and memory in bytes; its index is its place in the list of the visible ones."""

    name: str
    total_bytes: int
    free_bytes: int


def visible_devices() -> tuple[DeviceFacts, ...]:
    """Every GPU that this process can use, by index; empty on a machine without."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(DeviceFacts(torch.cuda.get_device_properties(index).name, total, free))
    return tuple(found)


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
