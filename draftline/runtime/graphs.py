"""CUDA graphs: the only place where one is captured.

A captured function works on fixed buffers, makes no host decision and allocates nothing when it is
replayed. On a CPU the same object just calls the function.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

# Calls before capture: they load kernels, choose algorithms and allocate workspaces.
_WARM_CALLS = 2


class Replayed:
    """Calls `function()`, or replays it once `warm()` has captured it on a CUDA device.

    `function` must keep its inputs and results in buffers that outlive this object. `generators`
    are the CUDA random generators it draws from.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        *,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function = function
        self._device = device
        self._generators = generators
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def warm(self) -> None:
        """Captures now. The function runs a few times on whatever its buffers hold."""
        if self._device.type != "cuda" or self._graph is not None:
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
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
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self._function()
            finally:
                if collecting:
                    gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._function()
