"""What the driver calls the devices that this program calls `cuda:N`: a program may see only some of
them, in another order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from draftline.signal.recorder import counters
from draftline.signal.recorder.counters import CudaDevice
from draftline.signal.recorder.nvml import Device


def driver_name(cuda: CudaDevice, driver: list[Device], visible: str | None) -> str:
    """The driver's name of a CUDA device: by its uuid, else by CUDA_VISIBLE_DEVICES where that gives
    numbers, else its own number."""
    if cuda.uuid is not None:
        for device in driver:
            if device.bare_uuid == cuda.uuid.lower():
                return device.name
    listed = [part.strip() for part in (visible or "").split(",")]
    if cuda.ordinal < len(listed) and listed[cuda.ordinal].isdigit():
        return listed[cuda.ordinal]
    return str(cuda.ordinal)


class DeviceNames:
    """The devices that the program has begun to use: `by_ordinal` gives the driver's names, and
    `described` what is known of each. `driver` lists the driver's devices."""

    def __init__(self, driver: Callable[[], list[Device]]) -> None:
        self.by_ordinal: dict[int, str] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self._driver = driver
        self._looking = threading.Lock()

    @property
    def in_use(self) -> frozenset[str]:
        return frozenset(self.by_ordinal.values())

    def look(self) -> dict[str, dict[str, Any]]:
        """Takes in devices that are new, and describes them."""
        with self._looking:
            new = {}
            for ordinal in counters.active_devices():
                cuda = None if ordinal in self.by_ordinal else counters.cuda_device(ordinal)
                if cuda is None:
                    continue
                name = driver_name(cuda, self._driver(), os.environ.get("CUDA_VISIBLE_DEVICES"))
                new[f"cuda:{ordinal}"] = {
                    "index": int(name) if name.isdigit() else None,
                    "uuid": next((d.uuid for d in self._driver() if d.name == name), cuda.uuid),
                    "name": cuda.name,
                    "total_bytes": cuda.total_bytes,
                }
                self.by_ordinal = {**self.by_ordinal, ordinal: name}
            self.described = {**self.described, **new}
            return new
