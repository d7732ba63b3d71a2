"""A report's charts of memory, one per device: its curves, its phases as bands, its events as marks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.phases import Phase
from draftline.signal.judge.verdict import DeviceVerdict
from draftline.signal.report.curves import Chart, Clock, curve, label, numbers, said_thinned
from draftline.signal.report.run_facts import RunFacts, steady_readings
from draftline.signal.trace import GIB, Column, Event, device_name
from draftline.signal.words import RECORDED, event_title

MOST_BANDS = 120
MOST_MARKS = 400
_GREY = "#808c98"
_MARKS_AT = 0.85
_LEAST_CLOSE_GIB = 64 / 1024  # a close-up shows at least so much, or noise would fill it
_FULL_FROM = 0.5  # the device's size is drawn where it is used up to this share
_LABELLED_SHARE = 0.07  # a phase narrower than this share of the chart has no room for its name
_BANDS = {
    "load": "rgba(110, 122, 135, 0.16)",
    "warm": "rgba(222, 160, 20, 0.17)",
    "run": "rgba(31, 150, 90, 0.07)",
    "evaluate": "rgba(70, 105, 225, 0.16)",
    "checkpoint": "rgba(150, 80, 200, 0.18)",
}
_OTHER_BAND = "rgba(110, 122, 135, 0.07)"
# What the curves mean, of the device and of the counters of steps.
WHOLE, OTHERS = "whole device", "other programs"
_LEVELS: dict[str, dict[str, Any]] = {
    "reserved_bytes": {"name": "held by PyTorch", "colour": "orange", "shape": "hv"},
    "allocated_bytes": {"name": "tensors", "colour": "green"},
    "peak_bytes": {"name": "peak of a step", "colour": "purple", "dash": "dot"},
}
IN_WORDS = {
    WHOLE: "all that is on it, as nvidia-smi shows it",
    OTHERS: "processes on the device that are not the recorded one",
    "held by PyTorch": "what its allocator has taken from the device (reserved)",
    "tensors": "what is in use between two steps (allocated)",
    "peak of a step": "the most that was in use while it ran",
}


def memory_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """One chart per device whose memory is known."""
    pairs = zip(run.verdict.devices, gather(run.trace), strict=True)
    charts = [_memory_chart(verdict, seen, clock) for verdict, seen in pairs]
    return [chart for chart in charts if chart is not None]


def _memory_chart(verdict: DeviceVerdict, seen: Evidence, clock: Clock) -> Chart | None:
    data = _curves(seen, clock)
    if not data:
        return None
    _name_phases(data[0], verdict.phases, clock)
    highest = max(max((y for y in line["y"] if y is not None), default=0.0) for line in data)
    span = max(line["x"][-1] for line in data) - min(line["x"][0] for line in data)
    shapes = bands(verdict.phases, clock, span)
    caption = []
    if len(verdict.phases) > MOST_BANDS:
        caption.append(f"Bands: the longest {MOST_BANDS} of {len(verdict.phases)} phases.")
    total = None if seen.samples is None else seen.samples.total_bytes
    if total is not None and highest >= _FULL_FROM * total / GIB:
        size = total / GIB
        edge = {"color": _GREY, "width": 1, "dash": "dot"}
        ends = {"x0": 0, "x1": 1, "y0": size, "y1": size}
        shapes.append({"type": "line", "xref": "x domain", "yref": "y", **ends, "line": edge})
        caption.append(f"The dotted line is the size of the device, {size:.1f} GiB.")
        highest = max(highest, size)
    elif total is not None:
        caption.append(f"The device has {total / GIB:.1f} GiB.")
    events = [e for e in seen.trace.events if e.device in (None, verdict.device)]
    marks = event_marks(events, clock)
    if any(len(mark["x"]) < sum(e.kind == kind for e in events) for kind, mark in marks.items()):
        caption.append(f"Of frequent events at most {MOST_MARKS} are marked.")
    close = _close_up(seen)
    moves = verdict.shape not in ("flat", "idle", "unknown")
    columns = [part.time_s for part in (seen.samples, seen.steps) if part is not None]
    return Chart(
        title=f"Memory of {device_name(verdict.device)}",
        caption=" ".join(caption) + said_thinned(*columns),
        data=[*data, *marks.values()],
        axis={"title": "GiB", "range": [0, max(highest * 1.25, 0.01)]},
        shapes=shapes,
        close_up=close,
        starts_close=close is not None and moves and close[1] - close[0] < 0.2 * highest,
    )


def _curves(seen: Evidence, clock: Clock) -> list[dict[str, Any]]:
    """The device's memory and the step's levels, those that are known, in GiB."""
    draw, data = partial(curve, clock, unit="GiB"), []
    samples, steps = seen.samples, seen.steps
    if samples is not None and np.isfinite(samples.used_bytes).any():
        data.append(draw(samples.time_s, samples.used_bytes / GIB, name=WHOLE))
        if (others := _others(seen)) is not None:
            data.append(draw(samples.time_s, others / GIB, name=OTHERS, colour="pink", dash="dash"))
    for key, line in _LEVELS.items():
        if steps is not None and (column := steps.known(key)) is not None:
            data.append(draw(steps.time_s, column / GIB, **line))
    return data


def bands(phases: Sequence[Phase], clock: Clock, span: float) -> list[dict[str, Any]]:
    """The longest phases as shapes behind curves that are `span` wide, each with its name where there is
    room; the first of each name stands in the legend."""
    shown = sorted(phases, key=lambda p: -p.seconds)[:MOST_BANDS]
    shapes: list[dict[str, Any]] = []
    named = set()
    for phase in sorted(shown, key=lambda p: p.from_s):
        left, right = numbers(clock.elapsed(np.array([phase.from_s, phase.to_s])), 4)
        name = label(phase.name, 24)
        band: dict[str, Any] = {
            "type": "rect",
            "layer": "below",
            "fillcolor": _BANDS.get(phase.name, _OTHER_BAND),
            "line": {"width": 1, "color": "rgba(110, 122, 135, 0.28)"},
        }
        band |= {"xref": "x", "yref": "y domain", "x0": left, "x1": right, "y0": 0, "y1": 1}
        band |= {"name": name, "legendgroup": name, "showlegend": name not in named}
        named.add(name)
        if phase.seconds / clock.unit_s >= _LABELLED_SHARE * span:
            band["label"] = {"text": name, "textposition": "top center", "font": {"size": 11}}
        shapes.append(band)
    return shapes


def event_marks(events: Sequence[Event], clock: Clock) -> dict[str, dict[str, Any]]:
    """Events as marks along the top of a chart, by kind, one kind of mark for each."""
    marks = {}
    for symbol, kind in enumerate(RECORDED):
        words = event_title(kind)
        of_kind = [event for event in events if event.kind == kind]
        if not of_kind:
            continue
        shown = of_kind[:: -(-len(of_kind) // MOST_MARKS)]
        marks[kind] = {
            "mode": "markers",
            "name": f"{words} ({len(of_kind)})" if len(of_kind) > 1 else words,
            "x": numbers(clock.elapsed(np.array([e.time_s for e in shown])), 4),
            "y": [_MARKS_AT] * len(shown),
            "text": [label(e.text) or words for e in shown],
            "hovertemplate": "%{text}",
            "marker": {"symbol": symbol, "size": 9, "color": _GREY},
        }
    return marks


def _name_phases(line: dict[str, Any], phases: Sequence[Phase], clock: Clock) -> None:
    """Has whoever points at the curve read which phase the moment belongs to."""
    if not phases:
        return
    starts = clock.elapsed(np.array([phase.from_s for phase in phases]))
    place = np.searchsorted(starts, np.array(line["x"], float), side="right") - 1
    names = [label(phase.name, 24) for phase in phases]
    line["customdata"] = [names[at] if at >= 0 else "" for at in place.tolist()]
    line["hovertemplate"] += " (%{customdata})"


def _others(seen: Evidence) -> Column | None:
    """Bytes of processes that are not the recorded program, None where that cannot be told."""
    pids = {} if seen.samples is None else seen.samples.by_process
    own = seen.program.pid
    rest = [column for pid, column in pids.items() if pid != own]
    if own is None or own not in pids or not rest:
        return None
    return np.asarray(np.nansum(np.vstack(rest), axis=0), float)


def _close_up(seen: Evidence) -> tuple[float, float] | None:
    """A vertical range in which the movement of the steady state can be seen; None where the steady
    state is unknown."""
    readings = steady_readings(seen)
    held = [readings[name] for name in ("device", "reserved") if name in readings]
    if not held:
        return None
    low, high = min(float(c.min()) for c in held) / GIB, max(float(c.max()) for c in held) / GIB
    margin = max((high - low) * 0.15, (_LEAST_CLOSE_GIB - (high - low)) / 2)
    return round(max(0.0, low - margin), 4), round(high + margin, 4)
