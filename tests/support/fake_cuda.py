"""A stand-in for a torch that has initialised CUDA, as far as the recorder looks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest


def stats(**changes: int) -> dict[str, Any]:
    """`torch.cuda.memory_stats_as_nested_dict` of a device, with figures of its own."""
    known = {
        "calls": 7,
        "allocated": 100,
        "peak": 150,
        "reserved": 400,
        "inactive": 20,
        "device_allocations": 3,
        "device_frees": 0,
        "retries": 0,
        "ooms": 0,
    } | changes

    def all_pools(**values: int) -> dict[str, Any]:
        return {"all": values, "large_pool": dict.fromkeys(values, -1)}

    return {
        "allocation": all_pools(allocated=known["calls"], current=1),
        "allocated_bytes": all_pools(current=known["allocated"], peak=known["peak"]),
        "reserved_bytes": all_pools(current=known["reserved"]),
        "inactive_split_bytes": all_pools(current=known["inactive"]),
        "num_device_alloc": known["device_allocations"],
        "num_device_free": known["device_frees"],
        "num_alloc_retries": known["retries"],
        "num_ooms": known["ooms"],
    }


def idle() -> dict[str, Any]:
    return stats(**dict.fromkeys(("calls", "allocated", "peak", "reserved", "inactive"), 0))


@dataclass
class FakeCuda:
    """`devices` are the stats of cuda:0, cuda:1 and so on; `uuids` what CUDA calls them."""

    devices: list[dict[str, Any]] = field(default_factory=lambda: [stats()])
    uuids: list[str | None] = field(default_factory=lambda: ["aa", "bb", "cc"])
    initialised: bool = True
    peaks_reset: list[int] = field(default_factory=list)

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return len(self.devices)

    def memory_stats_as_nested_dict(self, ordinal: int) -> dict[str, Any]:
        return self.devices[ordinal]

    def reset_peak_memory_stats(self, ordinal: int) -> None:
        self.peaks_reset.append(ordinal)

    def get_device_properties(self, ordinal: int) -> Any:
        uuid = self.uuids[ordinal]
        extra = {} if uuid is None else {"uuid": uuid}
        return SimpleNamespace(name="NVIDIA H200", total_memory=1000, **extra)

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        """Puts it where a loaded torch would be, without Dynamo; itself."""
        for name in list(sys.modules):
            if name == "torch" or name.startswith("torch."):
                patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=self))
        patch.setitem(sys.modules, "torch.cuda", self)
        return self
