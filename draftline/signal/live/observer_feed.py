"""An observed program as a watcher takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline.signal.live.observe import Observer
from draftline.signal.trace import Event, Trace


class ObserverFeed:
    """What `observer` sees, called `title`. `more_notes` are shown below the observer's own."""

    behind = False  # it tells what is, not what was written

    def __init__(self, observer: Observer, title: str) -> None:
        self.title = title
        self.metrics: Mapping[str, Any] = {}
        self.more_notes: list[str] = []
        self._observer = observer

    @property
    def no_devices(self) -> str:
        reason = self._observer.unsampled
        return "the program uses no GPU so far" if reason is None else f"not sampled: {reason}"

    @property
    def notes(self) -> list[str]:
        return [*self._observer.notes, *self.more_notes]

    def compiling(self) -> list[tuple[str, float]]:
        return self._observer.compiling

    def poll(self, now_s: float) -> list[Event]:
        return self._observer.poll(now_s)

    def trace(self) -> Trace:
        return self._observer.trace()

    def ended(self, _now_s: float) -> str | None:
        return None if self._observer.alive else "the process has ended"
