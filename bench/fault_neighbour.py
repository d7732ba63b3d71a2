"""Another process on a device: takes and returns memory by the driver alone, until it is killed.

python bench/fault_neighbour.py cuda|cpu INDEX constant|stairs|ramp|saw MIB PERIOD_S
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
MAX_BLOCKS = 60


class Driver:
    """Memory of one device through libcuda: `take` returns an address for `give`."""

    def __init__(self, index: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise OSError(f"{name} returned {code}")

    def take(self, mib: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib * MIB))
        return address

    def give(self, address: ctypes.c_uint64) -> None:
        self._call("cuMemFree_v2", address)


class Host:
    """The same on a machine without a device."""

    def take(self, mib: int) -> bytearray:
        return bytearray(mib)

    def give(self, block: bytearray) -> None:
        block.clear()


def changes(pattern: str) -> Iterator[int]:
    """Blocks to hold after each period: constant, one more each (stairs: every fifth), or a saw."""
    for tick in itertools.count(1):
        if pattern == "constant":
            yield 1
        elif pattern == "stairs":
            yield min(1 + tick // 5, MAX_BLOCKS)
        elif pattern == "ramp":
            yield min(1 + tick, MAX_BLOCKS)
        else:
            yield 1 + tick % 8


def main(kind: str, index: str, pattern: str, mib: str, period_s: str) -> None:
    memory: Any = Driver(int(index)) if kind == "cuda" else Host()
    held = [memory.take(int(mib))]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for wanted in changes(pattern):
        time.sleep(float(period_s))
        while len(held) < wanted:
            held.append(memory.take(int(mib)))
        while len(held) > wanted:
            memory.give(held.pop())


if __name__ == "__main__":
    main(*sys.argv[1:])
