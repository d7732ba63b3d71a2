"""How much a live verdict keeps of a run that goes on for days."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.signal.trace import Event

# Steps and samples of each device, and events.
STEPS, SAMPLES, EVENTS = 4096, 8192, 1000
# What holds for the run until something else is said, however long ago it was: a storm of compiles
# must not push it out.
_LASTING = frozenset({"phase", "eager_flex", "recompile_limit"})


def latest_events(events: Sequence[Event]) -> list[Event]:
    """The last 1000 of `events`, and before them the last 500 of those that still hold."""
    old, kept = events[:-EVENTS], events[-EVENTS:]
    lasting = [event for event in old if event.kind in _LASTING]
    return [*lasting[-EVENTS // 2 :], *kept]
