"""A recording in JSON lines: read whole, or followed while its program writes it."""

from __future__ import annotations

from pathlib import Path

from draftline.signal.readers.assemble import assemble
from draftline.signal.readers.collector import Collector, layout_of
from draftline.signal.readers.json_row import Row, parse
from draftline.signal.readers.rows import Part
from draftline.signal.readers.tail import GrowingFile
from draftline.signal.readers.textfile import TextFile
from draftline.signal.trace import Trace


def recognises(line: str) -> bool:
    """Whether the line is one of a recording, of a run's log, or of the per-step layout of others."""
    row = parse(line)
    return row is not None and layout_of(row) is not None


def read(text: TextFile, _before: Part | None = None) -> Part:
    """What a file of JSON lines holds of its last run."""
    collector = Collector(text.name)
    for line in text.lines():
        if line.strip() and collector.add(line) is None:
            # Known before the last line is given: a program that is stopped leaves a part of one.
            text.left_out = text.unended
    return collector.settled()


class RecordingTail:
    """Follows a recording, or a run's events.jsonl or metrics.jsonl, in bounded memory: the latest
    steps, samples and events of each device. The file need not exist yet, and may be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GrowingFile(path)
        self._collector = Collector(path.name, live=True)

    def poll(self) -> list[Row]:
        """The lines that came since the last call, parsed; what is no object is left out."""
        before = self._file.read_bytes
        lines = self._file.lines()
        if self._file.read_bytes < before:
            self._collector = Collector(self.path.name, live=True)
        rows = (self._collector.add(line) for line in lines if line.strip())
        return [row for row in rows if row is not None]

    def part(self) -> Part:
        """A copy of what is kept, to be joined with that of other files."""
        return self._collector.finished().copy()

    def trace(self) -> Trace:
        """What is kept, as a Trace of its own."""
        return assemble([self.part()])
