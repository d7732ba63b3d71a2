"""Devices: which one a run uses, and what the machine has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import DeviceError


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
        # cuBLAS keeps float32 exact unless asked; drafters compare with float32 references.
        torch.backends.cuda.matmul.allow_tf32 = False
    return device


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
