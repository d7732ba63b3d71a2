import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import numpy as np
import pytest

from draftline.signal.live.terminal import (
    FooterScreen,
    LiveScreen,
    PlainScreen,
    pick_screen,
    row_width,
)
from draftline.signal.live.view import DeviceRow, View

GIB = 2.0**30


def view(count: int = 1, verdict: str = "no verdict yet") -> View:
    time_s = np.arange(10.0)
    rows = [DeviceRow(str(n), time_s, np.full(10, 5 * GIB), 141 * GIB) for n in range(count)]
    return View("train.py", "watched for 3 s", rows, verdict=verdict, rate="10 ms per step")


class Terminal:
    """A terminal of 24 x 80 whose output a test reads."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        self.out: TextIO = os.fdopen(slave, "w", encoding="utf-8")
        self.resize(24, 80)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.out.fileno(), termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def read(self) -> str:
        self.out.flush()
        os.set_blocking(self.master, False)
        found = b""
        try:
            while data := os.read(self.master, 65536):
                found += data
        except BlockingIOError:
            pass
        return found.decode()

    def close(self) -> None:
        self.out.close()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def places(text: str) -> list[int]:
    return [int(place) for place in re.findall(r"\x1b\[(\d+);1H", text)]


def test_a_footer_draws_below_the_part_that_scrolls_and_puts_the_cursor_back(
    terminal: Terminal,
) -> None:
    with FooterScreen(terminal.out) as screen:
        screen.show(view())
        text = terminal.read()
        [bottom] = [int(found) for found in re.findall(r"\x1b\[1;(\d+)r", text)]
        assert min(places(text)) == bottom + 1
        assert max(places(text)) == 24
        assert "train.py" in text
        assert text.count("\x1b7") == text.count("\x1b8")

        screen.show(view())
        assert "r\x1b8" not in terminal.read()  # what scrolls is set once

    text = terminal.read()
    assert "\x1b[r" in text
    assert sorted(set(places(text))) == list(range(bottom + 1, 25))


def test_a_footer_grows_with_devices_and_follows_the_terminals_size(terminal: Terminal) -> None:
    with FooterScreen(terminal.out) as screen:
        screen.show(view(1))
        before = re.findall(r"\x1b\[1;(\d+)r", terminal.read())
        screen.show(view(4))
        after = re.findall(r"\x1b\[1;(\d+)r", terminal.read())
        assert int(after[0]) == int(before[0]) - 3

        terminal.resize(40, 100)
        screen.show(view(4))
        assert re.findall(r"\x1b\[1;(\d+)r", terminal.read()) == [str(int(after[0]) + 16)]


def test_a_footer_leaves_a_small_terminal_alone(terminal: Terminal) -> None:
    terminal.resize(10, 80)
    with FooterScreen(terminal.out) as screen:
        screen.show(view())
        screen.say("a line")

    assert terminal.read() == ""


def test_a_live_screen_says_lines_above_what_it_draws(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with LiveScreen(terminal.out) as screen:
        screen.show(view())
        screen.say("12:00:00 recompile: [bold]not markup[/bold]")

    text = terminal.read()
    assert "train.py" in text
    assert "[bold]not markup[/bold]" in text


def test_a_log_gets_a_line_each_half_minute_and_what_is_said() -> None:
    out, now_s = io.StringIO(), [1000.0]
    with PlainScreen(out, lambda: now_s[0]) as screen:
        for _ in range(100):
            screen.show(view())
            now_s[0] += 0.5
        screen.say("alert\x1b[2J")

    told = out.getvalue().splitlines()
    assert len(told) == 3
    assert told[0].endswith("watched for 3 s; GPU 0 5.00/141 GiB ?; 10 ms per step; no verdict yet")
    assert told[-1] == "alert [2J"


def test_a_devices_line_fits_the_terminal(terminal: Terminal) -> None:
    assert row_width(terminal.out) == 79
    assert row_width(io.StringIO()) == 119


def test_the_screen_fits_where_it_is_shown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(pick_screen(io.StringIO()), PlainScreen)
    assert isinstance(pick_screen(terminal.out), LiveScreen)
    assert isinstance(pick_screen(terminal.out, below_program=True), FooterScreen)

    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(pick_screen(terminal.out), PlainScreen)
