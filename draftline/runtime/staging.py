"""Host buffers on the way to a device, reused without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Host buffers in rotation, pinned for a CUDA device; none is written while it is being copied.

    `take` gives the next buffer `[size, ...]`, `send` queues its copy on the current stream. The
    host waits only when all of `depth` copies are still queued, which bounds how far it runs ahead.
    One object serves one thread.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, depth: int
    ) -> None:
        self._device = device
        cuda = device.type == "cuda"
        # Without a stream a copy is over when it returns, so one buffer is enough.
        self._buffers = [
            torch.empty(shape, dtype=dtype, pin_memory=cuda) for _ in range(depth if cuda else 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._next = 0

    def take(self) -> Tensor:
        """The buffer to fill next; its old content is on the device."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        return self._buffers[self._next]

    def send(self, filled: Tensor, out: Tensor) -> None:
        """Queues the copy of `filled`, a part of the taken buffer, into `out` on the device."""
        out.copy_(filled, non_blocking=True)
        if self._device.type == "cuda":
            copied = self._copied[self._next] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
            self._copied[self._next] = copied
        self._next = (self._next + 1) % len(self._buffers)
