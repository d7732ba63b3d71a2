"""Compile events of the current process: each compile, recompile, graph break and reached limit as it
happens. Listens and reads only: no log setting, warning filter or function of the program is changed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftline.signal.guards import describe, describe_break, inside_torch, is_limit, name_function
from draftline.signal.recorder import counters
from draftline.signal.trace import Event

log = logging.getLogger(__name__)

_TEXT = 400  # characters of a reason that are kept
_FUNCTIONS = 4096  # code objects whose names are remembered


class CompileHooks:
    """Hands compile events to `on_event` and totals to `values`. `refresh` is called at each step and
    now and then between: it registers with Dynamo once the program has loaded it, again after
    `torch._dynamo.reset()`, and reads what happened since.

    torch's list of finished compiles is the source: exact when threads compile at once, with function,
    seconds and reason. Its callbacks tell when to read it, and count in its place where it is missing.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._last: Any = None
        self._breaks = 0
        self._functions: dict[str, str] = {}  # Dynamo's frame number -> function
        self._began_s: float | None = None
        self._flex = False
        self._owner = os.getpid()
        self._broken = False

    def values(self) -> dict[str, float]:
        """Totals so far, empty until the program has compiled something."""
        with self._lock:
            return dict(self._totals)

    def refresh(self) -> None:
        """Registers where needed and hands on what is new. Never raises; nothing in a forked child,
        where the lock may be held for ever."""
        if self._broken or os.getpid() != self._owner:
            return
        try:
            with self._lock:
                self._register()
                self._read()
        # Whatever a new release of torch does to these names must not reach the program's step.
        except Exception:
            self._broken = True
            log.warning("compile events are no longer recorded", exc_info=True)

    def close(self) -> None:
        """Takes the callbacks out again."""
        handler = counters.callback_handler()
        if handler is None:
            return
        if self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)
        if self._ended in handler.end_callbacks:
            handler.remove_end_callback(self._ended)

    def _register(self) -> None:
        handler = counters.callback_handler()
        if handler is None:
            return
        if self._started not in handler.start_callbacks:
            handler.register_start_callback(self._started)
        if self._ended not in handler.end_callbacks:
            handler.register_end_callback(self._ended)

    def _started(self, _arguments: Any) -> None:
        self._began_s = time.perf_counter()
        self.refresh()

    def _ended(self, arguments: Any) -> None:
        """Dynamo's callback, before the compile it ends is in torch's list."""
        if os.getpid() != self._owner:
            return
        began_s, self._began_s = self._began_s, None
        seconds = None if began_s is None else time.perf_counter() - began_s
        trigger = str(getattr(getattr(arguments, "callback_trigger", None), "name", ""))
        number = str(getattr(arguments, "compile_id", "?"))
        if trigger == "CUDAGRAPH_RECORDING":
            with self._lock:
                self._count("captures", 1)
            self._emit("capture", f"graph of compile {number}", time.time(), seconds)
        elif counters.compiles_after(None) is None:
            with self._lock:
                self._count("compiles", 1)
                self._count("compile_s", seconds or 0.0)
            self._emit("compile", number, time.time(), seconds)
        self.refresh()

    def _count(self, name: str, more: float) -> None:
        self._totals[name] = round(self._totals.get(name, 0) + more, 6)

    def _emit(self, kind: str, text: str, time_s: float, seconds: float | None = None) -> None:
        self._on_event(Event(time_s, kind, text[:_TEXT], None, seconds))

    def _read(self) -> None:
        found = counters.compiles_after(self._last)
        if found is not None:
            compiles, self._last = found
            if compiles and "compiles" not in self._totals:
                for name in ("compiles", "compile_s", "recompiles", "recompile_limits"):
                    self._totals[name] = 0
            for compile_ in compiles:
                self._compiled(compile_)
        breaks, self._breaks = counters.graph_breaks_after(self._breaks)
        for split in breaks:
            where = f"{_named(split.function, split.place)}{inside_torch(split.place)}"
            text = f"{where}: {describe_break(split.reason)}"
            self._emit("graph_break", text, time.time())
        if not self._flex and counters.eager_flex():
            self._flex = True
            self._emit("eager_flex", "flex_attention was called without torch.compile", time.time())

    def _compiled(self, compile_: counters.Compile) -> None:
        function = self._name(compile_)
        failure = (compile_.failure or "").split("\n")[0]
        again = ""
        if compile_.reason:
            again = f"{function}: {describe([compile_.reason])}"
        if is_limit(failure):
            self._count("recompile_limits", 1)
            self._emit("recompile_limit", again or function, compile_.ended_s)
            return
        self._count("compiles", 1)
        self._count("compile_s", compile_.seconds or 0.0)
        text = f"{function}, {'backward' if compile_.backward else 'forward'}"
        text += f", failed: {failure}" if failure else ""
        self._emit("compile", text, compile_.ended_s, compile_.seconds)
        if compile_.skipped:
            self._emit("capture_skip", f"{function}: {compile_.skipped}", compile_.ended_s)
        if again:
            self._count("recompiles", 1)
            self._emit("recompile", again, compile_.ended_s, compile_.seconds)

    def _name(self, compile_: counters.Compile) -> str:
        """The function that was compiled: only a forward that succeeded names it, the others share
        its frame's number."""
        frame = compile_.number.split("/")[0].lstrip("[!")
        if compile_.function and len(self._functions) < _FUNCTIONS:
            self._functions[frame] = _named(compile_.function, compile_.place)
        return self._functions.get(frame, f"function {frame}")


def _named(function: str, place: str) -> str:
    """A function with the last part of its path and its line, where they are known."""
    name = name_function(function) or "a function"
    return f"{name} ({Path(place).name})" if place else name
