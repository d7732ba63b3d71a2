"""Lines of the log of a draftline run: what events.jsonl and metrics.jsonl say of its memory."""

from __future__ import annotations

from collections.abc import Iterator

from draftline.signal.readers.json_row import Row, device, number, words
from draftline.signal.trace import GIB

# Phases that begin with an event. A checkpoint's event says when it was queued, not how long it
# took; that shows in the steps.
_PHASES = {
    "start": ("load",),
    "sealed": ("run",),
    "checkpoint": ("checkpoint", "run"),
    "end": ("end",),
}


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
    """Kind and text of what an event means for the trace."""
    kind = row.get("event")
    if kind == "failed":
        text = words(row.get("error"))
        return [(failure_kind(text), text)]
    return [("phase", name) for name in _PHASES.get(str(kind), ())]


def steps_of(row: Row) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Device, milliseconds a step and values, means since the line before; "cpu" without a GPU."""
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
