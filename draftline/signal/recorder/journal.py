"""The lines of a recording (format 1) on their way to the file, and the latest of them in memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftline.signal.readers.assemble import assemble
from draftline.signal.readers.collector import Collector
from draftline.signal.recorder.clock import now_s, steady_s
from draftline.signal.recorder.lines import LineFile
from draftline.signal.recorder.nvml import Reading
from draftline.signal.recorder.thinning import Thinning
from draftline.signal.trace import Event, Trace, one_line

log = logging.getLogger(__name__)

_MOST_EVENTS = 2000  # per kind that are written; the counters go on counting
_MOST_TEXT = 2000


class Journal:
    """Writes what it is given to `path`, in the background, and keeps the latest part as a Trace.
    Raises ConfigError where the file cannot be opened, and nothing later.

    All times written are of the recorder's own clock: events come with the wall clock's and readings
    with that clock's. Text is made one printable line.
    """

    def __init__(self, path: Path) -> None:
        self.file = LineFile(path)
        self._latest = Collector(str(path), live=True)
        self._lock = threading.Lock()
        self._thinning: dict[tuple[str, str], Thinning] = {}
        self._events: dict[str, int] = {}

    def start(
        self,
        program: str,
        expects: Sequence[str],
        devices: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        pid: int | None = None,
    ) -> None:
        """The program, at the beginning of its recording; this process unless `pid` is another."""
        line = {
            "kind": "start",
            "format": 1,
            "time_s": _rounded(now_s()),
            "pid": os.getpid() if pid is None else pid,
            "program": one_line(program, _MOST_TEXT),
            "expects": list(expects),
            "devices": devices,
            "facts": facts,
        }
        self._add(line)

    def facts(self, devices: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """What became known of the program after its start: devices, another stance."""
        line = {
            "kind": "facts",
            "time_s": _rounded(now_s()),
            "devices": devices,
            "facts": facts,
        }
        self._add(line)

    def phase(self, name: str) -> None:
        time_s, name = _rounded(now_s()), one_line(name)
        self._add({"kind": "phase", "time_s": time_s, "phase": name})

    def event(self, event: Event) -> None:
        event = replace(event, time_s=steady_s(event.time_s), text=one_line(event.text, _MOST_TEXT))
        line = {
            "kind": "event",
            "time_s": _rounded(event.time_s),
            "event": event.kind,
            "device": event.device,
            "text": event.text,
            "seconds": None if event.seconds is None else _rounded(event.seconds),
        }
        written = self._events[event.kind] = self._events.get(event.kind, 0) + 1
        if written == _MOST_EVENTS + 1:
            log.warning(
                "%s: %d events of kind %s are enough; later ones are counted and not written",
                self.file.path.name,
                _MOST_EVENTS,
                event.kind,
            )
        self._add(line, write=written <= _MOST_EVENTS)

    def step(
        self, device: str, number: int, wall_s: float | None, values: Mapping[str, float]
    ) -> None:
        """A step that has just ended on a device."""
        line = {
            "kind": "step",
            "time_s": _rounded(now_s()),
            "device": device,
            "step": number,
            "wall_ms": None if wall_s is None else round(wall_s * 1000, 3),
            **values,
        }
        self._add_thinned(line)

    def sample(self, reading: Reading) -> None:
        processes = reading.processes
        told = None if processes is None else {str(p): held for p, held in processes.items()}
        self._add_thinned(
            {
                "kind": "device",
                "time_s": _rounded(reading.time_s),
                "device": reading.device,
                "used_bytes": reading.used_bytes,
                "total_bytes": reading.total_bytes,
                "util_pct": reading.util_pct,
                "processes": told,
            }
        )

    def _add_thinned(self, line: dict[str, Any]) -> None:
        thinning = self._thinning.setdefault((line["kind"], line["device"]), Thinning())
        self._add(line, write=thinning.take(line))

    def _add(self, line: dict[str, Any], *, write: bool = True) -> None:
        with self._lock:
            self._latest.take(line)
        if write:
            self.file.add(line)

    def trace(self) -> Trace:
        """What is known lately, in bounded memory, as a reader of the file would have it."""
        with self._lock:
            part = self._latest.finished().copy()
        return assemble([part])


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
