"""The shape of a memory curve: flat, staircase, sawtooth, slope, volatile or unknown.

Thresholds are absolute or relative to the curve's own movement, never to its level, and the tests look
at time, not at readings: an offset or another sample rate gives the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from draftline.signal.trace import MIB, Column
from draftline.signal.words import duration

# Lazily loaded kernels and library workspaces move a device by a few MiB now and then.
TOLERANCE_BYTES = 8 * MIB
SHAPES = ("flat", "staircase", "sawtooth", "slope", "volatile", "idle", "unknown")
# The context that CUDA gives every process on a device is larger, of whatever version.
IDLE_BYTES = 64 * MIB
# Of a trend under noise: how many parts of the curve are compared, how many pairs of them must agree, and
# what share of the growth each half must have at least.
_BLOCKS = 16
_AGREE = 0.6
_HALF_SHARE = 0.25
_LEAST_OF_SWING = 0.1
_LEAST_IN_BLOCK = 4
_OUTLIERS = 0.02  # of the readings, at each end
_FEWEST_READINGS = 8
_GRID = 65
_IS_LINE = 0.97  # share of a curve's variance that its best line explains
# Several rises over a longer time are no settling, though memory stands still since.
_LONGEST_SETTLING_S = 900.0


@dataclass(frozen=True, slots=True)
class Shape:
    """`kind` is one of SHAPES. Bytes of the lowest and highest reading and of the last minus the first;
    `rises` counts separate increases and `cycles` falls that were followed by a rise;
    `bytes_per_s` is the fitted slope; `often` is whether it rose at many moments and not at a few;
    `noisy` whether it swings besides;
    `words` say it for a person, and `level` how much there is ("at 8,598 MiB"), "" where unknown."""

    kind: str
    words: str
    level: str = ""
    low_bytes: float = np.nan
    high_bytes: float = np.nan
    net_bytes: float = 0.0
    rises: int = 0
    cycles: int = 0
    bytes_per_s: float = 0.0
    often: bool = False
    noisy: bool = False

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
    shape = _of_curve(times, values, tolerance, facts)
    return replace(shape, level=_level(shape.kind, _inside(time_s, level, windows), tolerance))


def _of_curve(times: Column, values: Column, tolerance: float, facts: Shape) -> Shape:
    low, high, net = facts.low_bytes, facts.high_bytes, facts.net_bytes
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
    return _swinging(times, values, grid, legs, tolerance, facts)


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
    if portions or (fit >= _IS_LINE and quarters.min() >= 0.1 * quarters.sum()):
        words = f"grows by {_rate(slope)}, {_mib(rise)} in {_span(times)}"
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
    times: Column,
    values: Column,
    grid: Column,
    legs: list[float],
    tolerance: float,
    facts: Shape,
) -> Shape:
    cycles = sum(x < 0 for x in legs)
    spread = facts.high_bytes - facts.low_bytes
    growth = trend(times, values)
    swing = float(np.ptp(_without_outliers(values)))
    if growth is not None and growth > max(tolerance, _LEAST_OF_SWING * swing):
        slope = growth / float(times[-1] - times[0])
        words = (
            f"grows by {_rate(slope)}, {_mib(growth)} in {_span(times)}, under swings of "
            f"{_mib(max(spread - growth, 0.0))}"
        )
        return replace(
            facts,
            kind="slope",
            words=words,
            net_bytes=growth,
            bytes_per_s=slope,
            often=True,
            noisy=True,
        )
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


def trend(times: Column, values: Column) -> float | None:
    """Bytes by which a swinging curve grows from its start to its end, None where it does not.

    The medians of equal stretches of time are compared in pairs (Mann and Kendall's test), and the
    growth is the median of the slopes between them (Theil and Sen). Both halves must grow: what has
    settled, or walks at random, is no trend.
    """
    edges = np.linspace(times[0], times[-1], _BLOCKS + 1)
    part = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, _BLOCKS - 1)
    counts = np.bincount(part, minlength=_BLOCKS)
    if counts.min() < _LEAST_IN_BLOCK:
        return None
    middle = np.array([np.median(values[part == n]) for n in range(_BLOCKS)])
    first, second = np.triu_indices(_BLOCKS, 1)
    apart = middle[second] - middle[first]
    half = _BLOCKS // 2
    growth = float(np.median(apart / (second - first))) * _BLOCKS
    halves = (
        float(np.median(middle[half - 2 : half + 2]) - np.median(middle[:2])),
        float(np.median(middle[-2:]) - np.median(middle[half - 2 : half + 2])),
    )
    steady = min(halves) >= _HALF_SHARE * growth
    # Noise of this size leaves so much between the medians of two stretches.
    rest = values - np.polyval(np.polyfit(times - times[0], values, 1), times - times[0])
    error = 1.25 * float(np.std(_without_outliers(rest))) / float(np.sqrt(counts.min()))
    agree = float(np.sign(apart).sum()) / len(apart)
    return growth if growth > 4 * error and steady and agree >= _AGREE else None


def _without_outliers(values: Column) -> Column:
    """With the few highest and lowest brought in: they would hide a trend that medians show."""
    clipped: Column = np.clip(values, *np.quantile(values, (_OUTLIERS, 1 - _OUTLIERS)))
    return clipped


def _level(kind: str, values: Column, tolerance: float) -> str:
    """How much there is, of the readings as they are."""
    first, last = float(values[0]), float(values[-1])
    low, high = float(values.min()), float(values.max())
    if kind in ("flat", "idle", "unknown"):
        usual = float(np.median(values[-max(1, len(values) // 4) :]))
        return f"at {_mib(usual)}"
    if kind in ("slope", "staircase") and last - first > tolerance:
        return f"from {_mib(first)} to {_mib(last)}"
    return f"between {_mib(low)} and {_mib(high)}"


def level_of(values: Column) -> str:
    """How much the last of the readings is, "" where there is none."""
    known = values[np.isfinite(values)]
    return f"at {_mib(float(known[-1]))}" if len(known) else ""


def _inside(time_s: Column, level: Column, windows: list[tuple[float, float]]) -> Column:
    held = np.zeros(len(time_s), bool)
    for start, stop in windows:
        held |= (time_s >= start) & (time_s <= stop)
    found: Column = level[held & np.isfinite(level)]
    return found


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
    """Of the best line: slope per second, squared correlation, largest distance from it."""
    t, v = times - times.mean(), values - values.mean()
    slope = float(t @ v / (t @ t))
    rest = v - slope * t
    total = float(v @ v)
    return slope, 1.0 - float(rest @ rest) / total if total else 0.0, float(np.abs(rest).max())


def is_line(times: Column, values: Column) -> bool:
    """Whether the curve rises in one line from its first reading to its last."""
    if len(times) < _FEWEST_READINGS or float(np.ptp(values)) <= TOLERANCE_BYTES:
        return False
    slope, fit, _ = _line(times, values)
    return slope > 0 and fit >= _IS_LINE


def _still(moved: float, span: str) -> str:
    return f"moved by at most {_mib(moved)} in {span}" if moved else f"did not change for {span}"


def counted(number: float, noun: str) -> str:
    """`1 retry`, `2 retries`."""
    many = noun[:-1] + "ies" if noun[-2:] == "ry" else noun + "s"
    return f"{number:,.0f} {noun if round(number) == 1 else many}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB" if abs(size) >= MIB else f"{size / MIB:.2f} MiB"


def _rate(slope: float) -> str:
    return f"{_mib(slope)} per second"


def _span(times: Column) -> str:
    return duration(float(times[-1] - times[0]))
