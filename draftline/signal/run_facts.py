"""Everything that a run directory, or a recording alone, says of its run: what reports and comparisons
are made of."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.errors import ConfigError
from draftline.signal.evidence import Evidence
from draftline.signal.trace import Column, Trace
from draftline.signal.verdict import Verdict, judge

LOGS = ("events.jsonl", "metrics.jsonl", "signal.jsonl")
_ENDS = ("", ".gz", ".xz")
_MOST_EVENTS = 10_000
_MOST_COLUMNS = 200


@dataclass(frozen=True, slots=True)
class Metrics:
    """A training log's numbers by name, all [n] in order of steps, NaN where one was not written.

    `time_s` is seconds since 1970 where `dated`, else seconds of training.
    """

    time_s: Column
    step: Column
    columns: Mapping[str, Column]
    dated: bool

    def known(self, name: str) -> Column | None:
        """The column, or None where it is absent or holds nothing but NaN."""
        column = self.columns.get(name)
        return None if column is None or not np.isfinite(column).any() else column

    def usual(self, name: str) -> float | None:
        """The median over the second half of the run, None where it is unknown."""
        column = self.known(name)
        if column is None:
            return None
        late = column[len(column) // 2 :]
        late = late[np.isfinite(late)]
        return float(np.median(late)) if len(late) else None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run. `config` and `start` (the last event of that name) are empty and `metrics` and `sealed`
    None where they are not there; `missing` says in words what that is, `notes` what was mended."""

    name: str
    config: Mapping[str, Any]
    start: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]
    metrics: Metrics | None
    trace: Trace
    verdict: Verdict
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, Any]:
        """What is known of where the run ran: the run log's facts and the recording's together."""
        told = ("python", "platform", "cpus", "commit", "modified", "versions")
        merged = {key: self.start[key] for key in told if key in self.start}
        facts = dict(self.trace.program.facts) if self.trace.program is not None else {}
        versions = [part.get("versions") for part in (merged, facts)]
        merged |= facts
        both = {k: v for part in versions if isinstance(part, Mapping) for k, v in part.items()}
        return merged | {"versions": both} if both else merged

    @property
    def choices(self) -> list[Mapping[str, Any]]:
        """The automatic choices of the last start."""
        return [e for e in self.last_start() if e.get("event") == "choice"]

    @property
    def sealed(self) -> Mapping[str, Any] | None:
        """The warm-up's result: what was compiled and what was warmed."""
        found = [e for e in self.last_start() if e.get("event") == "sealed"]
        return found[-1] if found else None

    @property
    def failure(self) -> str | None:
        """What ended the last start, where that was a failure."""
        found = [e for e in self.last_start() if e.get("event") == "failed"]
        return str(found[-1].get("error", "")) if found else None

    def last_start(self) -> Sequence[Mapping[str, Any]]:
        """The events of the last start of the run, which may have been resumed."""
        starts = [i for i, e in enumerate(self.events) if e.get("event") == "start"]
        return self.events[starts[-1] :] if starts else self.events


def read_run(paths: Sequence[Path]) -> RunFacts:
    """The facts of one run, from its directory or from recordings of it.

    Raises ConfigError where there is nothing to read.
    """
    from draftline.signal.read import read_trace

    if not paths:
        raise ConfigError("no run was given; name a run directory or a recording")
    folders = [path for path in paths if path.is_dir()]
    if len(folders) > 1:
        raise ConfigError(f"{folders[0]} and {folders[1]} are two runs; give one run directory")
    folder = folders[0] if folders else None
    notes: list[str] = []
    missing: list[str] = []
    if folder is not None:
        there = [name for name in LOGS if any((folder / f"{name}{end}").is_file() for end in _ENDS)]
        if not there and len(paths) == 1:
            raise ConfigError(
                f"{folder} holds no {', '.join(LOGS)}; give the directory of a run (run.dir)"
            )
        missing += [f"no {name}" for name in LOGS if name not in there]
    try:
        trace = read_trace(list(paths))
    except ConfigError as error:
        # A run that ended before its first step has a configuration and events all the same.
        if folder is None:
            raise
        trace = Trace()
        notes.append(str(error).partition("; what can be read")[0])
    config: Mapping[str, Any] = {}
    events: tuple[Mapping[str, Any], ...] = ()
    metrics = None
    if folder is not None:
        config = _read_config(folder / "config.yaml", missing, notes)
        events = _read_events(folder / "events.jsonl", notes)
        metrics = _read_metrics(folder / "metrics.jsonl", notes)
    starts = [event for event in events if event.get("event") == "start"]
    if len(starts) > 1:
        notes.append(
            f"the run was started {len(starts)} times: metrics are of all starts, choices and memory of "
            "the last"
        )
    return RunFacts(
        name=(folder.resolve().name if folder is not None else paths[0].name),
        config=config,
        start=starts[-1] if starts else {},
        events=events,
        metrics=metrics,
        trace=trace,
        verdict=judge(trace),
        missing=tuple(missing),
        notes=tuple(dict.fromkeys((*notes, *trace.notes))),
    )


