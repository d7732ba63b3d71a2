"""The driver's readings of each device: through NVML, or through the `nvidia-smi` program where
NVML's Python module is missing. A value that the driver does not give is None, never zero.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_NOT_AVAILABLE = (1 << 64) - 1  # NVML's "not available" for a process's memory
# What a driver may refuse for one value while the device is well; anything else means trouble.
_REFUSALS = (
    "NVMLError_NotSupported",
    "NVMLError_NoPermission",
    "NVMLError_InvalidArgument",
    "NVMLError_FunctionNotFound",
    "NVMLError_ArgumentVersionMismatch",
)


class Unavailable(Exception):
    """No reading can be had now; the message says why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at a moment. `processes` is bytes by process id (None where a process's are not
    told), or None where the driver does not say who is on the device."""

    device: str
    time_s: float
    used_bytes: int | None
    total_bytes: int | None
    util_pct: float | None
    processes: Mapping[int, int | None] | None


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the driver names it: `name` is its index as text, or a MIG instance's uuid."""

    name: str
    uuid: str
    product: str
    total_bytes: int | None


class Source(Protocol):
    """Where readings come from. `hz_limit` is how often it may be asked."""

    hz_limit: float

    def devices(self) -> list[Device]: ...

    def read(self, wanted: Callable[[str], bool]) -> list[Reading]: ...

    def close(self) -> None: ...


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def process_bytes(value: int | None) -> int | None:
    """A process's memory, None where NVML says that it does not know."""
    return None if value is None or value < 0 or value >= _NOT_AVAILABLE else value


class Nvml:
    """Readings through `pynvml`, given as `module`. Raises Unavailable where it cannot be had."""

    hz_limit = 100.0

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._refusals = tuple(
            kind for name in _REFUSALS if (kind := getattr(module, name, None)) is not None
        )
        try:
            module.nvmlInit()
            self._handles = self._find()
        except module.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None

    def _find(self) -> list[tuple[Device, Any, bool]]:
        """Every device with its handle and whether it is shared out (utilisation unknown)."""
        nvml = self._nvml
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            mode = self._ask(nvml.nvmlDeviceGetMigMode, handle)
            split = bool(mode and mode[0])
            found.append((self._describe(str(index), handle), handle, split))
            if split:
                found += [(self._describe(None, part), part, True) for part in self._parts(handle)]
        return found

    def _parts(self, handle: Any) -> list[Any]:
        count = self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        parts = []
        for place in range(count):
            try:
                parts.append(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
            except self._nvml.NVMLError:  # an empty place
                continue
        return parts

    def _describe(self, name: str | None, handle: Any) -> Device:
        uuid = _text(self._ask(self._nvml.nvmlDeviceGetUUID, handle) or "")
        product = _text(self._ask(self._nvml.nvmlDeviceGetName, handle) or "")
        return Device(name or uuid, uuid, product, self._memory(handle)[1])

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's answer, or None where the driver refuses this value."""
        try:
            return function(*arguments)
        except self._refusals:
            return None

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Used and total bytes as nvidia-smi shows them: without what the driver keeps for itself."""
        nvml = self._nvml
        version = getattr(nvml, "nvmlMemory_v2", None)
        info = None
        if version is not None:
            info = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, version)
        info = info or self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _processes(self, handle: Any) -> dict[int, int | None] | None:
        nvml = self._nvml
        lists = [
            self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle),
            self._ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
        ]
        if all(rows is None for rows in lists):
            return None
        return {
            int(row.pid): process_bytes(row.usedGpuMemory) for rows in lists for row in rows or ()
        }

    def devices(self) -> list[Device]:
        return [device for device, _, _ in self._handles]

    def read(self, wanted: Callable[[str], bool]) -> list[Reading]:
        readings = []
        try:
            for device, handle, split in self._handles:
                if not wanted(device.name):
                    continue
                used, total = self._memory(handle)
                util = None
                if not split:
                    util = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
                readings.append(
                    Reading(
                        device.name,
                        time.time(),
                        used,
                        total,
                        None if util is None else float(util.gpu),
                        self._processes(handle),
                    )
                )
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None
        return readings

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


class SmiProgram:
    """Readings through the `nvidia-smi` program, at most one a second; processes are unknown."""

    hz_limit = 1.0
    _QUERY = "index,uuid,name,memory.used,memory.total,utilization.gpu"

    def __init__(self, program: str) -> None:
        self._program = program
        self._devices = [device for device, _ in self._rows()]

    def _rows(self) -> list[tuple[Device, Reading]]:
        command = [self._program, f"--query-gpu={self._QUERY}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"nvidia-smi: {error}") from None
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise Unavailable(f"nvidia-smi: {said[0] if said else f'exit {done.returncode}'}")
        return parse_rows(done.stdout, time.time())

    def devices(self) -> list[Device]:
        return self._devices

    def read(self, wanted: Callable[[str], bool]) -> list[Reading]:
        return [reading for device, reading in self._rows() if wanted(device.name)]

    def close(self) -> None:
        return


def parse_rows(text: str, time_s: float) -> list[tuple[Device, Reading]]:
    """Devices and readings of `nvidia-smi`'s rows without units; what is not a number is None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6:
            continue
        index, uuid, product = cells[:3]
        used, total, util = (float(c) if c.replace(".", "").isdigit() else None for c in cells[3:])
        used_bytes = None if used is None else int(used * 2**20)
        total_bytes = None if total is None else int(total * 2**20)
        rows.append(
            (
                Device(index, uuid, product, total_bytes),
                Reading(index, time_s, used_bytes, total_bytes, util, None),
            )
        )
    return rows


def open_source() -> Source:
    """NVML, else the `nvidia-smi` program. Raises Unavailable with the reasons of both."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        why = "the Python module pynvml is not installed (pip install nvidia-ml-py)"
    else:
        try:
            return Nvml(pynvml)
        except Unavailable as error:
            why = str(error)
    program = shutil.which("nvidia-smi")
    if program is None:
        raise Unavailable(f"{why}, and there is no nvidia-smi")
    return SmiProgram(program)
