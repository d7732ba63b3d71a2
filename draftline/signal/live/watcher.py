"""What is known of one watched program, judged now and then, as views and alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from draftline.signal.draftline_run import Pace
from draftline.signal.judge.verdict import Verdict
from draftline.signal.live.alerts import VERDICT, Alerts
from draftline.signal.live.view import WIDEST_ROW, View, device_rows, lines, plain, rate
from draftline.signal.monitor import Monitor
from draftline.signal.trace import Event, Trace
from draftline.signal.words import EVENTS, LOGGED, duration, event_title

_JUDGE_S = 2.0
_FAULT = 3  # the exit code for a fault, or memory that is not flat
_WIDE = 2000  # a summary's lines are as long as they need to be


class Feed(Protocol):
    """Where a watcher's knowledge comes from."""

    pace: Pace

    @property
    def behind(self) -> bool: ...

    @property
    def title(self) -> str: ...

    @property
    def no_devices(self) -> str: ...

    @property
    def notes(self) -> Sequence[str]: ...

    def compiling(self) -> list[tuple[str, float]]: ...

    def poll(self, now_s: float) -> list[Event]: ...

    def trace(self) -> Trace: ...

    def ended(self, now_s: float) -> str | None: ...


class Watch:
    """What is known of one watched program: polls its feed, judges now and then, makes views."""

    def __init__(
        self, feed: Feed, now_s: float, judging: Callable[[Trace], Verdict] | None = None
    ) -> None:
        self.feed = feed
        self.alerts = Alerts()
        self._monitor = Monitor(feed.trace, judging)
        self._began_s = now_s
        self._counts: Counter[str] = Counter()
        self._compile_s = 0.0

    def poll(self, now_s: float) -> list[str]:
        """Takes in what is new; the lines to say about it. What was read of a part is not judged."""
        said = self.take(self.feed.poll(now_s))
        due = self._monitor.due(now_s, _JUDGE_S) and not self.feed.behind
        return said + self.judge(now_s) if due else said

    def take(self, events: Iterable[Event]) -> list[str]:
        """Counts events and gives the lines to say about them."""
        said: list[str] = []
        for event in events:
            self._counts[event.kind] += 1
            if event.kind == "compile":
                self._compile_s += event.seconds or 0.0
            said += self.alerts.take(event)
        return said

    def judge(self, now_s: float) -> list[str]:
        """Judges what is known now; the line to say where the judgement changed."""
        found = self._monitor.look(now_s)
        if found is None or found.verdict == "unknown" or not self._monitor.changed:
            return []
        return self.alerts.take(Event(now_s, VERDICT, found.line))

    @property
    def verdict(self) -> Verdict | None:
        """The last judgement."""
        return self._monitor.verdict

    @property
    def exit_code(self) -> int:
        """3 where the last verdict is a fault or memory that is not flat, else 0."""
        return _FAULT if self.verdict is not None and self.verdict.is_bad else 0

    def view(self, now_s: float, ended: str | None = None) -> View:
        """What there is to see now."""
        verdict = self.verdict
        shapes = {d.device: d.shape for d in verdict.devices} if verdict else {}
        return View(
            title=self.feed.title,
            state=ended or f"watched for {duration(now_s - self._began_s)}",
            devices=device_rows(self._monitor.seen, shapes),
            no_devices=self.feed.no_devices,
            rate=rate(self._monitor.seen, self.feed.pace),
            compiles=self._compiles(now_s),
            verdict=self._state(),
            fault=self.exit_code == _FAULT,
            alerts=tuple(a for a in self.alerts.latest if a.kind != VERDICT),
            notes=tuple(self.feed.notes),
        )

    def _state(self) -> str:
        """The verdict in one line; where it has no device to judge, the worst that was told."""
        if self.verdict is None:
            return "no verdict yet"
        told = [a for a in self.alerts.known.values() if a.kind != VERDICT]
        worst = max(told, key=lambda alert: EVENTS[alert.kind].badness, default=None)
        if self.verdict.devices or worst is None:
            return self.verdict.line
        return f"{self.verdict.line}; {worst.words}"

    def _compiles(self, now_s: float) -> str | None:
        words = [
            f"compiling {name} for {duration(now_s - since_s)}"
            for name, since_s in self.feed.compiling()
        ]
        for kind in LOGGED:
            if count := self._counts[kind]:
                took = (
                    f" in {self._compile_s:.1f} s" if kind == "compile" and self._compile_s else ""
                )
                name = f"{event_title(kind)}{'s' if count > 1 else ''}"
                words.append(f"{count} {name}{took}")
        return ", ".join(words) or None

    def summary(self, now_s: float, ended: str, columns: int = WIDEST_ROW) -> list[str]:
        """The last view in full, with every alert, for a terminal of so many columns."""
        view = self.view(now_s, ended)
        shown = [
            plain(line) for line in lines(view, _WIDE, row_width=columns, alerts=0, verdict_lines=1)
        ]
        shown[0] = f"{view.title}: {ended}"
        known = sorted(self.alerts.known.values(), key=lambda alert: alert.last_s)
        return shown + [f"  {alert.line}" for alert in known if alert.kind != VERDICT]
