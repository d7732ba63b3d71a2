"""Rows of a device or a program as a file gives them, in compact arrays; `series` straightens them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from draftline.signal.readers.columns import Header
from draftline.signal.trace import Event, Program, Snapshot
from draftline.signal.words import EVENTS

# How times are given: seconds since 1970; the recording machine's wall clock, zone unknown; that
# without a date; or not at all.
Clock = Literal["utc", "local", "daytime", "none"]
# More are no real ones; each costs columns.
MOST_DEVICES = 256
_MOST_LISTED = 4096
# What is kept of a run that goes on for days: steps and samples of each device, and events.
LATEST_STEPS, LATEST_SAMPLES, LATEST_EVENTS = 4096, 8192, 1000


class DeviceRows:
    """Readings of one device in file order: `time_s` NaN where the row has none."""

    __slots__ = ("time_s", "total_bytes", "used_bytes", "util_pct")

    def __init__(self) -> None:
        self.time_s, self.used_bytes, self.util_pct = array("d"), array("d"), array("d")
        self.total_bytes = math.nan

    def add(self, time_s: float, used_bytes: float, util_pct: float = math.nan) -> None:
        self.time_s.append(time_s)
        self.used_bytes.append(used_bytes)
        self.util_pct.append(util_pct)

    def extend(self, other: DeviceRows) -> None:
        self.time_s.extend(other.time_s)
        self.used_bytes.extend(other.used_bytes)
        self.util_pct.extend(other.util_pct)
        if math.isnan(self.total_bytes):
            self.total_bytes = other.total_bytes

    def trim(self, most: int) -> None:
        """Forgets all but the last `most` rows, once there are twice as many."""
        if len(self.time_s) >= 2 * most:
            for column in (self.time_s, self.used_bytes, self.util_pct):
                del column[:-most]


class ProcessRows:
    """Lists of the processes of one device, each complete: who is not in a list holds nothing."""

    __slots__ = ("bytes", "list_no", "pid", "time_s")

    def __init__(self) -> None:
        self.time_s = array("d")  # of each list
        self.list_no, self.pid, self.bytes = array("q"), array("q"), array("d")  # of each entry

    def begin(self, time_s: float) -> None:
        """A new list."""
        self.time_s.append(time_s)

    def see(self, pid: int, used_bytes: float) -> None:
        """A process of the last list; NaN where its memory is not told. More than so many at once
        are no real ones."""
        last = len(self.time_s) - 1
        if len(self.list_no) >= _MOST_LISTED and self.list_no[-_MOST_LISTED] == last:
            return
        self.list_no.append(last)
        self.pid.append(pid)
        self.bytes.append(used_bytes)

    def extend(self, other: ProcessRows) -> None:
        first = len(self.time_s)
        self.time_s.extend(other.time_s)
        self.list_no.extend(n + first for n in other.list_no)
        self.pid.extend(other.pid)
        self.bytes.extend(other.bytes)

    def trim(self, most: int) -> None:
        """Forgets all but the last `most` lists, once there are twice as many."""
        if len(self.time_s) >= 2 * most:
            gone = len(self.time_s) - most
            del self.time_s[:-most]
            kept = int(np.searchsorted(np.asarray(self.list_no), gone))
            for column in (self.list_no, self.pid, self.bytes):
                del column[:kept]
            self.list_no = array("q", (n - gone for n in self.list_no))


class StepRows:
    """Steps of one program on one device in file order; NaN where a row lacks something."""

    __slots__ = ("number", "time_s", "values", "wall_ms")

    def __init__(self) -> None:
        self.number, self.time_s, self.wall_ms = array("d"), array("d"), array("d")
        self.values: dict[str, array[float]] = {}

    def add(
        self, number: float, time_s: float, wall_ms: float, values: Mapping[str, float]
    ) -> None:
        """`values` are named as in TOTALS and LEVELS."""
        for name in values:
            if name not in self.values:
                self.values[name] = array("d", [math.nan]) * len(self.number)
        self.number.append(number)
        self.time_s.append(time_s)
        self.wall_ms.append(wall_ms)
        for name, column in self.values.items():
            column.append(values.get(name, math.nan))

    def extend(self, other: StepRows) -> None:
        for name in other.values:
            if name not in self.values:
                self.values[name] = array("d", [math.nan]) * len(self.number)
        for name, column in self.values.items():
            column.extend(other.values.get(name) or array("d", [math.nan]) * len(other.number))
        self.number.extend(other.number)
        self.time_s.extend(other.time_s)
        self.wall_ms.extend(other.wall_ms)

    def since(self, time_s: float) -> StepRows:
        """The rows of `time_s` and later."""
        kept = StepRows()
        for n, at_s in enumerate(self.time_s):
            if at_s >= time_s:
                values = {name: column[n] for name, column in self.values.items()}
                kept.add(self.number[n], at_s, self.wall_ms[n], values)
        return kept

    def trim(self, most: int) -> None:
        """Forgets all but the last `most` rows, once there are twice as many."""
        if len(self.number) >= 2 * most:
            for column in (self.number, self.time_s, self.wall_ms, *self.values.values()):
                del column[:-most]


@dataclass
class Part:
    """What one file gave, rows as they stand in it. A device is named by the driver's index, or by
    its uuid or bus id; "" where the file names none. Memory in use means
    the same in all parts of a `kind`, and need not in others. `is_log` marks the log of a run, which
    knows less than a recording: its steps are means over several."""

    source: str
    kind: str
    devices: dict[str, DeviceRows] = field(default_factory=dict)
    processes: dict[str, ProcessRows] = field(default_factory=dict)
    steps: dict[str, StepRows] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    falls: list[int] = field(default_factory=list)  # events before each fall of the clock
    snapshots: list[Snapshot] = field(default_factory=list)
    program: Program | None = None
    began_s: float | None = None
    clock: Clock = "utc"
    indices: dict[str, str] = field(default_factory=dict)  # of a uuid or bus id
    ordinals: dict[str, str] = field(default_factory=dict)  # device of the N of a program's cuda:N
    totals: dict[str, float] = field(
        default_factory=dict
    )  # bytes of a device, where not in its rows
    is_log: bool = False
    header: Header | None = None  # of comma-separated rows
    notes: list[str] = field(default_factory=list)

    def times(self) -> list[array[float]]:
        """The columns of times of all rows."""
        found = [rows.time_s for rows in self.devices.values()]
        found += [lists.time_s for lists in self.processes.values()]
        return found + [steps.time_s for steps in self.steps.values()]

    def trim(self) -> None:
        """Forgets all but the latest rows and events, once there are twice as many."""
        for steps in self.steps.values():
            steps.trim(LATEST_STEPS)
        for rows in self.devices.values():
            rows.trim(LATEST_SAMPLES)
        for lists in self.processes.values():
            lists.trim(LATEST_SAMPLES)
        if len(self.events) >= 2 * LATEST_EVENTS:
            self.falls, self.events = [], _latest(self.events)

    def copy(self) -> Part:
        """The same, with rows of its own."""
        return replace(
            self,
            devices={name: _copied(rows) for name, rows in self.devices.items()},
            processes={name: _copied(lists) for name, lists in self.processes.items()},
            steps={name: _copied(steps) for name, steps in self.steps.items()},
            events=list(self.events),
        )

    def device(self, name: str) -> DeviceRows | None:
        """The rows of a device, new if need be; None where there are too many devices."""
        rows = self.devices.get(name)
        if rows is None and len(self.devices) < MOST_DEVICES:
            rows = self.devices[name] = DeviceRows()
        return rows

    def listing(self, name: str) -> ProcessRows | None:
        """The process lists of a device, as `device`."""
        rows = self.processes.get(name)
        if rows is None and len(self.processes) < MOST_DEVICES:
            rows = self.processes[name] = ProcessRows()
        return rows


def _latest(events: list[Event]) -> list[Event]:
    """The last of the events, and before them the last of those that still hold: a storm of compiles
    must not push these out."""
    old, kept = events[:-LATEST_EVENTS], events[-LATEST_EVENTS:]
    lasting = [event for event in old if event.kind in EVENTS and EVENTS[event.kind].lasting]
    return [*lasting[-LATEST_EVENTS // 2 :], *kept]


AnyRows = TypeVar("AnyRows", DeviceRows, ProcessRows, StepRows)


def _copied(rows: AnyRows) -> AnyRows:
    own = type(rows)()
    own.extend(rows)
    return own
