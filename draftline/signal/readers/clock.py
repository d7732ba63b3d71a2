"""Times of a recording: stamps in the forms that loggers write, and series that rise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from draftline.signal.trace import Column

DAY_S = 86400.0
# Above this a number counts milliseconds, microseconds or nanoseconds since 1970.
_SECONDS_END = 1e11
_STAMP_WITHIN = 300
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_CLOCK = r"(\d{1,2}):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
_DATED = re.compile(
    rf"(\d{{4}})([-/]?)(\d\d)\2(\d\d)[T ]\s*{_CLOCK}\s*(Z|UTC|GMT|[+-]\d\d:?(?:\d\d)?)?(?![\w:])"
)
# As date(1), ctime(3) and nvidia-smi write it: month and day in either order, the year at an end.
_WORDED = re.compile(
    rf"(?:(\d{{1,2}})\s+)?(?<![A-Za-z])([A-Za-z]{{3}})[a-z]*\s+(?:(\d{{1,2}})\s+)?(?:(\d{{4}})\s+)?{_CLOCK}"
    r"(?:\s+([AP]M))?(?:\s+([A-Z]{3,5}|[+-]\d\d(?::?\d\d)?))?(?:\s+(\d{4}))?"
)
# The form of nvidia-smi's queries, of which there may be millions.
_QUERIED = re.compile(
    r"(\d{4}/\d\d/\d\d [01]\d:[0-5]\d|\d{4}/\d\d/\d\d 2[0-3]:[0-5]\d):([0-5]\d\.\d{3})"
)
_DAYTIME = re.compile(_CLOCK)
_EPOCH = re.compile(r"1\d{9}(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Seconds since 1970 as if the clock ran in UTC; `zoned` where the text says that it does, or
    how far from it."""

    seconds: float
    zoned: bool


def read_stamp(text: str) -> Stamp | None:
    """The first moment named in `text`, None where there is none."""
    text = text[:_STAMP_WITHIN]  # a search takes the square of the length at worst
    if (m := _QUERIED.fullmatch(text)) is not None and (start := _minute(m[1])) is not None:
        return Stamp(start + float(m[2]), False)
    if (m := _EPOCH.fullmatch(text)) is not None:
        return Stamp(float(text), True)
    if (m := _DATED.search(text)) is not None:
        year, _, month, day, hour, minute, second, zone = m.groups()
        return _stamp(year, int(month), day, (hour, minute, second), zone)
    if (m := _WORDED.search(text)) is not None:
        before, word, after, early, hour, minute, second, half, zone, late = m.groups()
        day, year = before or after, early or late
        number = _MONTHS.get(word.lower())
        if number is None or day is None or year is None:
            return None
        if half is not None:
            hour = str(int(hour) % 12 + (12 if half == "PM" else 0))
        return _stamp(year, number, day, (hour, minute, second), zone)
    return None


def read_daytime(text: str) -> float | None:
    """Seconds since midnight of a bare HH:MM:SS."""
    m = _DAYTIME.fullmatch(text)
    return None if m is None else _daytime(m[1], m[2], m[3])


def read_epoch(value: float) -> float:
    """Seconds since 1970 of a number that may count milli-, micro- or nanoseconds instead."""
    while value >= _SECONDS_END and np.isfinite(value):
        value /= 1000
    return value


def _daytime(hour: str, minute: str, second: str) -> float | None:
    seconds = float(second.replace(",", "."))
    if int(hour) > 23 or int(minute) > 59 or seconds >= 61:
        return None
    return int(hour) * 3600 + int(minute) * 60 + seconds


def _stamp(
    year: str, month: int, day: str, clock: tuple[str, str, str], zone: str | None
) -> Stamp | None:
    start, seconds = _day(int(year), month, int(day)), _daytime(*clock)
    if start is None or seconds is None:
        return None
    shift = _zone_s(zone)
    return Stamp(start + seconds - (shift or 0.0), shift is not None)


@lru_cache(maxsize=64)
def _minute(text: str) -> float | None:
    day = _day(int(text[:4]), int(text[5:7]), int(text[8:10]))
    return None if day is None else day + int(text[11:13]) * 3600 + int(text[14:16]) * 60


@lru_cache(maxsize=64)
def _day(year: int, month: int, day: int) -> float | None:
    try:
        return (date(year, month, day) - date(1970, 1, 1)).days * DAY_S
    except ValueError:
        return None


