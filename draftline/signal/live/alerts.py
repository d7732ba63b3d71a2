"""What a watcher is told as it happens: each kind of trouble once, then how often."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass

from draftline.signal.trace import Event, device_name
from draftline.signal.words import EVENTS, event_title

VERDICT = "verdict"  # that the judgement changed is told among what happened
_TOLD = frozenset(kind for kind, word in EVENTS.items() if word.badness) | {VERDICT}
_STORM, _STORM_S = 5, 30.0  # recompiles within so many seconds that are called a storm
_SAID_AT = frozenset({1, 2, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000})
_MOST = 500  # different alerts that are told apart
# Values differ from one time to the next; what changes is the same.
_VALUES = re.compile(r" (?:keeps|changed from|within|reached,) .*|\s*\[rank \d+\]", re.DOTALL)


def clock(time_s: float) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


@dataclass
class Alert:
    """One kind of trouble: its last text, when it first and last came, and how often."""

    kind: str
    text: str
    first_s: float
    last_s: float
    count: int = 1

    @property
    def words(self) -> str:
        """The alert in one line, without its time."""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{event_title(self.kind)}: {self.text}{times}"

    @property
    def line(self) -> str:
        """The alert in one line, with the time of day it last came."""
        return f"{clock(self.last_s)} {self.words}"


class Alerts:
    """Takes events and keeps the alerts, the latest last in `latest`."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Alert] = {}
        self.latest: deque[Alert] = deque(maxlen=8)
        self._recompiles: deque[float] = deque(maxlen=_STORM)
        self._storm_s = float("-inf")

    def take(self, event: Event) -> list[str]:
        """Lines to say now: the first times, then only now and again."""
        if event.kind not in _TOLD:
            return []
        said = [self._add(event)]
        if event.kind == "recompile":
            said.append(self._storm(event.time_s))
        return [line for line in said if line is not None]

    def _add(self, event: Event) -> str | None:
        key = (event.kind, f"{event.device}{_VALUES.sub('', event.text)}")
        text = event.text if event.device is None else f"{device_name(event.device)}: {event.text}"
        alert = self.known.get(key)
        if alert is None:
            if len(self.known) >= _MOST:
                return None
            alert = self.known[key] = Alert(event.kind, text, event.time_s, event.time_s)
        else:
            alert.text, alert.last_s = text, event.time_s
            alert.count += 1
        if alert in self.latest:
            self.latest.remove(alert)
        self.latest.append(alert)
        return alert.line if alert.count in _SAID_AT else None

    def _storm(self, now_s: float) -> str | None:
        self._recompiles.append(now_s)
        close = now_s - self._recompiles[0] <= _STORM_S and len(self._recompiles) == _STORM
        if not close or now_s - self._storm_s < _STORM_S:
            return None
        self._storm_s = now_s
        text = f"{_STORM} recompiles within {now_s - self._recompiles[0]:.0f} s"
        return self._add(Event(now_s, "storm", text))
