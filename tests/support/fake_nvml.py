"""A stand-in for pynvml: what a driver answers, and what it refuses, for each of its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MIB = 2**20
GIB = 1024 * MIB
ALL_ONES = (1 << 64) - 1


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class NoPermission(NVMLError):
    pass


class NotFound(NVMLError):
    pass


class FakeNvml:
    """`gpus` are the answers of each device by name, an exception where one is refused."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_NoPermission = NoPermission
    nvmlMemory_v2 = 2

    def __init__(self, gpus: list[dict[str, Any]], *, init: Exception | None = None) -> None:
        self.gpus = gpus
        self.init = init
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    @staticmethod
    def get(handle: dict[str, Any], name: str) -> Any:
        answer = handle.get(name, NotSupported())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def nvmlDeviceGetMigMode(self, handle: dict[str, Any]) -> Any:
        return self.get(handle, "mig")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], place: int) -> Any:
        parts = self.get(handle, "parts")
        if place >= len(parts):
            raise NotFound
        return parts[place]

    def nvmlDeviceGetUUID(self, handle: dict[str, Any]) -> Any:
        return self.get(handle, "uuid")

    def nvmlDeviceGetName(self, handle: dict[str, Any]) -> Any:
        return self.get(handle, "name")

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any], version: int | None = None) -> Any:
        used, total = self.get(handle, "memory" if version else "memory_with_reserve")
        return SimpleNamespace(used=used, total=total, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(gpu=self.get(handle, "util"))

    def rows(self, handle: dict[str, Any], name: str) -> Any:
        found = self.get(handle, name)
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in found]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: dict[str, Any]) -> Any:
        return self.rows(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: dict[str, Any]) -> Any:
        return self.rows(handle, "graphics")


def gpu(**changes: Any) -> dict[str, Any]:
    """Answers of an H200 that two processes use, with changes; None takes an answer away."""
    whole = {
        "uuid": "GPU-aa",
        "name": "NVIDIA H200",
        "memory": (3 * GIB, 140 * GIB),
        "memory_with_reserve": (4 * GIB, 140 * GIB),
        "util": 87,
        "compute": [(11, 2 * GIB), (12, GIB)],
        "graphics": [],
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}
