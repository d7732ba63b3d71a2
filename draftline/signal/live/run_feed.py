"""Follows a run directory, or one recording, while its program writes it or after it has ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.errors import ConfigError
from draftline.signal.draftline_run import (
    EVENTS,
    METRICS,
    RECORDING,
    Pace,
    ending_of,
    events_of,
    files_of,
    is_metrics,
    pace_of,
)
from draftline.signal.live.processes import PROC, began_s, identify
from draftline.signal.readers.assemble import assemble
from draftline.signal.readers.json_row import Row, device, moment, number, process_id, words
from draftline.signal.readers.recording import RecordingTail
from draftline.signal.trace import Event, Trace, one_line
from draftline.signal.words import duration

_SILENT_S = 5.0  # a process that is gone and wrote nothing for so long has ended
# A process that may be another one (1 in every container) is given up after so long a silence.
_GIVEN_UP_S = 600.0
_LOOK_S = 2.0  # how often the directory is searched for files
_CATCH_UP_S = 1.0  # spent in one poll on what was written before


class RunFeed:
    """What the files of `path` say: its recordings and logs where it is a run
    directory, or one JSONL file. Files that are cut short, replaced or appear later are followed.

    Raises ConfigError where there is nothing to follow.
    """

    def __init__(self, path: Path, proc: Path = PROC) -> None:
        self.path = path
        self.pace = Pace()
        self.behind = False  # more was written than the last poll could read
        self.notes: list[str] = []
        self._proc = proc
        self._tails: dict[Path, RecordingTail] = {}
        self._look_at_s = 0.0
        self._heard_s: float | None = None
        self._ended: str | None = None
        self._pid: int | None = None
        self._started_s = self._last_s = math.nan
        self._program = ""
        self._find()
        if not self._tails:
            what = "is empty of recordings" if path.is_dir() else "is not there"
            raise ConfigError(
                f"{path} {what}: wanted a run directory with {RECORDING}, {EVENTS} or "
                f"{METRICS}, or such a file; it appears once the run has started. A program without "
                "a recording is watched with draftline watch --pid PID"
            )

        if path.is_file():
            with path.open("rb") as file:
                head = file.read(64).lstrip()
            if head and not head.startswith(b"{"):
                raise ConfigError(
                    f"{path} is no recording that can be followed (JSON lines); draftline diagnose "
                    "reads other files"
                )

    @property
    def title(self) -> str:
        return self._program or one_line(self.path.name)

    @property
    def no_devices(self) -> str:
        return "no device memory is recorded"

    def compiling(self) -> list[tuple[str, float]]:
        return []  # a recording tells of compiles when they have ended

    def _find(self) -> None:
        if self.path.is_dir():
            found = files_of(self.path, packed=False)
        else:
            found = [self.path] if self.path.is_file() else []
        for path in found:
            if path not in self._tails:
                self._tails[path] = RecordingTail(path)

    def poll(self, now_s: float) -> list[Event]:
        """What the files gained since the last call, as events; `now_s` is unix time."""
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._find()
        events = []
        # What was written before the first call was not written now.
        catching_up = self._heard_s is None or self.behind
        if self._heard_s is None:
            self._heard_s = self._written_s(now_s)
        self.behind = False
        deadline_s = time.monotonic() + _CATCH_UP_S
        for tail in self._tails.values():
            while rows := tail.poll():
                if not catching_up:
                    self._heard_s = now_s
                for row in rows:
                    events += self._take(row)
                if time.monotonic() > deadline_s:
                    self.behind = True
                    break
        return events

    def _written_s(self, now_s: float) -> float:
        """When the newest file was last written; `now_s` where they are gone."""
        times = [_modified_s(path) for path in self._tails]
        return max((time_s for time_s in times if time_s is not None), default=now_s)

    def _take(self, row: Row) -> list[Event]:
        kind, at_s = row.get("kind"), moment(row.get("time_s"))
        if math.isfinite(at_s):
            self._last_s = at_s
        if kind == "start":
            self._pid = process_id(row.get("pid"))
            self._started_s, self._program = at_s, one_line(words(row.get("program")))
            self._ended = None
        elif (told := event_of(row)) is not None:
            return [told]
        elif kind == "phase" and row.get("phase") == "end":
            self._ended = "the program has ended"
        elif kind is None and (ending := ending_of(row)) is not None:
            self._ended = ending or None
            told_s = at_s if math.isfinite(at_s) else 0.0
            return [Event(told_s, k, one_line(t)) for k, t in events_of(row) if k != "phase"]
        elif kind is None and is_metrics(row):
            self.pace = pace_of(row)
        return []

    def trace(self) -> Trace:
        """The run so far, its latest part where it is long."""
        return assemble([tail.part() for tail in self._tails.values()])

    def ended(self, now_s: float) -> str | None:
        """How the run ended, in words; None while it may go on."""
        if self.behind:
            return None
        if self._ended is not None:
            return self._ended
        silent_s = now_s - (self._heard_s if self._heard_s is not None else now_s)
        if self._pid is not None and silent_s > _SILENT_S and not self._runs():
            return f"its process ({self._pid}) has ended"
        if silent_s > _GIVEN_UP_S:
            return f"nothing was written for {duration(silent_s)}"
        return None

    def _runs(self) -> bool:
        """Whether the recording's process is still there, and not another one with its number."""
        assert self._pid is not None
        try:
            began = began_s(identify(self._pid, self._proc), self._proc)
        except ConfigError:
            return False
        told_s = self._last_s if math.isnan(self._started_s) else self._started_s
        return began is None or math.isnan(told_s) or began <= told_s + 1.0


def event_of(row: Mapping[str, Any]) -> Event | None:
    """The event that a line of a recording tells; None where it is another kind of line."""
    time_s, seconds = moment(row.get("time_s")), number(row.get("seconds"))
    if row.get("kind") != "event" or math.isnan(time_s):
        return None
    return Event(
        time_s,
        one_line(words(row.get("event")), 40),
        one_line(words(row.get("text"))),
        device(row.get("device")) or None,
        None if math.isnan(seconds) else seconds,
    )


def _modified_s(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
