"""Records a running program's steps, device memory and compile events, for itself and for a verdict."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from draftline.environment import environment
from draftline.errors import ConfigError
from draftline.signal.recorder import counters
from draftline.signal.recorder.hooks import CompileHooks
from draftline.signal.recorder.journal import Journal
from draftline.signal.recorder.marks import Phase, Step, check_tokens
from draftline.signal.recorder.naming import DeviceNames
from draftline.signal.recorder.nvml import Reading, driver_facts
from draftline.signal.recorder.sample import DeviceSampler
from draftline.signal.trace import TOTALS, Event, Trace
from draftline.signal.words import RECORDED

log = logging.getLogger(__name__)

EXPECTS = ("compiled", "captured")
_SECRET = re.compile(r"(key|token)$|secret|passw|credential", re.IGNORECASE)
_LOOK_S = 1.0  # how often new devices and another stance are looked for


def command_line(argv: Sequence[str]) -> str:
    """The program and its arguments, without its path and without what looks like a secret."""
    words = [Path(argv[0]).name, *argv[1:]] if argv else []
    for place, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if equals and _SECRET.search(name):
            words[place] = f"{name}=..."
        elif place and words[place - 1].startswith("-") and "=" not in words[place - 1]:
            words[place] = "..." if _SECRET.search(words[place - 1]) else word
    return " ".join(words)


class Recorder:
    """Appends a recording to `path` while it is entered, or from the first call on.

    `expects` declares what the program's steps are meant to be: "compiled", "captured". `own_peak`
    lets it reset PyTorch's peak each step, for a program that does not read the peak itself. `program`
    names it, by default with its command line.

    Nothing that goes wrong in recording reaches the program: it is said in the log, once and with how
    much was lost at the end. Only a wrong argument, or a path that cannot be opened, raises ConfigError.
    Safe to call from several threads; a forked child records nothing.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        expects: Collection[str] = (),
        hz: float = 5.0,
        program: str | None = None,
        own_peak: bool = False,
    ) -> None:
        self._expects = [name for name in EXPECTS if name in expects]
        if isinstance(expects, str) or len(self._expects) != len(set(expects)):
            raise ConfigError(f"expects={expects!r}: a list of any of {', '.join(EXPECTS)}")
        self._program = program or command_line(sys.argv)
        self._own_peak = own_peak
        self._sampler = DeviceSampler(
            hz, self._sampled, on_tick=self._tick, wanted=lambda: self._names.in_use
        )
        self._names = DeviceNames(self._sampler.devices)
        self._journal = Journal(Path(path))
        self._hooks = CompileHooks(self._journal.event)
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._rising: dict[str, counters.Rising] = {}
        self._facts: dict[str, Any] = {}
        self._number = 0
        self._ended_s: float | None = None  # when the previous step ended, perf_counter
        self._phase = ""
        self._look_at_s = self._facts_at_s = 0.0
        self._stepping: int | None = None  # the thread of the first step
        self._started = self._stopped = self._broken = False

    @property
    def path(self) -> Path:
        """The file: `path` as given, or one beside it where another recording goes to that."""
        return self._journal.file.path

    @property
    def unsampled(self) -> str | None:
        """Why the driver's readings are missing; None where nothing is known to be wrong."""
        return self._sampler.reason

    def start(self) -> Recorder:
        """Begins the recording and its thread; itself."""
        if self._started or not self._journal.file.mine:
            return self
        with self._lock:
            if self._started:
                return self
            self._facts = counters.facts()
            self._names.look()
            facts = {**environment(), **driver_facts(), **self._facts}
            self._journal.start(self._program, self._expects, self._names.described, facts)
            self._started = True  # only now, since the start is a recording's first line
        self._sampler.start()
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Writes what is left and ends the thread. Nothing is recorded afterwards."""
        if not self.live:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        self._sampler.stop()
        self._hooks.close()
        self._journal.file.close()
        if lost := self._journal.file.lost:
            log.warning("recording %s: %d lines were lost", self.path, lost)

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def live(self) -> bool:
        """Whether it records: started, not stopped, and not in a forked child."""
        return self._started and not self._stopped and self._journal.file.mine

    # What the program calls

    def step(self, tokens: int | None = None) -> Step:
        """A context manager around one step, or a decorator of the function that makes one.
        `tokens` is the step's work."""
        return Step(self.start, check_tokens(tokens))

    def mark_step(self, number: int | None = None, tokens: int | None = None) -> None:
        """Says that a step has just ended, for loops that cannot be wrapped."""
        if self.start().live:
            self._guard(lambda: self._write_step(time.perf_counter(), None, tokens, number))

    def begin_step(self) -> None:
        """A step begins: `Step` calls it."""
        if self.live:
            self._hooks.refresh()

    def end_step(
        self, body_s: float | None, tokens: int | None, error: BaseException | None
    ) -> None:
        """A step ended after `body_s`, by `error` or well: `Step` calls it."""
        if not self.live:
            return
        if isinstance(error, Exception):
            name = type(error).__name__
            kind = "oom" if name == "OutOfMemoryError" else "error"
            self.event(kind, f"{name}: {str(error)[:500]}")
        self._guard(lambda: self._write_step(time.perf_counter(), body_s, tokens, None))

    def phase(self, name: str) -> Phase:
        """Marks that a phase begins (load, warm, run, evaluate, checkpoint, end, or another name).
        Used in `with`, the phase before it goes on afterwards."""
        before, self._phase = self._phase or "run", name
        if self.start().live:
            self._journal.phase(name)
        return Phase(self, before)

    def event(
        self, kind: str, text: str = "", device: str | None = None, seconds: float | None = None
    ) -> None:
        """Records something at this moment; `kind` is one of `words.RECORDED`."""
        if kind not in RECORDED:
            raise ConfigError(f"event {kind!r}: known are {', '.join(RECORDED)}")
        if self.start().live:
            self._journal.event(Event(time.time(), kind, text, device, seconds))

    def count(self, name: str, more: int = 1) -> None:
        """Adds to a total that only the program can count, such as "graph_replays" or "captures".
        With `more=0` it is known from now on, and none so far."""
        if name not in TOTALS:
            raise ConfigError(f"count {name!r}: known are {', '.join(TOTALS)}")
        if self._journal.file.mine:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + more

    def graph_replayed(self) -> None:
        """A CUDA graph was replayed."""
        self.count("graph_replays")

    def captured(self) -> None:
        """A CUDA graph was captured."""
        self.count("captures")

    def trace(self) -> Trace:
        """What was recorded lately, for a live verdict: as much as `readers.rows` keeps."""
        return self._journal.trace()

    # What is recorded

    def _guard(self, work: Callable[[], object]) -> None:
        """Does a part of the recording; what it raises ends the recording, never the program."""
        if self._broken:
            return
        try:
            work()
        except Exception:  # a program of days must not die of a name that torch took away
            self._broken = True
            log.warning("%s: nothing more is recorded", self.path, exc_info=True)

    def _write_step(
        self, ended_s: float, body_s: float | None, tokens: int | None, number: int | None
    ) -> None:
        self._hooks.refresh()
        if not self._names.by_ordinal:
            self._look()
        self._note_facts(ended_s)
        process = counters.dynamo(expected="compiled" in self._expects)
        with self._lock:
            for name, value in (*self._hooks.values().items(), *self._counts.items()):
                process[name] = process.get(name, 0) + value
            if tokens is not None:
                process["tokens"] = tokens
            before_s, self._ended_s = self._ended_s, ended_s
            wall_s = body_s if before_s is None else ended_s - before_s
            number = self._number if number is None else number
            self._number = number + 1
            devices: list[tuple[int | None, str]] = [*self._names.by_ordinal.items()]
            for ordinal, device in devices or [(None, "cpu")]:
                values = dict(process)
                if ordinal is not None:
                    values.update(counters.allocator(ordinal, own_peak=self._own_peak))
                self._rising.setdefault(device, counters.Rising()).take(values)
                self._journal.step(device, number, wall_s, values)

    def _look(self) -> None:
        """Notes devices that the program began to use."""
        if new := self._names.look():
            self._journal.facts(new, self._facts)

    def _note_facts(self, now_s: float) -> None:
        """Notes another stance of the compiler, as the thread of the first step has it: torch keeps
        its settings for each thread, and every other one, the sampler's too, sees the defaults."""
        thread = threading.get_ident()
        if self._stepping is None:
            self._stepping = thread
        if thread != self._stepping or now_s < self._facts_at_s:
            return
        self._facts_at_s = now_s + _LOOK_S
        facts = counters.facts()
        if facts != self._facts:
            self._facts = facts
            self._journal.facts({}, facts)

    # What the sampler's thread does

    def _sampled(self, reading: Reading) -> None:
        if reading.processes is not None and os.getpid() not in reading.processes:
            # This program is on the device: a list without it is of another namespace.
            reading = reading.without_processes()
        if not reading.is_empty:
            self._journal.sample(reading)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._hooks.refresh()
            self._guard(self._look)
        self._journal.file.flush()
