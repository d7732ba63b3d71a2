"""Who compiles what: every compile of the process with its seconds, and the name of each late one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from draftline.runtime.compile.warmup import CacheCounts, GraphRow, outcome


@dataclass(slots=True)
class Compiled:
    """A function that went through the gate. `called`: by anybody, on any shape, without an error."""

    name: str
    device: str
    function: Callable[..., Any]
    called: bool = False

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


class CompileWatch:
    """Counts compiles from `start` to `stop`; those while `sealed` are kept by name in `late`.

    torch counts compiles of several threads that overlap as one, so the count is exact only while
    one thread compiles at a time.
    """

    def __init__(self) -> None:
        self.compiles = 0
        self.graphs: list[GraphRow] = []
        self._open: tuple[str, str, str, float, CacheCounts] | None = None
        self.late: list[str] = []
        self.sealed = False
        self._calls = threading.local()  # the compiled function that a thread is in
        self._owners: dict[str, Compiled] = {}  # by compile id, which a lazy backward inherits

    def start(self) -> None:
        """Registers with Dynamo, which is loaded for it."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self.on_compile)
        callback_handler.register_end_callback(self.on_compiled)

    def stop(self) -> None:
        from torch._dynamo.callback import callback_handler

        if self.on_compile in callback_handler.start_callbacks:  # a reset clears them
            callback_handler.remove_start_callback(self.on_compile)
        if self.on_compiled in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(self.on_compiled)

    @contextmanager
    def inside(self, entry: Compiled) -> Iterator[None]:
        """What this thread compiles in the block belongs to `entry`."""
        outer = getattr(self._calls, "entry", None)
        self._calls.entry = entry
        try:
            yield
            entry.called = True
        finally:
            self._calls.entry = outer

    def on_compile(self, arguments: Any) -> None:
        """Dynamo's callback. `arguments` has the trigger, and the compile's number."""
        self.compiles += 1
        number = str(getattr(arguments, "compile_id", "unknown"))
        entry = getattr(self._calls, "entry", None) or self._owners.get(number)
        if entry is not None:
            self._owners[number] = entry
        trigger = getattr(arguments, "callback_trigger", arguments)
        what = str(getattr(trigger, "name", trigger))
        if self.sealed:
            self.late.append(f"{what} of {entry or f'a function unknown here ({number})'}")
        name, device = (entry.name, entry.device) if entry else (f"unknown {number}", "?")
        part = "backward" if "BACKWARD" in what.upper() else "forward"
        self._open = (name, device, part, perf_counter(), CacheCounts.now())

    def on_compiled(self, _arguments: Any) -> None:
        """Dynamo's callback at the end of what `on_compile` began."""
        if self._open is None:
            return
        name, device, part, began, cache = self._open
        self._open = None
        said = outcome(1, cache, CacheCounts.now(), captured=False)
        self.graphs.append(GraphRow(name, device, part, said, perf_counter() - began))
