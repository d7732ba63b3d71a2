"""What draftline's own training writes into its run directory: the names of its files, events and
columns stand here, and the rest of the signal knows none of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from draftline.signal.readers.json_row import Row, device, facts, number, words
from draftline.signal.trace import GIB, Program, one_line

RECORDING, EVENTS, METRICS = "signal.jsonl", "events.jsonl", "metrics.jsonl"
# Each rank of a program may have a recording of its own.
_FILES = re.compile(r"(?:signal(?:[-_.].*)?|events|metrics)\.jsonl(?P<packed>\.gz|\.xz)?")
_OF_A_MACHINE = re.compile(r"machine-\d+")
_WAITED = "_waited_pct"
# Phases that begin with an event. A checkpoint's event says when it was queued, not how long it
# took; that shows in the steps.
_PHASES = {
    "start": ("load",),
    "sealed": ("run",),
    "checkpoint": ("checkpoint", "run"),
    "end": ("end",),
}
_ENDINGS = {"start": "", "end": "the run has ended", "failed": "the run has failed"}


def files_of(directory: Path, *, packed: bool = True) -> list[Path]:
    """The recordings in a run directory and then its logs, with `packed` those as .gz and .xz too.
    Raises OSError where it cannot be listed."""
    named = ((path, _FILES.fullmatch(path.name)) for path in directory.iterdir())
    found = [path for path, name in named if name and (packed or not name["packed"])]
    return sorted(found, key=lambda path: (not path.name.startswith("signal"), path.name))


def machines_of(directory: Path) -> list[str]:
    """Names of the folders that a run of several machines has for the others, in order. Raises OSError
    where the directory cannot be listed."""
    found = [f.name for f in directory.iterdir() if _OF_A_MACHINE.fullmatch(f.name)]
    return sorted(found, key=lambda name: (len(name), name))


def is_event(row: Row) -> bool:
    """Whether the row is one of events.jsonl."""
    return isinstance(row.get("event"), str) and "time_s" in row


def is_metrics(row: Row) -> bool:
    """Whether the row is one of metrics.jsonl."""
    return "step" in row and "step_ms" in row


def failure_kind(text: str) -> str:
    """The kind of event that a failure with this text is."""
    low = text.lower()
    return "oom" if "out of memory" in low or "outofmemory" in low or low == "oom" else "error"


def events_of(row: Row) -> list[tuple[str, str]]:
    """Kind and text of what an event of the log means for the trace."""
    if row.get("event") == "failed":
        text = words(row.get("error")) or "no reason is given"
        return [(failure_kind(text), text)]
    return [("phase", name) for name in _PHASES.get(str(row.get("event")), ())]


def ending_of(row: Row) -> str | None:
    """How the run ended with this event, "" where it begins with it; None for any other."""
    return _ENDINGS.get(str(row.get("event")))


def program_of(row: Row) -> Program | None:
    """The program that an event of the log begins; None where it begins none."""
    if row.get("event") != "start":
        return None
    told = {key: value for key, value in row.items() if key not in ("time_s", "event")}
    return Program(name="draftline train", facts=facts(told))


def steps_of(row: Row) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Device, milliseconds per step and values, means since the line before; "cpu" without a GPU."""
    wall_ms = number(row.get("step_ms"))
    shared = {"tokens": number(row.get("tokens_per_s")) * wall_ms / 1000}
    devices: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        name, _, own = key.partition("/")
        if name == "reserved_gib":
            devices.setdefault(device(own), {})["reserved_bytes"] = number(value) * GIB
        elif name == "allocator_calls":
            devices.setdefault(device(own), {})["allocator_calls"] = number(value)
    for own, values in (devices or {"cpu": {}}).items():
        yield own, wall_ms, shared | values


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast steps come, None where unknown, and the share of its time that each side waited."""

    step: float | None = None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    waited_pct: Mapping[str, float] = field(default_factory=dict)


def pace_of(row: Row) -> Pace:
    """What a row of metrics.jsonl says of the run's pace."""
    known = {one_line(name, 80): number(value) for name, value in row.items()}
    known = {name: value for name, value in known.items() if math.isfinite(value)}
    waited = {n.removesuffix(_WAITED): v for n, v in known.items() if n.endswith(_WAITED)}
    return Pace(known.get("step"), known.get("step_ms"), known.get("tokens_per_s"), waited)
