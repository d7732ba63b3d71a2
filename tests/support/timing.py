"""Time in tests: a clock that is moved by hand, and waiting for another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 30.0


class Clock:
    """A clock that stands still until the test moves `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def until(happened: Callable[[], bool]) -> None:
    """Waits for another thread's work, however long it takes; only a hang fails."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.001)