def steady_readings(seen: Evidence) -> dict[str, Column]:
    """Bytes in one device's steady state: of the whole `device`, `reserved` by the allocator, and in
    `tensors`; what is not known is not there."""
    found = {}
    samples = seen.samples
    if samples is not None:
        inside = np.zeros(len(samples.time_s), bool)
        for start, stop in seen.windows:
            inside |= (samples.time_s >= start) & (samples.time_s <= stop)
        found["device"] = samples.used_bytes[inside]
    found["reserved"] = seen.level("reserved_bytes")
    found["tensors"] = seen.level("allocated_bytes")
    known = {name: column[np.isfinite(column)] for name, column in found.items()}
    return {name: column for name, column in known.items() if len(column)}


def flatten(tree: Mapping[str, Any], *, most: int = 2000) -> dict[str, Any]:
    """The leaves of nested mappings by dotted key, at most `most` of them; lists are leaves."""
    flat: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack and len(flat) < most:
        name, value = stack.pop()
        if isinstance(value, Mapping) and value and len(stack) < most:
            dot = f"{name}." if name else ""
            stack += [(f"{dot}{key}", inner) for key, inner in reversed(list(value.items()))]
        elif name:
            flat[name] = value
    return flat


def _read_config(path: Path, missing: list[str], notes: list[str]) -> Mapping[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        missing.append(f"no {path.name}")
        return {}
    except (OSError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    return tree if isinstance(tree, dict) else {}


def _lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON-lines file; what is none is counted and said."""
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    bad += 1
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    if bad:
        notes.append(f"{path.name}: {bad} lines are no JSON objects")


def _read_events(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    events: list[Mapping[str, Any]] = []
    dropped = 0
    for event in _lines(path, notes):
        if len(events) < _MOST_EVENTS:
            events.append(event)
        else:
            dropped += 1
    if dropped:
        notes.append(f"{path.name}: {dropped} events beyond {_MOST_EVENTS:,} are left out")
    return tuple(events)


def _read_metrics(path: Path, notes: list[str]) -> Metrics | None:
    columns: dict[str, array[float]] = {}
    count = 0
    for line in _lines(path, notes):
        values = {key: _number(value) for key, value in line.items() if _is_number(value)}
        for key, value in values.items():
            column = columns.get(key)
            if column is None:
                if len(columns) >= _MOST_COLUMNS:
                    continue
                column = columns[key] = array("d", [math.nan]) * count
            column.append(value)
        count += 1
        for column in columns.values():
            if len(column) < count:
                column.append(math.nan)
    if not count or "step" not in columns:
        return None
    read = {key: np.array(column) for key, column in columns.items()}
    kept = _newest(read["step"])
    if len(kept) < count:
        notes.append(f"{path.name}: {count - len(kept)} lines are of steps that were made again")
    read = {key: column[kept] for key, column in read.items()}
    dated = "time_s" in read and bool(np.isfinite(read["time_s"]).all())
    time_s = read.get("time_s") if dated else read.get("seconds")
    step = read.pop("step")
    for name in ("time_s", "seconds", "eta_s"):
        read.pop(name, None)
    return Metrics(step if time_s is None else time_s, step, read, dated)


def _newest(step: Column) -> npt.NDArray[np.intp]:
    """Indices of the lines that count: a resumed run makes steps again that it had logged."""
    counts = np.isfinite(step)
    later = np.minimum.accumulate(np.where(counts, step, np.inf)[::-1])[::-1]
    counts[:-1] &= step[:-1] < later[1:]
    return np.flatnonzero(counts)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> float:
    """As a float that a chart can show: NaN for what is not finite."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
