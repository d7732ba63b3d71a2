"""torch.compile: the only place where it is called, and the gate around it.

A gate is open while a run warms up: every function is compiled, forward and backward, for the shapes
it will ever see. Sealing it turns everything that would compile later, or run uncompiled, into an
error with a name. On a CPU nothing is compiled and the gate only says so.
"""

from __future__ import annotations

import logging
import time
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from draftline.choices import Choices
from draftline.errors import CompileError

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


class CompileGate(AbstractContextManager["CompileGate"]):
    """Compiles functions for one device and, once sealed, forbids every later compile.

    The stance that forbids recompiles belongs to the process, so there is one gate a process at a
    time; leaving the context restores it.
    """

    def __init__(self, device: torch.device, choices: Choices) -> None:
        self.device = device
        self._choices = choices
        self._late: list[str] = []
        self._sealed = False
        self._began = time.perf_counter()
        self.compiles = 0
        if device.type == "cuda":
            # Installed before any call: an eager flex_attention materialises rows x keys scores.
            warnings.filterwarnings("error", message="flex_attention called without torch.compile")

    def compile(self, function: F, name: str) -> F:
        """`function` compiled whole for static shapes, or unchanged on a CPU (recorded)."""
        if self.device.type != "cuda":
            self._choices.record(
                f"compile {name}",
                wanted="torch.compile",
                got="dense attention, not compiled",
                reason="flex_attention has no backward on a CPU",
            )
            return function
        # A code object of its own: two wrappers over one share its cache and its recompile limit.
        inner = function

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        code = wrapper.__code__.replace(co_name=f"{name}_{self.device.type}{self.device.index}")
        clone = types.FunctionType(
            code, wrapper.__globals__, code.co_name, None, wrapper.__closure__
        )
        clone.__kwdefaults__ = wrapper.__kwdefaults__
        compiled: Any = torch.compile(clone, fullgraph=True, dynamic=False)
        return compiled  # type: ignore[no-any-return]

    def __enter__(self) -> CompileGate:
        if self.device.type == "cuda":
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(self._on_compile)
        return self

    def seal(self) -> None:
        """From here a compile is an error. Reports how long the warm-up took."""
        self._sealed = True
        if self.device.type == "cuda":
            torch.compiler.set_stance("fail_on_recompile")
            log.info(
                "compiled %d graphs in %.0f s; sealed",
                self.compiles,
                time.perf_counter() - self._began,
            )

    def check(self) -> None:
        """Raises CompileError when anything compiled after the seal (a lazy backward, say)."""
        if self._late:
            raise CompileError(
                f"{len(self._late)} compile(s) after the warm-up, first: {self._late[0]}. A shape or "
                "a branch was not warmed; memory and speed of this run are not what was planned"
            )

    def _on_compile(self, arguments: Any) -> None:
        self.compiles += 1
        if self._sealed:
            trigger = getattr(arguments, "callback_trigger", arguments)
            self._late.append(str(trigger))

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            from torch._dynamo.callback import callback_handler

            if self._on_compile in callback_handler.start_callbacks:
                callback_handler.remove_start_callback(self._on_compile)
            torch.compiler.set_stance("default")
