"""A lock with a shared side for workers and an exclusive side for whoever stops all of them.

A waiting exclusive side keeps newcomers out, so it gets its turn as soon as those inside leave.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftline.errors import CompileError

_WAITS = ("threading.py", "queue.py")


class ReaderWriterLock:
    """Many threads inside `shared`, or one inside `exclusive`; both sides are re-entrant.

    A wait ends with CompileError when nobody has left for `deadline_s` seconds; the message names
    the threads that are waited for and the lines they are at.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._inside: dict[int, tuple[str, int]] = {}  # thread id: name, depth
        self._owner: tuple[int, str, str] | None = None  # thread id, name, what it does
        self._depth = 0
        self._claims = 0
        self._departures = 0
        self._waiting: dict[int, str] = {}

    def inside(self) -> list[str]:
        """Names of the threads on the shared side."""
        with self._changed:
            return sorted(name for name, _ in self._inside.values())

    def waiting(self) -> list[str]:
        """Names of the threads that wait for either side."""
        with self._changed:
            return sorted(self._waiting.values())

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the shared side; free of charge for the owner of the exclusive one."""
        me, name = threading.get_ident(), threading.current_thread().name
        with self._changed:
            counted = self._owner is None or self._owner[0] != me
            if counted:
                if me not in self._inside:
                    self._wait(lambda: self._owner is None and not self._claims, "its next unit")
                _, depth = self._inside.get(me, (name, 0))
                self._inside[me] = (name, depth + 1)
        try:
            yield
        finally:
            if counted:
                with self._changed:
                    _, depth = self._inside.pop(me)
                    if depth > 1:
                        self._inside[me] = (name, depth - 1)
                    else:
                        self._left()

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Holds the exclusive side for `what`. CompileError from inside `shared`, at once."""
        me, name = threading.get_ident(), threading.current_thread().name
        with self._changed:
            if self._owner is None or self._owner[0] != me:
                if me in self._inside:
                    raise CompileError(
                        f"{what} was asked for by {name} inside its own unit of work, where it "
                        "would wait for itself; leave running() first"
                    )
                self._claims += 1
                try:
                    self._wait(lambda: self._owner is None and not self._inside, what)
                    self._owner = (me, name, what)
                finally:
                    self._claims -= 1
                    # Whoever this claim kept out looks again, also when it has given up.
                    self._changed.notify_all()
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._left()

    def _left(self) -> None:
        self._departures += 1
        self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], what: str) -> None:
        """Waits, with the condition held, until `free()`."""
        me = threading.get_ident()
        self._waiting[me] = threading.current_thread().name
        try:
            seen, until = self._departures, time.monotonic() + self._deadline_s
            while not free():
                self._changed.wait(max(until - time.monotonic(), 0.0))
                if self._departures != seen:
                    seen, until = self._departures, time.monotonic() + self._deadline_s
                elif time.monotonic() >= until and not free():
                    raise CompileError(
                        f"{self._waiting[me]} waited {self._deadline_s:g} s for {what}; still "
                        f"running: {self._holders()}. That thread is stuck, or waits for another "
                        "one inside its unit of work, where it must not wait"
                    )
        finally:
            del self._waiting[me]

    def _holders(self) -> str:
        frames = sys._current_frames()

        def place(thread: int) -> str:
            frame = frames.get(thread)
            # Where somebody waits says more than the wait itself.
            while frame is not None and Path(frame.f_code.co_filename).name in _WAITS:
                frame = frame.f_back
            if frame is None:
                return "no longer there"
            return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

        if self._owner is not None:
            thread, name, what = self._owner
            return f"{name} ({what}, {place(thread)})"
        if not self._inside:
            return "nobody, but others wait for the exclusive side"
        return ", ".join(
            f"{name} ({place(thread)})" for thread, (name, _) in sorted(self._inside.items())
        )
