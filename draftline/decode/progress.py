"""What a long command is doing, said at once and then every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

# The first figures come after this long, the next ones after that.
_FIRST_S, _EVERY_S = 1.0, 5.0
# How often the clock is looked at.
_LOOK_S = 0.25


@dataclass(slots=True)
class _Counts:
    """`flying` are the tokens of answers that are being decoded; `kept` those of finished ones."""

    rows: int
    answers: int
    most_tokens: int
    began: float
    rows_done: int = 0
    answers_done: int = 0
    kept: int = 0
    flying: int = 0


class Progress:
    """Prints the state of the work to `stream` from a thread of its own while the context is open.

    On a terminal the figures stand in one line that is rewritten each second. Anywhere else they are
    plain lines, one at least every five seconds, so that no stage is silent.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._live = self._stream.isatty()
        self._stage, self._since = "", clock()
        self._counts: _Counts | None = None
        self._open_line = False
        self._said, self._fresh = clock(), True
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._end_line()

    def stage(self, text: str) -> None:
        """Says what begins now, and goes on saying so until something else begins."""
        with self._lock:
            self._end_line()
            self._stage = text
            self._since = self._said = self._clock()
            self._counts = None
            print(text, file=self._stream, flush=True)

    def begin(self, *, rows: int, answers: int, most_tokens: int) -> None:
        """Generation begins: `answers` of at most `most_tokens` tokens, in `rows` conversations."""
        with self._lock:
            self._counts = _Counts(rows, answers, most_tokens, self._clock())
            self._fresh = True
            self.say()

    def decoding(self, tokens: int) -> None:
        """The batch that is being decoded has come to `tokens` new tokens in all."""
        if self._counts is not None:
            self._counts.flying = tokens

    def settled(self, *, rows: int = 0, answers: int = 0, lost: int = 0, tokens: int = 0) -> None:
        """`rows` ended and `answers` came with `tokens`; `lost` answers will never be asked for."""
        counts = self._counts
        if counts is None:
            return
        with self._lock:
            counts.rows_done += rows
            counts.answers_done += answers
            counts.answers -= lost
            counts.kept += tokens
            counts.flying = 0

    def line(self) -> str:
        """The state in one line."""
        with self._lock:
            counts = self._counts
            now = self._clock()
            if counts is None:
                return f"{self._stage}, for {now - self._since:.0f} s"
            spent = now - counts.began
            tokens = counts.kept + counts.flying
            done = f"answering: {counts.rows_done} of {counts.rows} rows"
            if counts.answers != counts.rows:
                done += f" ({counts.answers_done} of {counts.answers} answers)"
            rate = tokens / spent if spent > 0 else 0.0
            return f"{done}, {tokens} tokens, {rate:.1f} tok/s, ETA {_left(counts, rate)}"

    def say(self) -> None:
        """Prints the line now."""
        with self._lock:
            self._said = self._clock()
            if self._live:
                print(f"\r\x1b[K{self.line()}", end="", file=self._stream, flush=True)
                self._open_line = True
            else:
                print(self.line(), file=self._stream, flush=True)

    def due(self) -> bool:
        """Whether the line should be said again: the first figures come sooner than the others."""
        silent = self._clock() - self._said
        early = self._fresh and self._counts is not None
        return silent >= (_FIRST_S if early or self._live else _EVERY_S)

    def _tick(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self.due():
                self._fresh = False
                self.say()

    def _end_line(self) -> None:
        if self._open_line:
            self._open_line = False
            print(file=self._stream, flush=True)


def _left(counts: _Counts, rate: float) -> str:
    """Time for the answers that are missing, as long as the finished ones were in the mean; while
    none is, as long as they may be."""
    if not rate:
        return "unknown"
    known = counts.answers_done > 0
    mean = counts.kept / counts.answers_done if known else counts.most_tokens
    seconds = max(counts.answers * mean - counts.kept - counts.flying, 0.0) / rate
    text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
    return text if known else f"at most {text}"
