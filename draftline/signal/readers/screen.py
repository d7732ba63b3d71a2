"""What a terminal would have shown, from the control sequences that `watch` wrote to a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_TOKEN = re.compile(
    r"\x1b\[(?P<codes>[0-9;?]*)(?P<end>[A-Za-z@`])|\x1b[()][0-9A-Za-z]|\x1b[^\[()]|"
    r"(?P<text>[^\x00-\x1f\x7f]+)|(?P<control>[\x00-\x1f\x7f])"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-9;?]*|[()])?$")
_ROWS, _COLUMNS = 150, 400  # larger than most terminals; what lies beyond is not kept
# Screens are shown for at most so many rows per character drawn, which bounds the work a file can ask.
_ROWS_A_CHARACTER = 4
_ROWS_AT_FIRST = 10_000
# Sequences that place the cursor; without them a text reads from top to bottom.
PLACED = re.compile(r"\x1b\[\d*(?:;\d*)?[HdG]")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][0-9A-Za-z]")


def without_colours(line: str) -> str:
    """The line without control sequences."""
    return _COLOURS.sub("", line) if "\x1b" in line else line


def replay(pieces: Iterable[str]) -> Iterator[list[str]]:
    """The lines of the screen at each time the program began to draw from further up."""
    screen = _Screen()
    rest, allowed = "", _ROWS_AT_FIRST
    for piece in pieces:
        text = rest + piece
        unfinished = _UNFINISHED.search(text[-64:])
        rest = unfinished[0] if unfinished is not None else ""
        for token in _TOKEN.finditer(text[: len(text) - len(rest)]):
            if (shown := screen.take(token)) is not None and len(shown) <= allowed:
                allowed -= len(shown)
                yield shown
        allowed += _ROWS_A_CHARACTER * len(piece)
    yield screen.lines()


class _Screen:
    """A grid of characters with a cursor; wide enough that nothing wraps."""

    def __init__(self) -> None:
        self._grid: dict[int, list[str]] = {}
        self._row = self._column = 0
        self._rows: dict[int, str] = {}  # of the grid, those that did not change since last shown
        self._drawn = False
        self._width = 0

    def take(self, token: re.Match[str]) -> list[str] | None:
        """Applies one token; returns the screen as it was before the cursor went up to draw anew."""
        if token["text"] is not None:
            self._write(token["text"])
        elif token["end"] is not None:
            return self._control(token["codes"], token["end"])
        elif token["control"] == "\r":
            self._column = 0
        elif token["control"] == "\n":
            self._row, self._column = min(self._row + 1, _ROWS), 0
        elif token["control"] == "\b":
            self._column = max(self._column - 1, 0)
        return None

    def _write(self, text: str) -> None:
        if self._row < _ROWS:
            line = self._grid.setdefault(self._row, [])
            self._rows.pop(self._row, None)
            end = min(self._column + len(text), _COLUMNS)
            line.extend(" " * (end - len(line)))
            line[self._column : end] = text[: max(end - self._column, 0)]
            self._drawn = True
        self._column = min(self._column + len(text), _COLUMNS)

    def _control(self, codes: str, end: str) -> list[str] | None:
        numbers = [int(n) if n.isdecimal() and len(n) < 6 else 0 for n in codes.split(";")]
        first = numbers[0]
        row, column = self._row, self._column
        if end in "Hf":
            row = max(first, 1) - 1
            column = max(numbers[1] if len(numbers) > 1 else 1, 1) - 1
        elif end == "d":
            row = max(first, 1) - 1
        elif end in "G`":
            column = max(first, 1) - 1
        elif end in "AB":
            row += max(first, 1) * (-1 if end == "A" else 1)
        elif end in "CD":
            column += max(first, 1) * (-1 if end == "D" else 1)
        shown = self.lines() if row < self._row and self._drawn else None
        if shown is not None:
            self._drawn = False
        self._row, self._column = min(max(row, 0), _ROWS), min(max(column, 0), _COLUMNS)
        if end == "H":
            self._width = max(self._width, self._column + 1)
        elif end == "J" and first in (2, 3):
            self._grid.clear()
            self._rows.clear()
        elif end == "J":
            self._grid = {n: line for n, line in self._grid.items() if n <= self._row}
            self._rows.clear()
            self._erase(_COLUMNS)
        elif end == "K":
            self._erase(_COLUMNS)
        elif end == "X":
            self._erase(max(first, 1))
        return shown

    def _erase(self, count: int) -> None:
        line = self._grid.get(self._row, [])
        self._rows.pop(self._row, None)
        end = min(self._column + count, len(line))
        line[self._column : end] = " " * max(end - self._column, 0)

    def lines(self) -> list[str]:
        """The screen; a line of a table that the terminal's width broke is put together again."""
        found: list[str] = []
        for n in range(max(self._grid, default=-1) + 1):
            row = self._rows.get(n)
            if row is None:
                row = self._rows[n] = "".join(self._grid.get(n, ())).rstrip()
            if found and found[-1][:1] == "|" and row[-1:] == "|" and row[0] not in "|+":
                found[-1] = found[-1].ljust(self._width) + row
            else:
                found.append(row)
        return found
