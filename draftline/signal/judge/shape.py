"""The shape of a memory curve: flat, staircase, sawtooth, slope, volatile or unknown.

Thresholds are absolute or relative to the curve's own movement, never to its level, and the tests look
at time, not at readings: an offset or another sample rate gives the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from draftline.signal.duration import duration
from draftline.signal.trace import MIB, Column

# Lazily loaded kernels and library workspaces move a device by a few MiB now and then.
TOLERANCE_BYTES = 8 * MIB
SHAPES = ("flat", "staircase", "sawtooth", "slope", "volatile", "unknown")
_FEWEST_READINGS = 8
_GRID = 65
# Several rises over a longer time are no settling, though memory stands still since.
_LONGEST_SETTLING_S = 900.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`kind` is one of SHAPES. Bytes of the lowest and highest reading and of the last minus the first;
    `rises` counts separate increases and `cycles` falls that were followed by a rise;
    `bytes_per_s` is the fitted slope; `often` is whether it rose at many moments and not at a few;
    `words` say it for a person."""

    kind: str
    words: str
    low_bytes: float = np.nan
    high_bytes: float = np.nan
    net_bytes: float = 0.0
    rises: int = 0
    cycles: int = 0
    bytes_per_s: float = 0.0
    often: bool = False

    @property
    def range_bytes(self) -> float:
        return self.high_bytes - self.low_bytes


def find_shape(
    time_s: Column,
    level: Column,
    windows: list[tuple[float, float]],
    tolerance: float = TOLERANCE_BYTES,
) -> Shape:
    """The shape of `level` (bytes, [n], NaN where unknown) within `windows`.

    What happens between two windows (a pause) is left out: the second window is shifted to begin where
    the first one ended.
    """
    times, values = _rebased(time_s, level, windows)
    if len(times) < _FEWEST_READINGS or times[-1] <= times[0]:
        return Shape("unknown", f"only {len(times)} readings in the steady state")
    low, high = float(values.min()), float(values.max())
    net = float(values[-1] - values[0])
    facts = Shape("unknown", "", low_bytes=low, high_bytes=high, net_bytes=net)
    if high - low <= tolerance:
        return replace(facts, kind="flat", words=_still(high - low, _span(times)))
    legs = _legs(values, max(tolerance, 0.1 * (high - low)))
    ups, downs = sum(x for x in legs if x > 0), -sum(x for x in legs if x < 0)
    grid = _on_grid(times, values)
    if downs <= 0.1 * ups:
        return _rising(times, values, grid, tolerance, facts)
    falling = np.diff(grid) < -(high - low) / (8 * _GRID)
    if ups <= 0.1 * downs and falling.sum() <= 0.1 * _GRID:
        return replace(facts, kind="flat", words=f"one fall by {_mib(-net)}, otherwise still")
    return _swinging(times, grid, legs, tolerance, facts)


