"""The parts of one run, joined to the Trace that is judged."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from draftline.signal.readers.align import align_clocks, find_device, move, settle_events, span
from draftline.signal.readers.rows import AnyRows, DeviceRows, Part, ProcessRows, StepRows
from draftline.signal.readers.series import finish_samples, finish_steps
from draftline.signal.trace import Program, Samples, Steps, Trace

Key = TypeVar("Key", bound=Hashable)
_UNDATED = " without dates"
_MOST_NAMED = 8  # devices in one note


def assemble(parts: Sequence[Part]) -> Trace:
    """One Trace of what the files of a run gave, with notes on whatever was mended or left out.

    The parts are used up.
    """
    several = len(parts) > 1
    notes = [f"{p.source}: {note}" if several else note for p in parts for note in p.notes]
    parts = _of_one_run(parts, notes)
    _name_devices(parts)
    for part in parts:
        settle_events(part)
    _drop_log(parts, notes)
    notes += align_clocks(parts)
    for part in parts:
        if part.clock == "daytime" and (found := span([part])) is not None:
            move(part, -found[0])
    devices, kinds = _merge_devices(parts, notes)
    lists = _merge_lists(parts, kinds, devices, notes)
    steps = _merge_steps(parts, devices, notes)
    by_note: dict[tuple[str, str], list[str]] = {}
    samples: list[Samples] = []
    for name in sorted(devices.keys() | lists.keys(), key=_number):
        dated = not kinds[name].endswith(_UNDATED)
        one, said = finish_samples(name, devices.get(name), lists.get(name), dated=dated)
        samples += [one] if one is not None else []
        for note in said:
            by_note.setdefault(("device", note), []).append(name)
    finished: list[Steps] = []
    for name, rows in steps:
        done, said = finish_steps(name, rows)
        finished += [done] if done is not None else []
        for note in said:
            by_note.setdefault(("steps on", note), []).append(name)
    notes += [f"{what} {_names(names)}: {note}" for (what, note), names in by_note.items()]
    return Trace(
        samples=tuple(samples),
        steps=tuple(finished),
        events=tuple(sorted(chain(*(p.events for p in parts)), key=lambda event: event.time_s)),
        snapshots=tuple(chain(*(p.snapshots for p in parts))),
        program=_program(parts),
        sources=tuple(p.source for p in parts),
        notes=tuple(dict.fromkeys(notes)),
    )


def _number(name: str) -> tuple[bool, int, str]:
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return shown + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _program(parts: Sequence[Part]) -> Program | None:
    """That of a recording before that of a run's log, which knows less of its steps."""
    known = [p.program for p in parts if p.program is not None]
    return next((p for p in known if p.pid is not None), known[0] if known else None)


def _of_one_run(parts: Sequence[Part], notes: list[str]) -> list[Part]:
    """Without recordings that ended before the last of the programs, or of a run's starts, began."""
    runs: list[tuple[float, float, Part]] = []
    for part in parts:
        if part.is_log and part.began_s is not None:
            runs.append((part.began_s, math.inf, part))
        elif part.program is not None and (found := span([part])) is not None:
            runs.append((*found, part))
    last = max(runs, key=lambda run: run[0], default=None)
    gone = [part for _, end, part in runs if last is not None and end < last[0]]
    for part in gone:
        notes.append(f"{part.source} is of an earlier run than the other files and was left out")
    return [part for part in parts if not any(part is old for old in gone)]


def _name_devices(parts: Sequence[Part]) -> None:
    """Calls every device by the driver's index where any of the parts knows it."""
    indices: dict[str, str] = {}
    ordinals: dict[str, str] = {}
    for part in parts:
        indices |= part.indices
        ordinals |= part.ordinals
    for part in parts:
        if part.is_log:  # these name devices as their program does
            part.steps = _renamed(part.steps, ordinals)
        part.snapshots = [
            replace(s, device=ordinals.get(s.device, s.device)) for s in part.snapshots
        ]
        part.devices = _renamed(part.devices, indices)
        part.processes = _renamed(part.processes, indices)
        part.steps = _renamed(part.steps, indices)
        part.totals = {indices.get(name, name): total for name, total in part.totals.items()}
        part.events = [
            replace(e, device=indices[e.device]) if e.device in indices else e for e in part.events
        ]


def _renamed(held: dict[str, AnyRows], names: dict[str, str]) -> dict[str, AnyRows]:
    found: dict[str, AnyRows] = {}
    for name, rows in held.items():
        _join(found, names.get(name, name), rows)
    return found


