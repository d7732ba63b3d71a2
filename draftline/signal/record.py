"""Records a running program's steps, device memory and compile events, for itself and for a verdict."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from draftline.errors import ConfigError
from draftline.signal import counters
from draftline.signal.lines import LineFile
from draftline.signal.nvml import Reading
from draftline.signal.recent import Recent
from draftline.signal.sample import DeviceSampler
from draftline.signal.trace import EVENTS, TOTALS, Trace

P = ParamSpec("P")
R = TypeVar("R")

EXPECTS = ("compiled", "captured")


class Recorder:
    """Appends a recording to `path` while it is entered. None of its methods raises for what goes
    wrong in recording; a wrong argument is a ConfigError.

    `expects` declares what the program's steps are meant to be: "compiled", "captured". `own_peak`
    lets it reset PyTorch's peak each step, for a program that does not read the peak itself.
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
        wrong = sorted(set(expects) - set(EXPECTS))
        if wrong:
            raise ConfigError(f"expects={wrong}: known are {', '.join(EXPECTS)}")
        if not 0 < hz <= 100:
            raise ConfigError(f"hz={hz}: samples a second, above 0 and at most 100")
        self._expects = sorted(set(expects))
        self._program = program or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self._own_peak = own_peak
        self._lines = LineFile(Path(path))
        self._recent = Recent()
        self._sampler = DeviceSampler(hz, self._sampled, on_tick=self._tick, wanted=self._uses)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._names: dict[int, str] = {}  # cuda ordinal -> the driver's name of the device
        self._number = 0
        self._ended_s: float | None = None  # when the previous step ended, perf_counter
        self._phase = ""
        self._scan_at_s = 0.0
        self._open = False

    @property
    def path(self) -> Path:
        return self._lines.path

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written."""
        return self._lines.lost

    # The life of a recording

    def __enter__(self) -> Recorder:
        return self.start()

    def start(self) -> Recorder:
        """Begins the recording and its thread."""
        if not self._open:
            self._open = True
            self._start_line()
            self._sampler.start()
            atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Writes what is left and ends the thread."""
        if not self._open or not self._lines.mine:
            return
        self._open = False
        atexit.unregister(self.stop)
        self._sampler.stop()
        self._lines.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _recording(self) -> bool:
        return self._open and self._lines.mine

    def _start_line(self) -> None:
        line = {
            "kind": "start",
            "format": 1,
            "time_s": round(time.time(), 4),
            "pid": os.getpid(),
            "program": self._program,
            "expects": self._expects,
            "devices": {},
            "facts": counters.facts(),
        }
        self._recent.start(line)
        self._lines.add(line)

    # What the sampler's thread does

    def _uses(self, device: str) -> bool:
        return device in self._names.values()

    def _sampled(self, reading: Reading) -> None:
        processes = reading.processes
        line = {
            "kind": "device",
            "time_s": round(reading.time_s, 4),
            "device": reading.device,
            "used_bytes": reading.used_bytes,
            "total_bytes": reading.total_bytes,
            "util_pct": reading.util_pct,
            "processes": None if processes is None else {str(p): b for p, b in processes.items()},
        }
        self._recent.sample(reading)
        self._lines.add(line)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._scan_at_s:
            self._scan_at_s = now_s + 1.0
            self._find_devices()
        self._lines.flush()

    def _find_devices(self) -> None:
        """Names the devices that the program has begun to use since the last look."""
        found = {}
        for ordinal in counters.active_devices():
            device = counters.cuda_device(ordinal)
            if ordinal in self._names or device is None:
                continue
            known = {d.uuid: d for d in self._sampler.devices()}
            match = known.get(device.uuid or "")
            self._names[ordinal] = match.name if match else str(ordinal)
            found[f"cuda:{ordinal}"] = {
                "index": int(match.name) if match and match.name.isdigit() else None,
                "uuid": device.uuid,
                "name": device.name,
                "total_bytes": device.total_bytes,
            }
        if found:
            line = {
                "kind": "facts",
                "time_s": round(time.time(), 4),
                "devices": found,
                "facts": counters.facts(),
            }
            self._recent.start(line)
            self._lines.add(line)

    # What the program calls

    def step(self, tokens: int | None = None) -> Step:
        """A context manager around one step, or a decorator of a function that makes one."""
        if callable(tokens):
            raise ConfigError("step is a decorator with parentheses: write @recorder.step()")
        return Step(self, tokens)

    def mark_step(self, number: int | None = None, tokens: int | None = None) -> None:
        """Says that a step has just ended, for loops that cannot be wrapped."""
        self._ended(None, number, tokens)

    def _ended(self, body_s: float | None, number: int | None, tokens: int | None) -> None:
        if not self._recording:
            return
        ended_s = time.perf_counter()
        if not self._names:
            self._find_devices()
        process: dict[str, float] = dict(counters.dynamo())
        with self._lock:
            process.update(self._counts)
            before_s, self._ended_s = self._ended_s, ended_s
            number = self._number if number is None else number
            self._number = number + 1
        wall_s = body_s if before_s is None else ended_s - before_s
        if tokens is not None:
            process["tokens"] = tokens
        devices: list[tuple[int | None, str]] = [*self._names.items()]
        for ordinal, device in devices or [(None, "cpu")]:
            values = dict(process)
            if ordinal is not None:
                values.update(counters.allocator(ordinal, own_peak=self._own_peak))
            line = {
                "kind": "step",
                "time_s": round(time.time(), 4),
                "device": device,
                "step": number,
                "wall_ms": None if wall_s is None else round(wall_s * 1000, 3),
                **values,
            }
            self._recent.step(line)
            self._lines.add(line)

    def phase(self, name: str) -> Phase:
        """Marks that a phase begins (load, warm, run, evaluate, checkpoint, end, or another name).
        Used in `with`, the phase before it goes on afterwards."""
        before, self._phase = self._phase, name
        if self._recording:
            line = {"kind": "phase", "time_s": round(time.time(), 4), "phase": name}
            self._recent.event(time.time(), "phase", name, None, None)
            self._lines.add(line)
        return Phase(self, before)

    def event(
        self,
        kind: str,
        text: str = "",
        device: str | None = None,
        seconds: float | None = None,
    ) -> None:
        """Records something at this moment; `kind` is one of `trace.EVENTS`."""
        if kind not in EVENTS or kind == "phase":
            known = ", ".join(name for name in EVENTS if name != "phase")
            raise ConfigError(f"event {kind!r}: known are {known}")
        if self._recording:
            now_s = round(time.time(), 4)
            self._recent.event(now_s, kind, text, device, seconds)
            self._lines.add(
                {
                    "kind": "event",
                    "time_s": now_s,
                    "event": kind,
                    "device": device,
                    "text": text,
                    "seconds": seconds,
                }
            )

    def count(self, name: str, more: int = 1) -> None:
        """Adds to a total that only the program can count, such as "graph_replays" or "captures"."""
        if name not in TOTALS:
            raise ConfigError(f"count {name!r}: known are {', '.join(TOTALS)}")
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + more

    def graph_replayed(self) -> None:
        """A CUDA graph was replayed."""
        self.count("graph_replays")

    def captured(self) -> None:
        """A CUDA graph was captured."""
        self.count("captures")

    def trace(self) -> Trace:
        """What was recorded lately, for a live verdict: the last 4096 steps and 8192 samples of a
        device and 1000 events."""
        return self._recent.trace(str(self.path))


class Step:
    """One step of a Recorder: `with recorder.step(): ...`, or a decorator of a function."""

    def __init__(self, recorder: Recorder, tokens: int | None) -> None:
        self._recorder = recorder
        self._tokens = tokens
        self._began_s = 0.0

    def __enter__(self) -> Step:
        self._began_s = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            name = type(error).__name__
            memory = name == "OutOfMemoryError"
            self._recorder.event("oom" if memory else "error", f"{name}: {str(error)[:500]}")
        self._recorder._ended(time.perf_counter() - self._began_s, None, self._tokens)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def stepped(*args: P.args, **kwargs: P.kwargs) -> R:
            with Step(self._recorder, self._tokens):
                return function(*args, **kwargs)

        return stepped


class Phase:
    """A phase that has begun; leaving its `with` block goes back to the one before."""

    def __init__(self, recorder: Recorder, before: str) -> None:
        self._recorder = recorder
        self._before = before

    def __enter__(self) -> Phase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recorder.phase(self._before or "run")
