"""Rows of `nvidia-smi dmon` and `nvidia-smi pmon`, whatever sets of columns they were asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from draftline.signal.readers.clock import DAY_S, read_daytime, read_stamp
from draftline.signal.readers.columns import read_quantity
from draftline.signal.readers.rows import Part
from draftline.signal.readers.textfile import TextFile
from draftline.signal.trace import MIB

_TURN_S = 1.5
_MOST_CELLS = 256
_MOST_EARLY = 1000  # rows before the first header


def recognises(line: str) -> bool:
    """Whether the line is a header of dmon or pmon."""
    return line.lstrip().startswith("#") and "gpu" in _names(line)


def read(text: TextFile, _before: Part | None = None) -> Part:
    """The readings or process lists of such a file."""
    return _MonitorReader(text.name).read(text.lines(whole=True))


class _MonitorReader:
    """Makes a Part of the lines of one file. Memory of dmon is MiB, though its header says MB."""

    def __init__(self, source: str) -> None:
        self.part = Part(source, "monitor", clock="none")
        self._names: list[str] = []
        self._bad = 0
        self._clock_s = -math.inf
        self._days = 0.0
        # Of the turn that is being listed: who was, the last GPU, and the time of the last row.
        self._shown: set[tuple[str, str]] = set()
        self._gpu = -1
        self._turn_s = math.nan

    def read(self, lines: Iterable[str]) -> Part:
        """The rows of all lines; headers come again every so often, and may change."""
        early: list[str] = []
        for line in lines:
            text = line.strip()
            if not text:
                continue
            if text.startswith("#"):
                names = _names(text)
                if "gpu" in names:
                    first, self._names = not self._names, names
                    for row in early if first else ():
                        self._bad += not self._take(row)
                continue
            if self._names:
                self._bad += not self._take(text)
            elif len(early) < _MOST_EARLY:
                early.append(text)
            else:
                self._bad += 1
        readings = [v for rows in self.part.devices.values() for v in rows.used_bytes]
        if readings and not any(map(math.isfinite, readings)):
            self.part.notes.append("no column of memory: record with `nvidia-smi dmon -s mu -o DT`")
        if self._bad:
            self.part.notes.append(f"{self._bad} line(s) could not be read")
        return self.part

    def _take(self, line: str) -> bool:
        cells = _cells(line)
        if len(cells) < len(self._names):
            return False
        row = dict(zip(self._names, cells, strict=False))
        if not row["gpu"].isdecimal() or len(row["gpu"]) > 3:
            return False
        device, numbers = str(int(row["gpu"])), {}
        for name, scale in (("fb", MIB), ("sm", 1.0)):
            found = read_quantity(row.get(name, "-"))
            if found is None:
                return False
            numbers[name] = found[0] * scale
        time_s = self._time(row)
        if time_s is None:
            return False
        if "pid" in row:
            return self._take_process(device, row["pid"], numbers["fb"], time_s)
        rows = self.part.device(device)
        if rows is not None:
            rows.add(time_s, numbers["fb"], numbers["sm"])
        return rows is not None

    def _take_process(self, device: str, pid: str, used: float, time_s: float) -> bool:
        lists = self.part.listing(device)
        if lists is None or not (pid == "-" or (pid.isdecimal() and len(pid) < 16)):
            return False
        # All GPUs are listed in turn; one that comes again begins the next turn. A second that ends
        # within a turn does not.
        again = (device, pid) in self._shown or int(device) < self._gpu
        if again or time_s - self._turn_s > _TURN_S:
            self._shown.clear()
            self._gpu = -1
        if int(device) > self._gpu:
            lists.begin(time_s)
            self._gpu = int(device)
        self._turn_s = time_s
        self._shown.add((device, pid))
        if pid != "-":
            lists.see(int(pid), used)
        return True

    def _time(self, row: dict[str, str]) -> float | None:
        """Of a row, NaN where the file has none, None where it cannot be read."""
        if "time" not in row:
            return math.nan
        if "date" in row:
            stamp = read_stamp(f"{row['date']} {row['time']}")
            self.part.clock = "local"
            return None if stamp is None else stamp.seconds
        clock_s = read_daytime(row["time"])
        if clock_s is None:
            return None
        self.part.clock = "daytime"
        if clock_s < self._clock_s - DAY_S / 2:
            self._days += DAY_S
        self._clock_s = clock_s
        return self._days + clock_s


def _names(line: str) -> list[str]:
    return [cell.lower() for cell in _cells(line.strip().lstrip("#").strip())]


def _cells(line: str) -> Sequence[str]:
    if "," in line:
        return [cell.strip() for cell in line.split(",", _MOST_CELLS)]
    return line.split(None, _MOST_CELLS)
