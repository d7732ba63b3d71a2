"""CUDA graphs: the only place where one is captured.

A captured function works on fixed buffers, makes no host decision and allocates nothing when it is
replayed. On a CPU the same objects just call the function.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftline.errors import RunError

# Calls before capture: they load kernels, choose algorithms and allocate workspaces.
_WARM_CALLS = 2


class GraphPool:
    """The memory that the graphs of one device share, and the stream on which they are captured.

    Sharing is sound because the graphs of a device are never in flight together (its workers take
    turns) and keep what must outlive a replay in buffers of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.handle: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.handle = torch.cuda.graph_pool_handle()


class FixedInputs:
    """Named buffers that a captured function reads; `copy` is the only way in."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.buffers = dict(buffers)

    def copy(self, values: Mapping[str, Tensor]) -> None:
        """Queues copies into the buffers; raises RunError naming the first value that does not fit."""
        for index, (name, buffer) in enumerate(self.buffers.items()):
            value = values[name]
            if value.shape != buffer.shape or value.dtype != buffer.dtype:
                raise RunError(
                    f"input {index} ({name}) of a captured step: expected {_signature(buffer)}, "
                    f"seen {_signature(value)}; every step must have the shapes it was planned with"
                )
            buffer.copy_(value, non_blocking=True)


class Replayed:
    """Calls `function()`, or replays it once `warm()` has captured it on a CUDA device.

    `function` must keep its inputs and results in buffers that outlive this object. `generators`
    are the CUDA random generators it draws from. Without `pool` the graph has memory of its own.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        *,
        pool: GraphPool | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function = function
        self._device = device
        self._pool = pool
        self._generators = generators
        self._graph: torch.cuda.CUDAGraph | None = None
        self.replays = 0

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def warm(self) -> None:
        """Captures now. The function runs a few times on whatever its buffers hold."""
        if self._device.type != "cuda" or self._graph is not None:
            return
        pool = self._pool or GraphPool(self._device)
        stream = pool.stream
        assert stream is not None, "a pool of a CUDA device has a stream"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for _ in range(_WARM_CALLS):
                self._function()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            for generator in self._generators:
                graph.register_generator_state(generator)
            # A collection inside the capture could free another graph, which breaks this one.
            gc.collect()
            collecting = gc.isenabled()
            gc.disable()
            # What the calls above left in the ordinary cache is needed again, but by the pool.
            torch.cuda.empty_cache()
            try:
                with torch.cuda.graph(
                    graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"
                ):
                    self._function()
            finally:
                if collecting:
                    gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            self.replays += 1
        else:
            self._function()


def _signature(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