def _join(held: dict[Key, AnyRows], key: Key, rows: AnyRows) -> None:
    """Puts rows behind those that are held; they are not copied where there are none."""
    own = held.setdefault(key, rows)
    if own is not rows:
        own.extend(rows)


def _drop_log(parts: Sequence[Part], notes: list[str]) -> None:
    """What a run's log says of steps and phases goes where a recording says it; else its steps of
    earlier starts do."""
    recorded = [part for part in parts if not part.is_log]
    has_steps = any(part.steps for part in recorded)
    has_phases = any(event.kind == "phase" for part in recorded for event in part.events)
    began = max((part.began_s for part in parts if part.began_s is not None), default=-math.inf)
    for part in (part for part in parts if part.is_log):
        if has_phases:
            part.events = [event for event in part.events if event.kind != "phase"]
        if has_steps:
            part.steps = {}
        for name, rows in part.steps.items():
            kept = rows.since(began)
            if len(kept.number) < len(rows.number):
                notes.append("the run was continued: only the steps since its last start were kept")
            part.steps[name] = kept


def _merge_devices(
    parts: Sequence[Part], notes: list[str]
) -> tuple[dict[str, DeviceRows], dict[str, str]]:
    """Rows of each device, of the kind of file that covers the longest time: drivers' tools do not
    agree on what counts as used, and two of them in turn would look like memory that moves."""
    found: dict[str, dict[str, DeviceRows]] = {}
    for part in parts:
        for name, rows in part.devices.items():
            if len(rows.time_s):
                _join(found.setdefault(name, {}), _kind(part), rows)
    merged, kinds = {}, {}
    for name, by_kind in found.items():
        kind = max(by_kind, key=lambda k: (not k.endswith(_UNDATED), *_length(by_kind[k].time_s)))
        merged[name], kinds[name] = by_kind[kind], kind
        if len(by_kind) > 1:
            notes.append(f"several files sampled GPU {name}: the longest ({kind}) was used")
    totals = {name: total for part in parts for name, total in part.totals.items()}
    for name, rows in merged.items():
        if math.isnan(rows.total_bytes):
            rows.total_bytes = totals.get(name, math.nan)
    return merged, kinds


def _merge_lists(
    parts: Sequence[Part],
    kinds: dict[str, str],
    devices: dict[str, DeviceRows],
    notes: list[str],
) -> dict[str, ProcessRows]:
    """Process lists of each device: of the file of its rows, else of the first on such a clock."""
    found: dict[str, dict[str, ProcessRows]] = {}
    merged: dict[str, ProcessRows] = {}
    for part in parts:
        for name, lists in part.processes.items():
            if name == "" and len(devices) > 1:
                notes.append(f"{part.source}: processes without a device were left out")
                continue
            own = name or next(iter(devices), "0")
            _join(found.setdefault(own, {}), _kind(part), lists)
    for name, by_kind in found.items():
        kind = kinds.setdefault(name, next(iter(by_kind)))
        undated = kind.endswith(_UNDATED)
        alike = [lists for k, lists in by_kind.items() if k.endswith(_UNDATED) == undated]
        chosen = by_kind.get(kind) or (alike[0] if alike else None)
        if chosen is not None:
            merged[name] = chosen
    return merged


def _merge_steps(
    parts: Sequence[Part], devices: dict[str, DeviceRows], notes: list[str]
) -> list[tuple[str, StepRows]]:
    """Steps of each device; those of several programs on one device side by side."""
    found: dict[tuple[str, int | None], StepRows] = {}
    for part in parts:
        pid = part.program.pid if part.program is not None else None
        for given, rows in part.steps.items():
            name = given
            if not name:
                name, said = find_device(rows, devices)
                notes += [f"{part.source}: {said}"] if said else []
            key = (name, pid)
            if pid is None:  # a continuation has no start of its own
                key = next((k for k in found if k[0] == name), key)
            _join(found, key, rows)
    names = [name for name, _ in found]
    for name in sorted({name for name in names if names.count(name) > 1}):
        first = next(pid for own, pid in found if own == name)
        judged = "the first" if first is None else f"process {first}"
        notes.append(
            f"several programs made steps on device {name}: only those of {judged} are judged; "
            "diagnose each of the other recordings by itself"
        )
    return [(name, rows) for (name, _), rows in found.items()]


def _kind(part: Part) -> str:
    return part.kind if part.clock in ("utc", "local") else part.kind + _UNDATED


def _length(times: array[float]) -> tuple[float, int]:
    """Seconds from the first row to the last, and the number of rows."""
    known = [t for t in times if not math.isnan(t)]
    return (max(known) - min(known) if known else 0.0), len(times)
