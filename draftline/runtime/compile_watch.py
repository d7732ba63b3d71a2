"""Who compiles what: a count of every compile of the process, and the name of each late one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


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
        self.late: list[str] = []
        self.sealed = False
        self._calls = threading.local()  # the compiled function that a thread is in
        self._owners: dict[str, Compiled] = {}  # by compile id, which a lazy backward inherits

    def start(self) -> None:
        """Registers with Dynamo, which is loaded for it."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self.on_compile)

    def stop(self) -> None:
        from torch._dynamo.callback import callback_handler

        if self.on_compile in callback_handler.start_callbacks:  # a reset clears them
            callback_handler.remove_start_callback(self.on_compile)

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
        if self.sealed:
            trigger = getattr(arguments, "callback_trigger", arguments)
            what = str(getattr(trigger, "name", trigger))
            self.late.append(f"{what} of {entry or f'a function unknown here ({number})'}")
