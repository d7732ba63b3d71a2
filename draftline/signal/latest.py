"""How much a live verdict keeps of a run that goes on for days."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.signal.trace import Event
from draftline.signal.words import EVENTS as KINDS

# Steps and samples of each device, and events.
STEPS, SAMPLES, EVENTS = 4096, 8192, 1000


def latest_events(events: Sequence[Event]) -> list[Event]:
    """The last 1000 of `events`, and before them the last 500 of those that still hold."""
    old, kept = events[:-EVENTS], events[-EVENTS:]
    # A storm of compiles must not push these out.
    lasting = [event for event in old if event.kind in KINDS and KINDS[event.kind].lasting]
    return [*lasting[-EVENTS // 2 :], *kept]
