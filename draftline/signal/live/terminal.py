"""Where a view is shown: lines in a log, a live part of a terminal, or a footer below another program.

rich is imported when a terminal is drawn on.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

from draftline.signal.live.alerts import clock
from draftline.signal.live.view import WIDEST_ROW, Line, View, device_line, lines, plain
from draftline.signal.trace import one_line

_EVERY_S = 30.0  # a line in a log although nothing changed
_LEAST_ROWS, _LEAST_COLUMNS = 15, 40  # of a terminal that a footer fits on
_MOST_ROWS = 14  # of a footer
_WIDEST = 160
_LONGEST = 2000  # letters of a line that is said


class Screen(Protocol):
    """What a watcher shows its views on; a context manager."""

    def show(self, view: View) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Screen: ...

    def __exit__(self, *_: object) -> None: ...


class _Managed:
    def open(self) -> None:
        return

    def close(self) -> None:
        return

    def __enter__(self) -> Any:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainScreen(_Managed):
    """Lines for a log: what is said, the verdict when it changes, and the state each 30 s."""

    def __init__(self, out: TextIO, now_s: Callable[[], float] = time.time) -> None:
        self._out = out
        self._now_s = now_s
        self._shown_s = float("-inf")
        self._before: tuple[object, ...] = ()

    def show(self, view: View) -> None:
        now_s = self._now_s()
        key = (view.fault, tuple((row.name, row.shape) for row in view.devices))
        if key == self._before and now_s - self._shown_s < _EVERY_S:
            return
        self._before, self._shown_s = key, now_s
        self.say(f"{clock(now_s)} {status(view)}")

    def say(self, line: str) -> None:
        print(one_line(line, _LONGEST), file=self._out, flush=True)


def status(view: View) -> str:
    """The view in one line."""
    memory = [" ".join(plain(device_line(row, 0)).split()) for row in view.devices]
    parts = [view.state, *memory, view.rate, view.compiles, view.verdict]
    return "; ".join(part for part in parts if part)


class LiveScreen(_Managed):
    """A part of the terminal that is drawn again and again, with what is said above it."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=out)
        self._ascii = not _has_bars(out)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def open(self) -> None:
        self._live.start()

    def show(self, view: View) -> None:
        width = min(self._console.width, _WIDEST)
        drawn = lines(view, width, ascii_only=self._ascii)
        self._live.update(_text(drawn), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(one_line(line, _LONGEST), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class FooterScreen(_Managed):
    """The last lines of the terminal, below what another program prints: the terminal scrolls only
    the part above them. Nothing is said there, since it would stand between the program's lines."""

    def __init__(self, out: TextIO) -> None:
        self._file = out.fileno()
        self._encoding = out.encoding or "utf-8"
        self._ascii = not _has_bars(out)
        self._rows = 0
        self._size = (0, 0)

    def show(self, view: View) -> None:
        columns, rows = os.get_terminal_size(self._file)
        if rows < _LEAST_ROWS or columns < _LEAST_COLUMNS:
            self.close()
            return
        width = min(columns - 1, _WIDEST)
        drawn = lines(view, width, ascii_only=self._ascii)[: min(_MOST_ROWS, rows // 2)]
        self._reserve(len(drawn) + 1, columns, rows)
        rule = ("-" if self._ascii else "─") * width
        shown = ["\x1b7"]
        for place, text in enumerate([rule, *_ansi(drawn, width)]):
            shown.append(f"\x1b[{rows - self._rows + 1 + place};1H\x1b[0m\x1b[2K{text}")
        for place in range(len(drawn) + 1, self._rows):
            shown.append(f"\x1b[{rows - self._rows + 1 + place};1H\x1b[2K")
        shown.append("\x1b8")
        self._write("".join(shown))

    def _reserve(self, wanted: int, columns: int, rows: int) -> None:
        """Keeps at least `wanted` lines at the bottom out of what scrolls; never fewer than before."""
        more = max(0, wanted - self._rows)
        if not more and self._size == (columns, rows):
            return
        self._rows += more
        self._size = (columns, rows)
        # Down and up again makes room below the cursor without moving it within its line.
        room = "\x1bD" * more + (f"\x1b[{more}A" if more else "")
        self._write(f"{room}\x1b7\x1b[1;{rows - self._rows}r\x1b8")

    def say(self, line: str) -> None:
        return

    def close(self) -> None:
        """Gives the whole terminal back, with the footer wiped out."""
        if not self._rows:
            return
        rows = self._size[1]
        places = range(rows - self._rows + 1, rows + 1)
        wiped = "".join(f"\x1b[{place};1H\x1b[2K" for place in places)
        self._write(f"\x1b7\x1b[r{wiped}\x1b8")
        self._rows = 0

    def _write(self, text: str) -> None:
        data = text.encode(self._encoding, "replace")
        while data:
            data = data[os.write(self._file, data) :]


def _text(drawn: Sequence[Line]) -> Any:
    from rich.text import Text

    whole = Text(no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(drawn):
        whole.append("\n" if number else "")
        for text, style in line:
            whole.append(text, style)
    return whole


def _ansi(drawn: Sequence[Line], width: int) -> list[str]:
    from rich.console import Console

    found = []
    for line in drawn:
        held = io.StringIO()
        Console(file=held, force_terminal=True, width=width).print(_text([line]), end="")
        found.append(held.getvalue())
    return found


def _has_bars(out: TextIO) -> bool:
    try:
        "▁…─".encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def row_width(out: TextIO) -> int:
    """How long a device's line may be on `out`."""
    if not out.isatty():
        return WIDEST_ROW
    return min(WIDEST_ROW, os.get_terminal_size(out.fileno()).columns - 1)


def pick_screen(out: TextIO, *, below_program: bool = False) -> Screen:
    """A screen for `out`: a terminal is drawn on, anything else gets lines. With `below_program`
    another program writes to the same terminal."""
    if not out.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return PlainScreen(out)
    return FooterScreen(out) if below_program else LiveScreen(out)
