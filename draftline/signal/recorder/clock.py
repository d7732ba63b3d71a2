"""Unix time that nobody sets back or forward while the process runs."""

from __future__ import annotations

import time

_STARTED_S = time.time() - time.monotonic()
# A clock that is set moves by more; the time between two readings of the clocks is less.
_LEAST_STEP_S = 0.01


def now_s() -> float:
    """Unix seconds: the wall clock's when the process began to look, and what passed since then."""
    return _STARTED_S + time.monotonic()


def steady_s(wall_s: float) -> float:
    """The time on this clock of a moment that the wall clock, as it is set now, calls `wall_s`."""
    set_by_s = time.time() - now_s()
    return wall_s if abs(set_by_s) < _LEAST_STEP_S else wall_s - set_by_s
