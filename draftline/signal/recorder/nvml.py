"""The driver's readings of each device: through NVML, or through the `nvidia-smi` program where
NVML's Python module is missing. A value that the driver does not give is None, never zero.
"""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from draftline.signal.recorder.clock import now_s
from draftline.signal.trace import MIB

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]+)?")
# NVML writes "not available" into a process's memory as all ones; no device holds an exbibyte.
_IMPOSSIBLE_BYTES = 1 << 60
# More used memory than an idle device has of its own: somebody is there.
_SOMEBODY_BYTES = 64 * MIB
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
    """One device at a moment of the recorder's own clock. `processes` is bytes by process id (None
    where a process's are not told), or None where the driver does not say who is on the device."""

    device: str
    time_s: float
    used_bytes: int | None
    total_bytes: int | None
    util_pct: float | None
    processes: Mapping[int, int | None] | None

    @property
    def is_empty(self) -> bool:
        """Whether the driver told nothing that changes."""
        return self.used_bytes is None and self.util_pct is None and self.processes is None

    def without_processes(self) -> Reading:
        return replace(self, processes=None)


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the driver names it: `name` is its index as text, or a MIG instance's uuid."""

    name: str
    uuid: str
    product: str
    total_bytes: int | None

    @property
    def bare_uuid(self) -> str:
        """The uuid without what kind of thing it names, as CUDA has it."""
        return self.uuid.lower().removeprefix("gpu-").removeprefix("mig-")


class Source(Protocol):
    """Where readings come from. `hz_limit` is how many times a second it may be asked. `read` takes the
    names of the devices wanted (None: all) and raises Unavailable."""

    hz_limit: float

    def devices(self) -> list[Device]: ...

    def read(self, names: Collection[str] | None) -> list[Reading]: ...

    def close(self) -> None: ...


def process_bytes(value: int | None) -> int | None:
    """A process's memory, None where NVML says that it does not know."""
    return None if value is None or not 0 <= value < _IMPOSSIBLE_BYTES else value


