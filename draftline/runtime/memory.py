"""What the allocators of a run's devices did since its warm-up: in a sound run, nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """One device since the baseline: bytes reserved now and their change, requests served by the
    caching allocator, device allocations and frees, and retries after a failed one."""

    device: str
    reserved_bytes: int
    reserved_change_bytes: int
    allocator_calls: int
    device_allocations: int
    retries: int

    @property
    def flat(self) -> bool:
        """Whether nothing was taken from or given back to the device."""
        return not (self.reserved_change_bytes or self.device_allocations or self.retries)


class MemoryBaseline:
    """The allocators' counters of some CUDA devices at one moment; other devices are left out."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._before = [_counters(device) for device in self._devices]

    def changes(self) -> list[MemoryChange]:
        """What happened since; costs one lock per device, no synchronisation."""
        found = []
        for device, before in zip(self._devices, self._before, strict=True):
            now = _counters(device)
            reserved, calls, taken, given, retries = (
                n - b for n, b in zip(now, before, strict=True)
            )
            found.append(MemoryChange(str(device), now[0], reserved, calls, taken + given, retries))
        return found


def _counters(device: torch.device) -> tuple[int, int, int, int, int]:
    stats = torch.cuda.memory_stats(device)
    return (
        stats["reserved_bytes.all.current"],
        stats["allocation.all.allocated"],
        stats["num_device_alloc"],
        stats["num_device_free"],
        stats["num_alloc_retries"],
    )
