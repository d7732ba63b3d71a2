"""Everything that a run directory, or a recording alone, says of its run: what reports and comparisons
are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftline.errors import ConfigError
from draftline.signal.judge.evidence import Evidence
from draftline.signal.judge.verdict import Verdict, judge
from draftline.signal.report.run_logs import Metrics, read_config, read_events, read_metrics, shown
from draftline.signal.trace import Column, Trace

LOGS = ("events.jsonl", "metrics.jsonl", "signal.jsonl")
_ENDS = ("", ".gz", ".xz")


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
        found: dict[str, Any] = shown(merged | {"versions": both} if both else merged)
        return found

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
    from draftline.signal.readers.read import read_trace

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
        config = read_config(folder / "config.yaml", missing)
        events = read_events(folder / "events.jsonl", notes)
        metrics = read_metrics(folder / "metrics.jsonl", notes)
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
