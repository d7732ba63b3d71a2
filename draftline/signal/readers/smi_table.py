"""The table that plain `nvidia-smi` prints, run in a loop or under `watch` and logged as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from draftline.signal.readers.clock import Stamp, read_stamp
from draftline.signal.readers.rows import Part
from draftline.signal.readers.screen import PLACED, replay, without_colours
from draftline.signal.readers.textfile import TextFile, clean
from draftline.signal.trace import MIB

_HEAD = re.compile(r"\|\s*NVIDIA-SMI\s+\S+")
_GPU = re.compile(
    r"\|\s*(\d{1,3})\s+\S.*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s"
)
_MEMORY = re.compile(r"\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|\s*(?:(\d{1,3})%|\S+)")
_INSTANCE = re.compile(
    r"\|\s*(\d{1,3})\s+(\d{1,3})\s+(\d{1,3})\s+\d{1,3}\s*\|\s*(\d{1,9})MiB\s*/\s*(\d{1,9})MiB\s*\|"
)
# GPU, and since 2020 the GPU instance and compute instance; pid; type; name; memory.
_PROCESS = re.compile(
    r"\|\s*(\d{1,3})\s+(?:(N/A|\d{1,3})\s+(N/A|\d{1,3})\s+)?(\d{1,15})\s+(?:C\+G|M\+C|[CGM])\s.*?"
    r"\s(?:(\d{1,9})MiB|N/A)\s*\|\s*$"
)
_HEAD_BYTES = 1 << 16  # that show whether the cursor was placed
_WIDEST = 300  # characters; a table has 79 to 91, and a search may take the square of them


def recognises(line: str) -> bool:
    """Whether the line is one that begins or fills such a table."""
    return len(line) <= _WIDEST and any(p.search(line) for p in (_HEAD, _GPU, _MEMORY))


def read(text: TextFile, _before: Part | None = None) -> Part:
    """All tables of a file, and what `watch` drew where its beginning shows that."""
    head = clean(text.head(_HEAD_BYTES).replace(b"\0", b""))
    return _TableReader(text.name).read(text, drawn=PLACED.search(head) is not None)


class _TableReader:
    """Makes a Part of one file. A MIG instance is a device of its own, named like 0/gi7/ci0."""

    def __init__(self, source: str) -> None:
        self.part = Part(source, "table", clock="none")
        self._stamps: list[Stamp] = []
        self._time_s = math.nan
        self._zoned: list[bool] = []
        self._gpu: str | None = None
        self._tables = 0
        self._listed: dict[str, list[tuple[int, float]]] = {}
        self._seen: list[str] = []
        self._any_listed = False

    def read(self, text: TextFile, *, drawn: bool) -> Part:
        if drawn:
            before: list[str] = []
            for screen in replay(text.pieces()):
                if screen != before:
                    self._lines(screen)
                    self._end_table()
                before = screen
        else:
            self._lines(text.lines())
        self._end_table()
        part = self.part
        if self._zoned:
            part.clock = "utc" if all(self._zoned) else "local"
        if any("/" in name for name in part.devices):
            part.notes.append(
                "MIG instances are devices of their own; the whole GPU's memory is theirs"
            )
        if self._tables and not part.devices:
            part.notes.append(
                "the tables hold no row of a GPU (a terminal narrower than the table?)"
            )
        return part

    def _lines(self, lines: Iterable[str]) -> None:
        for raw in lines:
            line = without_colours(raw[: 4 * _WIDEST])
            if len(line) > _WIDEST:
                continue
            if "|" not in line:
                if (stamp := read_stamp(line)) is not None:
                    if self._seen:
                        self._end_table()
                    self._stamps.append(stamp)
            elif _HEAD.search(line) is not None:
                self._end_table()
                self._begin_table()
            else:
                self._row(line)

    def _begin_table(self) -> None:
        self._tables += 1
        if self._stamps:
            # A line of date(1) names its zone where nvidia-smi's own does not.
            best = next((s for s in self._stamps if s.zoned), self._stamps[-1])
            self._time_s = best.seconds
            self._zoned.append(best.zoned)
        else:
            self._time_s = math.nan
        self._stamps = []

    def _row(self, line: str) -> None:
        if (m := _GPU.search(line)) is not None:
            self._gpu = str(int(m[1]))
            if len(self.part.indices) < 1024:
                self.part.indices[m[2]] = self._gpu
        elif self._gpu is not None and (m := _MEMORY.search(line)) is not None:
            self._add(self._gpu, m[1], m[2], float(m[3]) if m[3] else math.nan)
            self._gpu = None
        elif (m := _INSTANCE.search(line)) is not None:
            self._add(_instance(m[1], m[2], m[3]), m[4], m[5], math.nan)
        elif (m := _PROCESS.search(line)) is not None:
            name = str(int(m[1])) if m[2] in (None, "N/A") else _instance(m[1], m[2], m[3])
            used = float(m[5]) * MIB if m[5] else math.nan
            self._listed.setdefault(name, []).append((int(m[4]), used))

    def _add(self, name: str, used: str, total: str, util_pct: float) -> None:
        rows = self.part.device(name)
        if rows is not None and name not in self._seen:
            rows.add(self._time_s, float(used) * MIB, util_pct)
            rows.total_bytes = float(total) * MIB
            self._seen.append(name)

    def _end_table(self) -> None:
        """An empty list says nothing: in a container a busy GPU shows no process either."""
        self._any_listed |= bool(self._listed)
        if self._any_listed:
            for name in self._seen:
                lists = self.part.listing(name)
                if lists is not None:
                    lists.begin(self._time_s)
                    for pid, used in self._listed.get(name, ()):
                        lists.see(pid, used)
        self._listed, self._seen, self._gpu = {}, [], None


def _instance(gpu: str, instance: str, compute: str) -> str:
    return f"{int(gpu)}/gi{instance}/ci{compute}"