def _zone_s(zone: str | None) -> float | None:
    """Seconds ahead of UTC; None where the zone is missing or a name that many places share."""
    if zone in ("Z", "UTC", "GMT"):
        return 0.0
    if zone is None or zone[0] not in "+-":
        return None
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:] or 0) * 60
    return float(-seconds if zone[0] == "-" else seconds)


@dataclass(frozen=True, slots=True)
class Straight:
    """`order` [n] puts rows in the order of time, `time_s` [n] their times in that order; `stepped_s`
    the steps back of the clock that were mended, `moved` how many rows were out of order."""

    order: npt.NDArray[np.intp]
    time_s: Column
    stepped_s: tuple[float, ...] = ()
    moved: int = 0


# More falls than this are no clock that was set: the rows are shuffled.
_MOST_STEPS = 20


def straighten(time_s: Column, values: Column) -> Straight:
    """Rows in the order in which they happened; finite times and what tells rows apart, [n], in the
    order of the file.

    A fall of the clock is one of three things. Where the rows after it stood in the file already, or
    fill a hole that the rows before left, they were repeated or written out of order and are put
    there; else the clock was set back, and what follows is moved to after what came before.
    """
    if len(time_s) < 2:
        return Straight(np.arange(len(time_s)), time_s)
    falls: list[int] = (np.flatnonzero(np.diff(time_s) < 0) + 1).tolist()
    times, stepped = time_s.copy(), []
    if 0 < len(falls) <= _MOST_STEPS:
        period = median_period(time_s)
        for start, end in zip(falls, [*falls[1:], len(times)], strict=True):
            last = times[:start].max()
            if (
                times[start] < last
                and not _repeats(times, values, start, end)
                and not _fills_hole(times[:start], times[start:end], period)
            ):
                shift = last + period - times[start]
                stepped.append(float(shift))
                times[start:] += shift
    order = np.argsort(times, kind="stable")
    moved = int(np.count_nonzero(np.diff(order) < 0)) and int(
        np.count_nonzero(order != np.arange(len(order)))
    )
    return Straight(order, times[order], tuple(stepped), moved)


def _repeats(times: Column, values: Column, start: int, end: int) -> bool:
    """Whether rows from `start` on, up to the latest time before it, stood in the file already."""
    order = np.argsort(times[:start], kind="stable")
    before = times[:start][order]
    own = times[start:end]
    own = own[: np.searchsorted(own, before[-1], side="right")]
    at = np.minimum(np.searchsorted(before, own), start - 1)
    same = (before[at] == own) & (
        (values[order][at] == values[start : start + len(own)]) | np.isnan(values[order][at])
    )
    return bool(same.mean() > 0.9)


def _fills_hole(before: Column, after: Column, period: float) -> bool:
    """Whether rows `after` a fall belong among, or directly in front of, those `before` it."""
    own = after[after <= before.max()]
    low, high = own[0], own[-1]
    inside = before[(before > low) & (before < high)]
    if len(inside) * 2 >= len(own):
        return False
    lower, upper = before[before <= low], before[before >= high]
    gaps = [low - lower.max()] if len(lower) else []
    gaps += [upper.min() - high] if len(upper) else []
    return bool(min(gaps) <= 5 * period)


def median_period(time_s: Column) -> float:
    """The usual time between rows; 1 s where nothing tells."""
    between = np.diff(time_s)
    rising = between[between > 0]
    return float(np.median(rising)) if len(rising) else 1.0


def spread(time_s: Column) -> Column:
    """Sorted times made to rise: rows of one stamp share the time up to the next one evenly."""
    if len(time_s) < 2 or (np.diff(time_s) > 0).all():
        return time_s
    distinct, first, count = np.unique(time_s, return_index=True, return_counts=True)
    usual = median_period(distinct)
    until = np.append(np.minimum(np.diff(distinct), usual), usual)
    place = np.arange(len(time_s)) - np.repeat(first, count)
    times = time_s + place * np.repeat(until / count, count)
    if not (
        np.diff(times) > 0
    ).all():  # too many for the precision of a float: order is all there is
        least = np.arange(len(times)) * 4 * np.spacing(times[-1])
        times = np.maximum.accumulate(times - least) + least
    return np.asarray(times, dtype=np.float64)
