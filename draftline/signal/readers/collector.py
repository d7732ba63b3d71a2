"""The rows of a recording in JSON lines: our own, a run's log, and the per-step layout of others."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from draftline.signal.draftline_run import (
    events_of,
    failure_kind,
    is_event,
    is_metrics,
    program_of,
    steps_of,
)
from draftline.signal.readers.columns import unit_bytes
from draftline.signal.readers.json_row import (
    Row,
    device,
    facts,
    moment,
    number,
    parse,
    process_id,
    words,
)
from draftline.signal.readers.rows import Part, StepRows
from draftline.signal.readers.series import refuse_mixed
from draftline.signal.readers.units import settle_steps
from draftline.signal.trace import LEVELS, TOTALS, Event, Program
from draftline.signal.words import EVENTS

# A file is kept whole, but for absurd counts.
_MOST_EVENTS = 200_000
_MOST_DEVICES = 256
_FALL_S = 2.0  # lines are written some tenths of a second out of order
_EARLIEST_S = 1e8  # 1973: a smaller time counts from something else
# Columns of a step by the names of our own layout and those of the per-step one.
_VALUES = {name: name for name in TOTALS + LEVELS} | {
    "allocs": "allocator_calls",
    "dev_alloc": "device_allocations",
    "dev_free": "device_frees",
    "ok": "frames_ok",
}
# Levels whose names do not say the unit, or say it behind an underscore.
_MEMORY = {
    "allocated": "allocated_bytes",
    "memory_allocated": "allocated_bytes",
    "peak": "peak_bytes",
    "max_memory_allocated": "peak_bytes",
    "reserved": "reserved_bytes",
    "memory_reserved": "reserved_bytes",
    "inactive": "inactive_bytes",
}
_OF_A_STEP = frozenset(_VALUES) | frozenset(_MEMORY) | {"wall_ms", "t"}
# Where a line names no device: the place of its process among those of the machine, or of all.
_PLACES = ("device_id", "gpu_id", "gpu_index", "local_rank", "rank")
_KINDS = ("start", "facts", "device", "step", "event", "phase")


def layout_of(row: Row) -> str | None:
    """What kind of line `Collector` takes the row for; None where it is of none that is known."""
    kind = row.get("kind")
    if kind is not None:
        return kind if kind in _KINDS else None
    if is_metrics(row):
        return "metrics"
    if "step" in row and (
        not _OF_A_STEP.isdisjoint(row) or any(_memory(key) is not None for key in row)
    ):
        return "step"
    return "run_event" if is_event(row) else None


@functools.lru_cache(maxsize=1024)
def _memory(key: str) -> tuple[str, float] | None:
    """The column of a level by its key and the bytes of its unit, 0 where the key says none."""
    if (name := _MEMORY.get(key)) is not None:
        return name, 0.0
    stem, _, unit = key.rpartition("_")
    name = _MEMORY.get(stem)
    scale = unit_bytes(unit) if name is not None and unit else None
    return None if name is None or scale is None else (name, scale)


class Collector:
    """Makes a Part of lines, keeping the last run in them. With `live` it keeps the latest rows
    only, in bounded memory."""

    def __init__(self, source: str, *, live: bool = False) -> None:
        self.part = Part(words(source), "recording")
        self._live = live
        self._devices: dict[str, str] = {}  # the driver's index, or uuid, of a program's cuda:N
        self._bad = self._unknown = self._events_lost = 0
        self._runs_before = 0
        self._unitless: dict[str, str] = {}  # keys of levels that say no unit, by the column
        self._placed = ""  # the key by which steps are told apart that name no device
        self._lines: dict[tuple[str, str], Row] = {}  # the last one per kind and device
        self._latest_s = -math.inf

    def add(self, line: str) -> Row | None:
        """Takes one line in; returns its object, None where it is none."""
        row = parse(line)
        if row is None:
            self._bad += 1
        else:
            self.take(row)
        return row

    def take(self, row: Row) -> None:
        """Takes the object of a line in."""
        self._watch_clock(moment(row.get("time_s", row.get("t"))))
        layout = layout_of(row)
        if layout is None:
            self._unknown += 1
        elif not getattr(self, f"_add_{layout}")(self._whole(row)):
            self._bad += 1
        if self._live:
            self.part.trim()

    def _whole(self, row: Row) -> Row:
        """The row with what it does not repeat of the line that it says it is like (recordings of
        an earlier release have such); without it where that line is not the last of its kind and device."""
        kind, name = row.get("kind"), row.get("device")
        if not isinstance(kind, str) or not isinstance(name, str):
            return row
        before = self._lines.get((kind, name))
        if "like_ms" in row and before is not None:
            apart_s = number(row.get("time_s")) - number(before.get("time_s"))
            if math.isfinite(apart_s) and round(apart_s * 1000) == row["like_ms"]:
                row = {**before, **row}
        if before is not None or len(self._lines) < 2 * _MOST_DEVICES:
            self._lines[kind, name] = row
        return row

    def _watch_clock(self, time_s: float) -> None:
        """Marks where the clock may have been set back, since events do not show it by themselves."""
        if time_s < self._latest_s - _FALL_S:
            self.part.falls.append(len(self.part.events))
            self._latest_s = time_s
        elif time_s > self._latest_s:
            self._latest_s = time_s

    def finished(self) -> Part:
        """The Part so far, with what is to be said of its lines."""
        found = []
        if self._runs_before:
            found.append(f"{self._runs_before + 1} runs in one file: only the last one was kept")
        if self._bad:
            found.append(f"{self._bad} line(s) could not be read")
        if self._unknown:
            found.append(f"{self._unknown} line(s) of an unknown kind were left out")
        if self._relative():
            self.part.clock = "none"
            found.append("times do not count from 1970: nothing else can be laid beside them")
        if self._events_lost:
            found.append(f"{self._events_lost} events beyond {_MOST_EVENTS} were left out")
        self.part.notes = found
        return self.part

    def settled(self) -> Part:
        """As `finished`, with levels in bytes whatever their unit. Only for a file that is read once.
        Raises ConfigError for levels in a unit that cannot be told."""
        part = self.finished()
        if self._placed and len(part.steps) == 1:  # which of the devices it used is not known
            part.steps = {"": next(iter(part.steps.values()))}
        elif self._placed:
            part.notes.append(f"`{self._placed}` of the steps was taken as the device's index")
        for rows in part.steps.values():
            refuse_mixed(part.source, rows)
        part.notes += settle_steps(part.source, part.steps, self._unitless)
        return part

    def _relative(self) -> bool:
        highest = max((max(c) for c in self.part.times() if len(c)), default=math.nan)
        return highest < _EARLIEST_S

    def _begin(self, time_s: float, program: Program) -> None:
        """A new run: what came before belongs to another one."""
        old = self.part
        self._runs_before += any(len(rows.number) for rows in old.steps.values()) or any(
            len(rows.time_s) for rows in old.devices.values()
        )
        self.part = Part(old.source, old.kind, program=program, is_log=old.is_log)
        self.part.began_s = time_s if math.isfinite(time_s) else None

    def _add_start(self, row: Row) -> bool:
        expects = row.get("expects")
        named = expects if isinstance(expects, list) else []
        program = Program(
            name=words(row.get("program")),
            pid=process_id(row.get("pid")),
            expects=frozenset(name for name in named if isinstance(name, str)),
            facts=facts(row.get("facts")),
        )
        self._begin(moment(row.get("time_s")), program)
        self._devices = {}
        self._map_devices(row.get("devices"))
        return True

    def _add_facts(self, row: Row) -> bool:
        """What the program learned about itself after its start."""
        known = self.part.program or Program()
        if new := facts(row.get("facts")):
            self.part.program = replace(known, facts={**known.facts, **new})
        self._map_devices(row.get("devices"))
        return True

    def _map_devices(self, devices: object) -> None:
        for name, known in (devices if isinstance(devices, dict) else {}).items():
            if not isinstance(known, dict) or len(self._devices) >= _MOST_DEVICES:
                continue
            index, uuid = device(known.get("index")), device(known.get("uuid"))
            own = self._devices[name] = index or uuid or device(name)
            self.part.ordinals[device(name)] = own
            if index and uuid:
                self.part.indices[uuid] = index
            total = number(known.get("total_bytes"))
            if not math.isnan(total):
                self.part.totals[own] = total

    def _add_device(self, row: Row) -> bool:
        name, time_s = self._name(row), moment(row.get("time_s"))
        rows = self.part.device(name)
        if rows is None or math.isnan(time_s):
            return False
        rows.add(time_s, number(row.get("used_bytes")), number(row.get("util_pct")))
        if math.isnan(rows.total_bytes):
            rows.total_bytes = number(row.get("total_bytes"))
        processes, lists = row.get("processes"), self.part.listing(name)
        if lists is not None and isinstance(processes, dict):
            lists.begin(time_s)
            for key, used in processes.items():
                if (pid := process_id(key)) is not None:
                    lists.see(pid, number(used))
        return True

    def _add_step(self, row: Row) -> bool:
        step, wall_ms = number(row.get("step")), number(row.get("wall_ms"))
        if math.isnan(step):
            return False
        end_s = moment(row.get("time_s"))
        if math.isnan(end_s):
            end_s = moment(row.get("t")) + (0.0 if math.isnan(wall_ms) else wall_ms / 1000)
        values: dict[str, float] = {}
        for key, value in row.items():
            if value is None:
                continue
            if (known := _VALUES.get(key)) is not None:
                values[known] = number(value)
            elif (level := _memory(key)) is not None:
                name, scale = level
                values[name] = number(value) * (scale or 1.0)
                if not scale:
                    self._unitless[name] = key
        self._steps(self._name(row) or self._place(row)).add(step, end_s, wall_ms, values)
        failure = words(row.get("err"))
        if failure and math.isfinite(end_s):
            self._event(end_s, failure_kind(failure), failure)
        return True

    def _add_event(self, row: Row) -> bool:
        seconds = number(row.get("seconds"))
        return self._event(
            moment(row.get("time_s")),
            words(row.get("event"))[:40],
            words(row.get("text")),
            None if row.get("device") is None else self._name(row),
            None if math.isnan(seconds) else seconds,
        )

    def _add_phase(self, row: Row) -> bool:
        return self._event(moment(row.get("time_s")), "phase", words(row.get("phase")))

    def _add_run_event(self, row: Row) -> bool:
        self.part.is_log = True
        time_s = moment(row.get("time_s"))
        if (program := program_of(row)) is not None:
            self._begin(time_s, program)
        return all(self._event(time_s, kind, text) for kind, text in events_of(row))

    def _add_metrics(self, row: Row) -> bool:
        self.part.is_log = True
        step, time_s = number(row.get("step")), moment(row.get("time_s"))
        if math.isnan(step) or math.isnan(time_s):
            return False
        for name, wall_ms, values in steps_of(row):
            self._steps(self._devices.get(name, name)).add(step, time_s, wall_ms, values)
        return True

    def _steps(self, name: str) -> StepRows:
        steps = self.part.steps
        if name not in steps and len(steps) >= _MOST_DEVICES:
            name = next(iter(steps))
        return steps.setdefault(name, StepRows())

    def _name(self, row: Row) -> str:
        given = row.get("device")
        known = self._devices.get(given) if isinstance(given, str) else None
        return device(given) if known is None else known

    def _place(self, row: Row) -> str:
        for key in () if self._live else _PLACES:
            if name := device(row.get(key)):
                self._placed = key
                return name
        return ""

    def _event(
        self,
        time_s: float,
        kind: str,
        text: str,
        name: str | None = None,
        seconds: float | None = None,
    ) -> bool:
        if math.isnan(time_s) or not kind:
            return False
        if len(self.part.events) >= _MOST_EVENTS:
            self._events_lost += 1
        else:
            kind = next((known for known in EVENTS if known == kind), kind)
            self.part.events.append(Event(time_s, kind, text, name, seconds))
        return True
