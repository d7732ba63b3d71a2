"""Pauses that a program did not mark: what they do to its steps, and the stretches between them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftline.signal.judge.phases import SETTLING_STEPS
from draftline.signal.trace import Steps

# A step this much longer than the usual one had something else in it: an unmarked pause, if there are
# few of them and they come regularly. A single one must be longer.
_PAUSE_TIMES = 3.0
_PAUSE_S = 0.05
_PAUSE_SHARE = 0.05
_LULL_TIMES = 8.0
_LULL_S = 0.25


def find_breaks(steps: Steps) -> npt.NDArray[np.bool_]:
    """Which steps [n] had a pause in them: much longer than the usual step without a compile, a capture
    or a retry, rare, and at about equal distances."""
    if len(steps.time_s) < 3:
        return np.zeros(len(steps.time_s), bool)
    # A long recording has only some of its steps.
    apart = np.maximum(np.diff(steps.number, prepend=np.nan), 1.0)
    length = np.nan_to_num(np.diff(steps.time_s, prepend=np.nan) / apart, nan=0.0)
    usual = float(np.median(length[1:]))
    long = (length > _PAUSE_TIMES * usual) & (length > usual + _PAUSE_S)
    for name in ("compiles", "frames", "recompiles", "captures", "retries"):
        column = steps.known(name)
        if column is not None:
            long[1:] &= ~(np.diff(column) > 0)
    if come_regularly(long) and long.sum() <= max(2.0, _PAUSE_SHARE * len(long)):
        return long
    found: npt.NDArray[np.bool_] = long & (length > max(_LULL_TIMES * usual, _LULL_S))
    return found


def come_regularly(breaks: npt.NDArray[np.bool_]) -> bool:
    """Whether there are at least two, at about equal distances."""
    apart = np.diff(np.flatnonzero(breaks))
    return len(apart) >= 1 and float(np.ptp(apart)) <= 0.5 * float(np.median(apart))


def split_at(
    windows: list[tuple[float, float]], steps: Steps, breaks: npt.NDArray[np.bool_]
) -> list[tuple[float, float]]:
    """The windows without the steps that had a pause in them and the first ones after."""
    times = steps.time_s
    for index in np.flatnonzero(breaks).tolist():
        before = float(times[index - 1])
        after = float(times[min(index + SETTLING_STEPS, len(times) - 1)])
        parts = []
        for start, stop in windows:
            inside = start < before < stop
            parts += [(start, before), (after, stop)] if inside else [(start, stop)]
        windows = [(start, stop) for start, stop in parts if stop > start]
    return windows
