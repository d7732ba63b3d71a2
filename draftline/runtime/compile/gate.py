"""torch.compile: the only place where it is called, and the gate around it.

A gate is open while a run warms up: every function is compiled, forward and backward, on every
device and for every shape it will ever see, one at a time. Sealing it turns everything that would
compile later, or run uncompiled, into an error with a name. Where nothing is compiled (a CPU) the
gate only says so.

Two threads must neither compile at the same time nor step while another compiles: torch keeps one
tracing state per process, and a backward that compiles on a device's autograd thread can wait for a
thread that waits for it.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any, TypeVar

import torch

from draftline.choices import Choices
from draftline.errors import CompileError
from draftline.library_warnings import LIBRARY_WARNINGS
from draftline.progress import QUIET_S
from draftline.runtime.compile.fault import EAGER_FLEX, explain
from draftline.runtime.compile.tracing_state import check_tracing_state, tracing_scope
from draftline.runtime.compile.warmup import (
    CacheCounts,
    GraphRow,
    WarmRow,
    heartbeat,
    outcome,
    table_lines,
)
from draftline.runtime.compile.watch import Compiled, CompileWatch
from draftline.runtime.reader_writer_lock import ReaderWriterLock

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# The stance and the tracing state belong to the process, and so does the place of its one gate.
_ENTERED = threading.Lock()
_UNTIMED: dict[str, str | int | bool | Callable[..., Any]] = {"triton.autotune_pointwise": False}


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` behind a code object of its own, called `name`.

    Dynamo keys its cache and its recompile limit by code object, and its look-up has no lock:
    neither two devices nor two threads may share one.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = wrapper.__code__.replace(co_name=name)
    return types.FunctionType(code, wrapper.__globals__, name, None, wrapper.__closure__)


class CompileGate(AbstractContextManager["CompileGate"]):
    """Compiles functions for the devices of a process and, once sealed, forbids every later compile.

    There is one gate per process at a time. Leaving the context restores what it changed: the
    stance, the compile callback and the warning filter. Nobody waits longer than `deadline_s`
    seconds without anybody getting on: then CompileError says who is waited for.
    """

    def __init__(
        self,
        choices: Choices,
        *,
        backend: str | Callable[..., Any] = "inductor",
        device_types: Collection[str] = ("cuda",),
        heartbeat_s: float = QUIET_S,
        deadline_s: float = 600.0,
    ) -> None:
        self._choices = choices
        self._backend = backend
        self._device_types = device_types
        self._heartbeat_s = heartbeat_s
        self._lock = ReaderWriterLock(deadline_s)
        self._process: ExitStack | None = None
        self._arming = threading.Lock()
        self._armed = False
        self._watch = CompileWatch()
        self._compiled: list[Compiled] = []
        self.rows: list[WarmRow] = []

    @property
    def sealed(self) -> bool:
        return self._watch.sealed

    @property
    def compiles(self) -> int:
        """Compiles of the process since the first `compile`, backward ones included."""
        return self._watch.compiles

    @property
    def graphs(self) -> list[GraphRow]:
        """Every compile so far, by function, device and part."""
        return self._watch.graphs

    # Opening and closing

    def __enter__(self) -> CompileGate:
        if not _ENTERED.acquire(blocking=False):
            raise CompileError(
                "another compile gate of this process is open, and what it forbids holds for the "
                "whole process; leave it before entering a second one"
            )
        self._process = ExitStack()
        self._process.callback(_ENTERED.release)
        self._process.enter_context(LIBRARY_WARNINGS.quiet_loggers())
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
            self._armed = False

    def _arm(self) -> None:
        """Watches compiles from here. Not before, because a CPU run needs no Dynamo loaded."""
        with self._arming:
            if self._armed:
                return
            if self._process is None:
                raise CompileError("the compile gate is not entered: use it as a context manager")
            # Before any call: an eager flex_attention materialises rows x keys scores, and it
            # warns once per process only.
            self._process.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", message=EAGER_FLEX)
            self._watch.start()
            self._process.callback(self._watch.stop)
            self._armed = True
            if self.sealed:
                self._process.enter_context(torch.compiler.set_stance("fail_on_recompile"))

    # Compiling

    def compile(
        self, function: F, name: str, device: torch.device, *, same_bits: bool = False
    ) -> F:
        """`function` compiled whole for static shapes on `device`, or unchanged where its type is
        not compiled for (recorded).

        `same_bits`: pointwise kernels are not chosen by timing them on the device. Two choices round
        differently, and two GPUs of one kind choose differently.
        What torch raises about a graph break, an eager flex_attention or, once sealed, a recompile
        comes out of the result as CompileError.
        """
        if device.type not in self._device_types:
            self._choices.record(
                f"compile {name}",
                wanted="torch.compile",
                got="eager",
                reason=f"nothing is compiled for {device.type}",
            )
            return function
        self._arm()
        index = "" if device.index is None else device.index
        clone = own_code(function, f"{name}_{device.type}{index}")
        options = _UNTIMED if same_bits and self._backend == "inductor" else None
        compiled: Any = torch.compile(
            clone, fullgraph=True, dynamic=False, backend=self._backend, options=options
        )
        entry = Compiled(name, str(device), function)
        self._compiled.append(entry)
        return self._named(compiled, entry)  # type: ignore[return-value]

    def _named(self, compiled: Callable[..., Any], entry: Compiled) -> Callable[..., Any]:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        @functools.wraps(entry.function)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._watch.inside(entry):
                    return compiled(*args, **kwargs)
            except (RuntimeError, UserWarning, FailOnRecompileLimitHit) as error:
                fault = explain(error, entry.name, entry.device, entry.function, sealed=self.sealed)
                if fault is None:
                    raise
                raise fault from error

        return named

    # Warming

    def warm(
        self, name: str, device: torch.device, call: Callable[[], T], *, captures: bool = False
    ) -> T:
        """The result of `call()`, run while nobody else of the process warms or runs.

        `call` must do all that compiles: forward, backward and, with `captures`, the capture of
        its CUDA graph. Adds a row. CompileError once sealed.
        """
        what = f"warm-up of {name} on {device}"
        if not self.sealed:
            with self._lock.exclusive(what):
                # It may have been sealed while this thread waited.
                if not self.sealed:
                    return self._warm(name, device, call, captures=captures, late=False)
        raise CompileError(
            f"{what} came after the seal, when others may be running; warm it before, or use late()"
        )

    def late(
        self, name: str, device: torch.device, call: Callable[[], T], *, captures: bool = False
    ) -> T:
        """`warm` after the seal: stops every worker between two units of work, and seals again."""
        with self._lock.exclusive(f"late warm-up of {name} on {device}"):
            if not self.sealed:
                return self._warm(name, device, call, captures=captures, late=False)
            with ExitStack() as opened:
                if self._armed:
                    opened.enter_context(torch.compiler.set_stance("default"))
                opened.callback(setattr, self._watch, "sealed", True)
                self._watch.sealed = False
                result = self._warm(name, device, call, captures=captures, late=True)
            check_tracing_state()
            seconds = self.rows[-1].seconds
        log.warning("late warm-up of %s on %s: %.1f s; everybody waited", name, device, seconds)
        return result

    def _warm(
        self, name: str, device: torch.device, call: Callable[[], T], *, captures: bool, late: bool
    ) -> T:
        compiles, cache, began = self._watch.compiles, CacheCounts.now(), perf_counter()
        try:
            with heartbeat(f"{name} on {device}", self._heartbeat_s):
                result = call()
        except UserWarning as warning:
            fault = explain(warning, name, str(device), None, sealed=False)
            if fault is None:
                raise
            raise fault from warning
        compiles = self._watch.compiles - compiles
        captured = captures and device.type in self._device_types
        said = outcome(compiles, cache, CacheCounts.now(), captured=captured)
        seconds = perf_counter() - began
        self.rows.append(WarmRow(name, str(device), said, compiles, seconds, late))
        return result

    def running(self) -> AbstractContextManager[None]:
        """A worker holds this during one unit of work, and never while it waits for another."""
        return self._lock.shared()

    # Sealing

    def cold(self) -> list[tuple[str, str]]:
        """Name and device of the compiled functions that nobody has called yet."""
        return [(entry.name, entry.device) for entry in self._compiled if not entry.called]

    def table(self) -> list[str]:
        """What was compiled and warmed, as the lines of an aligned table; the last is the coverage."""
        return table_lines(self.rows, self.graphs, self.cold())

    def seal(self) -> None:
        """From here a compile is an error, in every thread of the process. Logs the table.

        CompileError when the process's tracing state is damaged: it has to be restarted.
        """
        with self._lock.exclusive("sealing the compile gate"):
            if self.sealed:
                return
            check_tracing_state()
            if self._armed and self._process is not None:
                self._process.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            self._watch.sealed = True
        for line in self.table():
            log.info("%s", line)
        for name, device in self.cold():
            log.warning("%s on %s was never called; calling it now is an error", name, device)
        if self._armed:
            log.info("compiled %d graphs; sealed (%s)", self._watch.compiles, tracing_scope())

    def check(self) -> None:
        """Raises CompileError when anything compiled after the seal (a lazy backward, say)."""
        if late := self._watch.late:
            raise CompileError(
                f"{len(late)} compile(s) after the warm-up, first: {late[0]}. A shape or a branch "
                "was not warmed; memory and speed of this run are not what was planned"
            )
