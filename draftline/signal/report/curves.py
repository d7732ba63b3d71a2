"""Curves of a report's charts as plotly has them, few enough to be drawn.

Every text that comes from the run is escaped: plotly reads a little HTML in labels.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.signal.report.run_facts import RunFacts
from draftline.signal.trace import Column, one_line

MOST_POINTS = 4000
_YEAR_1973_S = 1e8  # no recording that counts from its own start is so long
# Each stands out from a white page and from a dark one.
_COLOURS = {
    "blue": "#3579d8",
    "orange": "#cf6a17",
    "green": "#109069",
    "purple": "#9a5fd9",
    "pink": "#cc4a86",
}


@dataclass(frozen=True, slots=True)
class Clock:
    """Turns moments into time since `start_s`, in units of `unit_s` seconds; `dated` where moments are
    seconds since 1970."""

    start_s: float
    unit_s: float
    unit: str
    dated: bool

    def elapsed(self, time_s: Column) -> Column:
        return (time_s - self.start_s) / self.unit_s


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: traces, vertical axis (its title a text) and shapes behind the traces, on the axes "x" and
    "y". `close_up` is the range of the vertical axis in which the steady state fills it, and
    `starts_close` whether the page shows that first."""

    title: str
    caption: str
    data: Sequence[dict[str, Any]]
    axis: dict[str, Any]
    shapes: Sequence[dict[str, Any]] = field(default_factory=tuple)
    close_up: tuple[float, float] | None = None
    starts_close: bool = False


def extent(run: RunFacts) -> tuple[float, float, bool] | None:
    """The first and last moment known of the run, and whether they are seconds since 1970."""
    trace, metrics = run.trace, run.metrics
    ends = [(float(s.time_s[0]), float(s.time_s[-1])) for s in trace.samples if len(s.time_s)]
    for steps in trace.steps:
        if len(steps.time_s):
            # A step's moment is its end.
            took_s = np.nan_to_num(steps.wall_ms[0] / 1000)
            ends.append((float(steps.time_s[0] - took_s), float(steps.time_s[-1])))
    if trace.events:
        first_s, last_s = trace.events[0].time_s, trace.events[-1].time_s
        # Events alone give way to the training's own clock, where that is another one.
        if ends or metrics is None or metrics.dated == (first_s > _YEAR_1973_S):
            ends.append((first_s, last_s))
    dated = any(first > _YEAR_1973_S for first, _ in ends)
    if metrics is not None and (metrics.dated == dated or not ends):
        dated = metrics.dated
        ends.append((float(metrics.time_s[0]), float(metrics.time_s[-1])))
    if not ends:
        return None
    return min(first for first, _ in ends), max(last for _, last in ends), dated


def clock_of(run: RunFacts) -> Clock:
    """A clock that starts with the first thing known of the run, in a unit that fits its length."""
    first, last, dated = extent(run) or (0.0, 0.0, False)
    span = last - first
    unit_s, unit = (1.0, "s") if span < 300 else (60.0, "min") if span < 5 * 3600 else (3600.0, "h")
    return Clock(first, unit_s, unit, dated)


def thin(values: Column, most: int = MOST_POINTS) -> npt.NDArray[np.intp]:
    """Indices of at most `most` points that keep the first, the last, and the lowest and highest of every
    stretch; a gap (NaN) stays a gap."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    gaps = np.isnan(values)
    # The ends may come on top of a stretch's own points.
    stretches = (most - 2) // (3 if gaps.any() else 2)
    kept = [0, count - 1]
    for stretch in np.array_split(np.arange(count), stretches):
        known = stretch[~gaps[stretch]]
        if len(known):
            kept += [known[values[known].argmin()], known[values[known].argmax()]]
        kept += stretch[gaps[stretch]][:1].tolist()
    return np.unique(kept)


def _broken(time_s: Column, columns: Sequence[Column]) -> tuple[Column, list[Column]]:
    """The curves with a gap where nothing was recorded for far longer than usual."""
    whole = [np.asarray(column, float) for column in columns]
    if len(time_s) < 3:
        return time_s, whole
    apart = np.diff(time_s)
    holes = np.flatnonzero(apart > max(20 * float(np.median(apart)), 30.0)) + 1
    middle = (time_s[holes - 1] + time_s[holes]) / 2
    return np.insert(time_s, holes, middle), [np.insert(c, holes, np.nan) for c in whole]


def numbers(values: Column, digits: int) -> list[float | None]:
    """Rounded, with None for what is not known, as JSON has it."""
    return [None if v != v else v for v in np.round(values, digits).tolist()]


def curve(
    clock: Clock,
    time_s: Column,
    values: Column,
    *,
    name: str,
    colour: str = "blue",
    unit: str = "",
    step: Column | None = None,
    by: Column | None = None,
    **line: Any,
) -> dict[str, Any]:
    """A line of at most MOST_POINTS points, those that matter for `by` (itself, if None): the parts of
    a stack need the same moments. `step` numbers the points for whoever points at them."""
    at, (shown, chosen, *numbered) = _broken(
        time_s, [values, values if by is None else by, *([] if step is None else [step])]
    )
    kept = thin(chosen)
    drawn: dict[str, Any] = {
        "mode": "lines",
        "name": name,
        "x": numbers(clock.elapsed(at[kept]), 4),
        "y": numbers(shown[kept], 5),
        "line": {"color": _COLOURS[colour], **line},
        "hovertemplate": f"%{{y:,.4~g}}{unit and ' ' + unit}",
    }
    if numbered:
        drawn["customdata"] = numbers(numbered[0][kept], 0)
        drawn["hovertemplate"] += " (step %{customdata})"
    return drawn


def said_thinned(*columns: Column) -> str:
    """What a caption says of curves that are not drawn whole; empty where all are."""
    longest = max((len(column) for column in columns), default=0)
    if longest <= MOST_POINTS:
        return ""
    return (
        f" {longest:,} readings are drawn with {MOST_POINTS:,} points that keep the lowest and the "
        "highest of every stretch."
    )


def label(text: str, most: int = 200) -> str:
    """Text of the run for a label: wrapped, escaped, one line where it was many."""
    pieces = textwrap.wrap(one_line(text, most), 60)
    return "<br>".join(html.escape(piece, quote=False) for piece in pieces)