def _rising(times: Column, values: Column, grid: Column, tolerance: float, facts: Shape) -> Shape:
    rise = facts.high_bytes - facts.low_bytes
    rising = np.diff(grid) > rise / (8 * _GRID)
    rises = int(rising[0]) + int(np.sum(rising[1:] & ~rising[:-1]))
    late = values[times >= times[0] + (times[-1] - times[0]) / 2]
    last_s = float((np.flatnonzero(rising)[-1] + 1) / (_GRID - 1) * (times[-1] - times[0]))
    if float(np.ptp(late)) <= tolerance and (rises < 3 or last_s <= _LONGEST_SETTLING_S):
        words = f"rose by {_mib(rise)} in the first half of {_span(times)}, still since"
        return replace(facts, kind="flat", words=words, rises=rises)
    slope, fit, off = _line(times, values)
    quarters = np.diff(grid[:: _GRID // 4])
    # A steady growth reaches the device in equal portions: the allocator takes whole segments.
    least, most = _portions(grid, rising)
    portions = rises >= 3 and least >= 0.5 * most and off <= 0.75 * most
    if portions or (fit >= 0.97 and quarters.min() >= 0.1 * quarters.sum()):
        words = f"grows by {_mib(slope)} a second, {_mib(rise)} in {_span(times)}"
        often = rises >= 5 or rising.sum() >= 0.5 * _GRID
        return replace(
            facts, kind="slope", words=words, rises=rises, bytes_per_s=slope, often=bool(often)
        )
    if rises <= 1 and rising.sum() <= 0.1 * _GRID:
        words = f"one rise by {_mib(rise)}, otherwise still"
        return replace(facts, kind="flat", words=words, rises=rises)
    words = (
        f"grew in {counted(rises, 'rise')} by {_mib(rise)} in {_span(times)} and gave nothing back"
    )
    return replace(facts, kind="staircase", words=words, rises=rises, bytes_per_s=slope)


def _swinging(
    times: Column, grid: Column, legs: list[float], tolerance: float, facts: Shape
) -> Shape:
    cycles = sum(x < 0 for x in legs)
    spread = facts.high_bytes - facts.low_bytes
    base = _usual(grid, tolerance)
    at_base = float(np.mean(np.abs(grid - base) <= tolerance))
    below = float(np.mean(grid < base - tolerance))
    if at_base >= 0.6 and (below <= 0.02 or cycles <= 1):
        words = (
            f"still at one level for {100 * at_base:.0f} % of {_span(times)}, with "
            f"{counted(cycles, 'short excursion')} of up to {_mib(spread)}"
        )
        return replace(facts, kind="flat", words=words, cycles=cycles)
    turns = np.cumsum([0.0, *legs])
    down = [i for i, leg in enumerate(legs) if leg < 0]
    floors = turns[[i + 1 for i in down]]
    tops = turns[down]
    words = f"{counted(cycles, 'fall')} of up to {_mib(max(-x for x in legs))} in {_span(times)}, "
    if cycles >= 3 and np.ptp(floors) <= 0.25 * spread and np.ptp(tops) <= 0.25 * spread:
        return replace(
            facts, kind="sawtooth", words=words + "each to about the same floor", cycles=cycles
        )
    return replace(facts, kind="volatile", words=words + "to changing levels", cycles=cycles)


def _rebased(
    time_s: Column, level: Column, windows: list[tuple[float, float]]
) -> tuple[Column, Column]:
    known = np.isfinite(level) & np.isfinite(time_s)
    times, values = time_s[known], level[known]
    parts_t: list[Column] = []
    parts_v: list[Column] = []
    end_t = end_v = 0.0
    for start, stop in windows:
        inside = (times >= start) & (times <= stop)
        if not inside.any():
            continue
        t, v = times[inside], values[inside]
        if parts_t:
            t = t - t[0] + end_t
            v = v - v[0] + end_v
        parts_t.append(t)
        parts_v.append(v)
        end_t, end_v = float(t[-1]), float(v[-1])
    if not parts_t:
        return np.empty(0), np.empty(0)
    return np.concatenate(parts_t), np.concatenate(parts_v)


def _legs(values: Column, threshold: float) -> list[float]:
    """Differences between successive turning points; turns smaller than `threshold` are none."""
    turns = [float(values[0])]
    high = low = turns[0]
    trend = 0
    for value in values.tolist():
        if trend >= 0:
            high = max(high, value)
            if high - value >= threshold:
                turns.append(high)
                trend, low = -1, value
                continue
        if trend <= 0:
            low = min(low, value)
            if value - low >= threshold:
                turns.append(low)
                trend, high = 1, value
    turns.append(high if trend > 0 else low if trend < 0 else float(values[-1]))
    return [b - a for a, b in pairwise(turns)]


def floors(values: Column, threshold: float) -> npt.NDArray[np.intp]:
    """Indices of the lowest reading between any two falls by `threshold` or more."""
    found: list[int] = []
    high, low, falling = 0, 0, False
    for index, value in enumerate(values.tolist()):
        if falling:
            if value < values[low]:
                low = index
            elif value - values[low] >= threshold:
                found.append(low)
                falling, high = False, index
        elif value > values[high]:
            high = index
        elif values[high] - value >= threshold:
            falling, low = True, index
    return np.array(found, np.intp)


def _on_grid(times: Column, values: Column) -> Column:
    """The last reading before each of evenly spaced moments."""
    moments = np.linspace(times[0], times[-1], _GRID)
    held: Column = values[np.searchsorted(times, moments, side="right") - 1]
    return held


def _usual(grid: Column, tolerance: float) -> float:
    """The level near which the curve is for the longest time."""
    near = np.abs(grid[:, None] - grid[None, :]) <= tolerance
    return float(grid[int(np.argmax(near.sum(axis=1)))])


def _portions(grid: Column, rising: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """The smallest and the largest separate rise."""
    starts = np.flatnonzero(rising & ~np.r_[False, rising[:-1]])
    stops = np.flatnonzero(rising & ~np.r_[rising[1:], False]) + 1
    sizes = grid[stops] - grid[starts]
    return float(sizes.min(initial=np.inf)), float(sizes.max(initial=0.0))


def _line(times: Column, values: Column) -> tuple[float, float, float]:
    """Of the best line: slope a second, squared correlation, largest distance from it."""
    t, v = times - times.mean(), values - values.mean()
    slope = float(t @ v / (t @ t))
    rest = v - slope * t
    total = float(v @ v)
    return slope, 1.0 - float(rest @ rest) / total if total else 0.0, float(np.abs(rest).max())


def _still(moved: float, span: str) -> str:
    return f"moved by at most {_mib(moved)} in {span}" if moved else f"did not change for {span}"


def counted(number: float, noun: str) -> str:
    """`1 retry`, `2 retries`."""
    many = noun[:-1] + "ies" if noun[-2:] == "ry" else noun + "s"
    return f"{number:,.0f} {noun if round(number) == 1 else many}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB" if abs(size) >= MIB else f"{size / MIB:.2f} MiB"


def _span(times: Column) -> str:
    return duration(float(times[-1] - times[0]))
