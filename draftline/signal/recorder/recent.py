"""The latest part of a recording, in bounded memory, as the Trace that a verdict judges."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from draftline.signal.latest import EVENTS, SAMPLES, STEPS, latest_events
from draftline.signal.recorder.nvml import Reading
from draftline.signal.trace import LEVELS, TOTALS, Event, Program, Samples, Steps, Trace

_COLUMNS = TOTALS + LEVELS
_HEAD = ("step", "time_s", "wall_ms")


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


class Recent:
    """Keeps the last 4096 steps and 8192 samples of each device, and the events of `latest_events`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[str, deque[tuple[float, ...]]] = {}
        self._samples: dict[str, deque[Reading]] = {}
        self._events: list[Event] = []
        self._program = Program()

    def program(self, line: Mapping[str, Any]) -> None:
        """Takes what a "start" or "facts" line says of the program."""
        known = self._program
        facts = {**known.facts, **{k: v for k, v in line["facts"].items() if v is not None}}
        self._program = Program(
            line.get("program", known.name),
            line.get("pid", known.pid),
            frozenset(line.get("expects", known.expects)),
            facts,
        )

    def step(self, line: Mapping[str, Any]) -> None:
        row = tuple(_number(line.get(name)) for name in (*_HEAD, *_COLUMNS))
        with self._lock:
            self._steps.setdefault(line["device"], deque(maxlen=STEPS)).append(row)

    def sample(self, reading: Reading) -> None:
        with self._lock:
            self._samples.setdefault(reading.device, deque(maxlen=SAMPLES)).append(reading)

    def event(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            if len(self._events) >= 2 * EVENTS:
                self._events = latest_events(self._events)

    def trace(self, source: str) -> Trace:
        """What is kept, as a Trace of its own."""
        with self._lock:
            steps = {device: list(rows) for device, rows in self._steps.items()}
            samples = {device: list(rows) for device, rows in self._samples.items()}
            events = latest_events(self._events)
        return Trace(
            samples=tuple(_samples(device, rows) for device, rows in samples.items()),
            steps=tuple(_steps(device, rows) for device, rows in steps.items()),
            events=tuple(events),
            program=self._program,
            sources=(source,),
        )


def _steps(device: str, rows: list[tuple[float, ...]]) -> Steps:
    columns = np.array(rows, dtype=np.float64).T
    values = dict(zip(_COLUMNS, columns[len(_HEAD) :], strict=True))
    known = {name: column for name, column in values.items() if np.isfinite(column).any()}
    return Steps(device, columns[0], columns[1], columns[2], known)


def _samples(device: str, rows: list[Reading]) -> Samples:
    pids = {pid for row in rows for pid in row.processes or ()}
    by_process = {
        pid: np.array([_process(row, pid) for row in rows], dtype=np.float64) for pid in pids
    }
    return Samples(
        device,
        np.array([row.time_s for row in rows], dtype=np.float64),
        np.array([_number(row.used_bytes) for row in rows], dtype=np.float64),
        np.array([_number(row.util_pct) for row in rows], dtype=np.float64),
        next((float(row.total_bytes) for row in rows if row.total_bytes is not None), None),
        by_process,
    )


def _process(row: Reading, pid: int) -> float:
    """A process that a told list lacks holds nothing; in a list that was not told it is unknown."""
    if row.processes is None:
        return math.nan
    return _number(row.processes.get(pid, 0))