def told_processes(
    lists: Iterable[Iterable[tuple[int, int | None]] | None], used_bytes: int | None
) -> dict[int, int | None] | None:
    """Bytes by process out of NVML's lists (None: refused), or None where they cannot be all: none
    was given, or they are empty although somebody's memory is there, which is how a container that
    hides processes looks."""
    given = [rows for rows in lists if rows is not None]
    if not given:
        return None
    told: dict[int, int | None] = {}
    for rows in given:
        for pid, held in rows:
            told[pid] = process_bytes(held) if told.get(pid) is None else told[pid]
    hidden = not told and (used_bytes is None or used_bytes > _SOMEBODY_BYTES)
    return None if hidden else told


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
        except module.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None
        try:
            self._handles = self._find()
        except module.NVMLError as error:
            self.close()
            raise Unavailable(f"NVML: {error}") from None

    def _find(self) -> list[tuple[Device, Any, bool]]:
        """Every device with its handle and whether it is split (its utilisation is unknown then)."""
        nvml = self._nvml
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            mode = self._ask("nvmlDeviceGetMigMode", handle)
            split = bool(mode and mode[0])
            found.append((self._describe(str(index), handle), handle, split))
            if split:
                found += [(self._describe(None, part), part, True) for part in self._parts(handle)]
        return found

    def _parts(self, handle: Any) -> list[Any]:
        places = range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        parts = []
        for place in places:
            try:
                parts.append(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
            except self._nvml.NVMLError:  # an empty place
                continue
        return parts

    def _describe(self, name: str | None, handle: Any) -> Device:
        uuid = str(self._ask("nvmlDeviceGetUUID", handle) or "")
        product = str(self._ask("nvmlDeviceGetName", handle) or "")
        return Device(name or uuid, uuid, product, self._memory(handle)[1])

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The function's answer, or None where the driver refuses this value."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._refusals:
            return None

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Used and total bytes as nvidia-smi shows them: without what the driver keeps for itself,
        where it tells that apart."""
        second = getattr(self._nvml, "nvmlMemory_v2", None)
        info = second and self._ask("nvmlDeviceGetMemoryInfo", handle, second)
        info = info or self._ask("nvmlDeviceGetMemoryInfo", handle)
        return (None, None) if info is None else (int(info.used), int(info.total))

    def _listed(self, name: str, handle: Any) -> list[tuple[int, int | None]] | None:
        rows = self._ask(name, handle)
        return None if rows is None else [(int(row.pid), row.usedGpuMemory) for row in rows]

    def devices(self) -> list[Device]:
        return [device for device, _, _ in self._handles]

    def read(self, names: Collection[str] | None) -> list[Reading]:
        try:
            return [
                self._read(device, handle, split)
                for device, handle, split in self._handles
                if names is None or device.name in names
            ]
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None

    def _read(self, device: Device, handle: Any, split: bool) -> Reading:
        used, total = self._memory(handle)
        util = None if split else self._ask("nvmlDeviceGetUtilizationRates", handle)
        lists = [
            self._listed("nvmlDeviceGetComputeRunningProcesses", handle),
            self._listed("nvmlDeviceGetGraphicsRunningProcesses", handle),
        ]
        busy = None if util is None else float(util.gpu)
        return Reading(device.name, now_s(), used, total, busy, told_processes(lists, used))

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


class SmiProgram:
    """Readings through the `nvidia-smi` program, at most one per second; processes are unknown."""

    hz_limit = 1.0
    _COLUMNS = "index,uuid,name,memory.used,memory.total,utilization.gpu"

    def __init__(self, program: str) -> None:
        self._command = [
            program,
            f"--query-gpu={self._COLUMNS}",
            "--format=csv,noheader,nounits",
        ]
        self._devices = [device for device, _ in self._rows()]

    def _rows(self) -> list[tuple[Device, Reading]]:
        try:
            done = subprocess.run(
                self._command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"nvidia-smi: {error}") from None
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip().splitlines()
            raise Unavailable(f"nvidia-smi: {said[0] if said else f'exit {done.returncode}'}")
        return parse_rows(done.stdout, now_s())

    def devices(self) -> list[Device]:
        return self._devices

    def read(self, names: Collection[str] | None) -> list[Reading]:
        return [
            reading for device, reading in self._rows() if names is None or device.name in names
        ]

    def close(self) -> None:
        return


def parse_rows(text: str, time_s: float) -> list[tuple[Device, Reading]]:
    """Devices and readings out of rows without header and units; what is not a number is None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6:
            continue
        index, uuid, product = cells[:3]
        used, total, util = (float(c) if _NUMBER.fullmatch(c) else None for c in cells[3:])
        used_bytes = None if used is None else int(used * MIB)
        total_bytes = None if total is None else int(total * MIB)
        reading = Reading(index, time_s, used_bytes, total_bytes, util, None)
        rows.append((Device(index, uuid, product, total_bytes), reading))
    return rows


def open_source(
    load: Callable[[str], Any] = importlib.import_module,
    find: Callable[[str], str | None] = shutil.which,
) -> Source:
    """NVML, else the `nvidia-smi` program. Raises Unavailable with what was wrong with both."""
    try:
        return Nvml(load("pynvml"))
    except ImportError:
        why = "the Python module pynvml is not there (pip install nvidia-ml-py)"
    except Unavailable as error:
        why = str(error)
    program = find("nvidia-smi")
    if program is None:
        raise Unavailable(f"{why}, and there is no program nvidia-smi")
    log.warning("device memory is sampled by nvidia-smi, once a second at most: %s", why)
    return SmiProgram(program)


def driver_facts(source: Callable[[], Source] = open_source) -> dict[str, Any]:
    """What the driver says of the machine: `gpus` (every one that it shows), its version as `driver`,
    and as `driver_cuda` the newest CUDA it can run. None stands for what is unknown."""
    facts: dict[str, Any] = {"gpus": None, "driver": None, "driver_cuda": None}
    try:
        opened = source()
    except Unavailable:
        return facts
    try:
        facts["gpus"] = [
            {"index": d.name, "uuid": d.uuid, "name": d.product, "total_bytes": d.total_bytes}
            for d in opened.devices()
        ]
        return facts | _versions()
    finally:
        opened.close()


def _versions() -> dict[str, str]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        version = nvml.nvmlSystemGetDriverVersion()
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
    except (nvml.NVMLError, AttributeError, ValueError):
        return {}
    text = version.decode(errors="replace") if isinstance(version, bytes) else str(version)
    return {"driver": text, "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"}
