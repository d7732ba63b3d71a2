"""The tables of a report: compiles, choices, events, environment, configuration, notes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftline.signal.report.report_curves import Clock
from draftline.signal.report.report_verdict import text
from draftline.signal.report.run_facts import RunFacts, flatten
from draftline.signal.trace import EVENT_WORDS, GIB, device_name

_MOST_ROWS = 200
_MOST_LETTERS = 600
_FOLDED = 25  # a longer list of events is closed at first
_LONG = 32  # a longer cell gets room, and a longer word may be broken anywhere
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


def sections(run: RunFacts, clock: Clock) -> list[tuple[str, str, str]]:
    """Anchor, title and HTML of every table that has something in it."""
    found = [
        ("compiles", "Compiled and warmed", _compiles(run)),
        ("choices", "Choices", _choices(run)),
        ("events", "Events", _events(run, clock)),
        ("environment", "Environment", _environment(run)),
        ("configuration", "Configuration", _configuration(run)),
        ("notes", "Notes", _notes(run)),
    ]
    return [part for part in found if part[2]]


def table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()
) -> str:
    """A table that scrolls sideways where it is too wide; columns in `numbers` are set right."""
    right = ['class="number"' if i in numbers else "" for i in range(len(head))]
    top = "".join(f'<th scope="col" {right[i]}>{text(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        f"<tr>{''.join(_cell(_short(c), right[i], head[i]) for i, c in enumerate(row))}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    rest = len(rows) - _MOST_ROWS
    # On a narrow page each row of a wide table becomes a block of its own.
    rows_class = ' class="rows"' if len(head) > 2 else ""
    more = f'<p class="caption">{rest:,} more are not shown.</p>' if rest > 0 else ""
    return (
        f'<div class="scroll"><table{rows_class}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        f"{more}"
    )


def _cell(said: str, kind: str, label: str) -> str:
    if len(said) > _LONG:
        broken = max(map(len, said.split()), default=0) > _LONG
        kind = f'class="{"long broken" if broken else "long"}"'
    return f'<td {kind} data-label="{text(label)}">{text(said)}</td>'


def _card(inner: str, caption: str = "") -> str:
    said = f'<p class="caption">{text(caption)}</p>' if caption else ""
    return f'<div class="card">{inner}{said}</div>'


def _short(value: object) -> str:
    said = value if isinstance(value, str) else _plain(value)
    return said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}…"


def _plain(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def _compiles(run: RunFacts) -> str:
    sealed = run.sealed
    if sealed is None:
        return ""
    rows = []
    for key, part in (("compiled", None), ("warmed", "whole")):
        listed = sealed.get(key)
        for row in listed if isinstance(listed, list) else ():
            if isinstance(row, dict):
                late = ", after the start" if row.get("late") else ""
                seconds = row.get("seconds")
                took = f"{seconds:,.1f}" if isinstance(seconds, (int, float)) else "unknown"
                rows.append(
                    (
                        row.get("name", ""),
                        row.get("device", ""),
                        part or row.get("part", ""),
                        f"{row.get('outcome', '')}{late}",
                        took,
                    )
                )
    head = ("what", "device", "part", "outcome", "seconds")
    caption = "Everything that was compiled, run and captured before the first step."
    return _card(table(head, rows, numbers=(4,)), caption) if rows else ""


def _choices(run: RunFacts) -> str:
    rows = [
        (
            c.get("what", ""),
            c.get("wanted", ""),
            c.get("got", ""),
            c.get("reason", ""),
            "fallback" if c.get("fallback") else "as meant",
        )
        for c in run.choices
    ]
    rows.sort(key=lambda row: row[4] != "fallback")
    caption = "What was decided for you. A fallback is worse than what was wanted."
    head = ("what", "wanted", "taken", "because", "kind")
    return _card(table(head, rows), caption) if rows else ""


def _events(run: RunFacts, clock: Clock) -> str:
    rows = []
    for event in run.trace.events:
        if event.kind == "phase":
            continue
        at = (event.time_s - clock.start_s) / clock.unit_s
        took = "" if event.seconds is None else f"{event.seconds:,.2f}"
        where = "" if event.device is None else device_name(event.device)
        rows.append(
            (f"{at:,.2f}", EVENT_WORDS.get(event.kind, event.kind), where, event.text, took)
        )
    head = (f"at, {clock.unit}", "event", "device", "why", "seconds")
    listed = table(head, rows, numbers=(0, 4))
    if len(rows) > _FOLDED:
        listed = f"<details><summary>All {len(rows):,} events</summary>{listed}</details>"
    return _card(listed) if rows else ""


def _environment(run: RunFacts) -> str:
    told = run.environment
    rows: list[tuple[str, object]] = [
        (key.replace("_", " "), "unknown" if value is None else value)
        for key, value in told.items()
        if key not in _UNLISTED and not (value is None and key.endswith("limit"))
    ]
    for key in ("memory_bytes", "memory_limit_bytes"):
        if isinstance(told.get(key), (int, float)):
            rows.append(
                (key.removesuffix("_bytes").replace("_", " "), f"{told[key] / GIB:.1f} GiB")
            )
    gpus = told.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, Mapping):
            rows.append((device_name(str(gpu.get("index"))), _gpu(gpu)))
    devices = [e for e in run.last_start() if e.get("event") == "device"]
    rows += [(str(e.get("device")), e.get("what", "")) for e in devices]
    for group, label in (("versions", "version of "), ("variables", "")):
        named = told.get(group)
        if isinstance(named, Mapping):
            rows += [(f"{label}{key}", value) for key, value in named.items()]
    return _card(table(("fact", "value"), rows)) if rows else ""


def _gpu(gpu: Mapping[str, Any]) -> str:
    total = gpu.get("total_bytes")
    size = f", {total / GIB:.1f} GiB" if isinstance(total, (int, float)) else ""
    return f"{gpu.get('name') or 'unnamed'}{size}"


def _configuration(run: RunFacts) -> str:
    flat = flatten(run.config)
    if not flat:
        return ""
    rows = list(flat.items())
    return _card(
        f"<details><summary>All {len(rows)} settings</summary>{table(('key', 'value'), rows)}</details>"
    )


def _notes(run: RunFacts) -> str:
    said = [*(f"This run has {what}." for what in run.missing), *run.notes]
    items = "".join(f"<li>{text(note)}</li>" for note in said)
    return _card(f"<ul>{items}</ul>") if items else ""
