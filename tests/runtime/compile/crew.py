"""Threads that meet where it hurts: a compiler that stops inside a compile, and a crew of workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

WORKERS = 3
WAIT_S = 40.0


class SlowCompiler:
    """A Dynamo backend that counts its compiles and calls `hook` inside each one of a backward,
    inside an FX trace unless `trace` is off. A backward is compiled outside Dynamo's own lock."""

    def __init__(self, hook: Callable[[], None] = lambda: None, *, trace: bool = True) -> None:
        self.hook = hook
        self.trace = trace
        self.forward = self.backward = self.active = self.most_at_once = 0
        self._counting = threading.Lock()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        both = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)
        return both(graph, inputs)

    def _forward(self, graph: Any, _: Any) -> Any:
        with self._counting:
            self.forward += 1
        return generated(graph)

    def _backward(self, graph: Any, _: Any) -> Any:
        with self._counting:
            self.backward += 1
            self.active += 1
            self.most_at_once = max(self.most_at_once, self.active)
        try:
            if self.trace:
                torch.fx.symbolic_trace(lambda x: (self.hook(), x + 1)[1])
            else:
                self.hook()
        finally:
            with self._counting:
                self.active -= 1
        return generated(graph)


def generated(graph: Any) -> Any:
    """The code of `graph`, called without nn.Module, as a real compiler's result is."""
    from functorch.compile import make_boxed_func

    if hasattr(graph, "real_recompile"):  # a lazy graph runs as a module the first time
        graph.real_recompile()
    return make_boxed_func(graph.forward)


class Crew:
    """Named threads, one a worker; what they raise is kept, and breaks the barrier for all."""

    def __init__(self, work: Callable[[int], None], *, others: int = 0) -> None:
        self.barrier = threading.Barrier(WORKERS + others, timeout=WAIT_S)
        self.errors: list[str] = []
        self._work = work
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"worker {i}")
            for i in range(WORKERS)
        ]

    def _run(self, index: int) -> None:
        try:
            self.barrier.wait()
            self._work(index)
        except Exception as error:
            self.errors.append(said(f"worker {index}", error))
            self.barrier.abort()

    def start(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(WAIT_S)
        return sorted(self.errors)


def said(who: str, error: Exception) -> str:
    return f"{who}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"never: {what}")
        time.sleep(0.002)
