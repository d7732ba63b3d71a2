"""The tables of a report: compiles, choices, events, environment, configuration, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.signal.report.curves import Clock
from draftline.signal.report.run_facts import RunFacts, flatten
from draftline.signal.trace import GIB, device_name
from draftline.signal.words import event_title

_FOLDED = 25  # a longer list of events is closed at first
_UNLISTED = frozenset(
    {
        "versions",
        "variables",
        "gpus",
        "argv",
        "config",
        "resume",
        "memory_bytes",
        "memory_limit_bytes",
    }
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its place on the page: `name` is its anchor, columns in `numbers` are set right,
    `folded` is what it says while it is closed (else it is open). Without a `head` rows are texts."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Any]
    numbers: Sequence[int] = ()
    caption: str = ""
    folded: str = ""


def tables_of(run: RunFacts, clock: Clock) -> list[Table]:
    """Every table that has something in it."""
    settings = list(flatten(run.config).items())
    notes = [*(f"This run has {what}." for what in run.missing), *run.notes]
    found = [
        _compiles(run),
        _choices(run),
        _events(run, clock),
        Table("environment", "Environment", ("fact", "value"), _environment(run)),
        Table(
            "configuration",
            "Configuration",
            ("key", "value"),
            settings,
            folded=f"All {len(settings)} settings",
        ),
        Table("notes", "Notes", (), notes),
    ]
    return [table for table in found if table.rows]


def _compiles(run: RunFacts) -> Table:
    sealed = run.sealed or {}
    rows = []
    for key, part in (("compiled", None), ("warmed", "whole")):
        listed = sealed.get(key)
        for row in listed if isinstance(listed, list) else ():
            if isinstance(row, dict):
                late = ", after the start" if row.get("late") else ""
                seconds = row.get("seconds")
                took = f"{seconds:,.1f}" if isinstance(seconds, (int, float)) else "unknown"
                name, device, outcome = (row.get(k, "") for k in ("name", "device", "outcome"))
                rows.append((name, device, part or row.get("part", ""), f"{outcome}{late}", took))
    head = ("what", "device", "part", "outcome", "seconds")
    caption = "Everything that was compiled, run and captured before the first step."
    return Table("compiles", "Compiled and warmed", head, rows, (4,), caption)


def _choices(run: RunFacts) -> Table:
    rows = [
        (
            *(choice.get(key, "") for key in ("what", "wanted", "got", "reason")),
            "fallback" if choice.get("fallback") else "as meant",
        )
        for choice in run.choices
    ]
    rows.sort(key=lambda row: row[4] != "fallback")
    caption = "What was decided for you. A fallback is worse than what was wanted."
    head = ("what", "wanted", "taken", "because", "kind")
    return Table("choices", "Choices", head, rows, caption=caption)


def _events(run: RunFacts, clock: Clock) -> Table:
    rows = [
        (
            f"{(event.time_s - clock.start_s) / clock.unit_s:,.2f}",
            event_title(event.kind),
            "" if event.device is None else device_name(event.device),
            event.text,
            "" if event.seconds is None else f"{event.seconds:,.2f}",
        )
        for event in run.trace.events
        if event.kind != "phase"
    ]
    head = (f"at, {clock.unit}", "event", "device", "why", "seconds")
    folded = f"All {len(rows):,} events" if len(rows) > _FOLDED else ""
    return Table("events", "Events", head, rows, (0, 4), folded=folded)


def _environment(run: RunFacts) -> list[tuple[str, object]]:
    told = run.environment
    rows: list[tuple[str, object]] = [
        (key.replace("_", " "), "unknown" if value is None else value)
        for key, value in told.items()
        if key not in _UNLISTED and not (value is None and key.endswith("limit"))
    ]
    for key in ("memory_bytes", "memory_limit_bytes"):
        if isinstance(told.get(key), (int, float)):
            name = key.removesuffix("_bytes").replace("_", " ")
            rows.append((name, f"{told[key] / GIB:.1f} GiB"))
    gpus = told.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, Mapping):
            total = gpu.get("total_bytes")
            size = f", {total / GIB:.1f} GiB" if isinstance(total, (int, float)) else ""
            rows.append(
                (device_name(str(gpu.get("index"))), f"{gpu.get('name') or 'unnamed'}{size}")
            )
    devices = [e for e in run.last_start() if e.get("event") == "device"]
    rows += [(str(e.get("device")), e.get("what", "")) for e in devices]
    for group, prefix in (("versions", "version of "), ("variables", "")):
        named = told.get(group)
        if isinstance(named, Mapping):
            rows += [(f"{prefix}{key}", value) for key, value in named.items()]
    return rows
