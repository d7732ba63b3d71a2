"""A report's charts of memory, one for each device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.phases import Phase
from draftline.signal.judge.verdict import DeviceVerdict
from draftline.signal.report.report_curves import (
    Chart,
    Clock,
    curve,
    escape,
    said_thinned,
)
from draftline.signal.report.report_marks import MOST_BANDS, MOST_MARKS, event_marks, memory_layout
from draftline.signal.report.run_facts import RunFacts, steady_readings
from draftline.signal.trace import GIB, Column, device_name

_LEAST_CLOSE_GIB = 64 / 1024  # a close-up shows at least so much, or noise would fill it
_FULL_FROM = 0.5  # the device's size is drawn where it is used up to this share


def memory_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """One chart for each device whose memory is known."""
    pairs = zip(run.verdict.devices, gather(run.trace), strict=True)
    charts = [_memory_chart(verdict, seen, clock) for verdict, seen in pairs]
    return [chart for chart in charts if chart is not None]


def _memory_chart(verdict: DeviceVerdict, seen: Evidence, clock: Clock) -> Chart | None:
    data, caption, columns = [], [], []
    samples, steps = seen.samples, seen.steps
    total = None if samples is None else samples.total_bytes
    if samples is not None and np.isfinite(samples.used_bytes).any():
        data.append(
            curve(
                clock,
                samples.time_s,
                samples.used_bytes / GIB,
                name="whole device",
                colour="--series-1",
                unit="GiB",
            )
        )
        columns.append(samples.time_s)
        if (others := _others(seen)) is not None:
            data.append(
                curve(
                    clock,
                    samples.time_s,
                    others / GIB,
                    name="other programs",
                    colour="--series-5",
                    unit="GiB",
                    dash="dash",
                )
            )
    for name, label, colour, dash in _LEVELS:
        column = None if steps is None else steps.known(name)
        if steps is not None and column is not None:
            data.append(
                curve(
                    clock,
                    steps.time_s,
                    column / GIB,
                    name=label,
                    colour=colour,
                    unit="GiB",
                    dash=dash,
                    shape="hv" if name == "reserved_bytes" else "linear",
                )
            )
            columns.append(steps.time_s)
    if not data:
        return None
    _name_phases(data[0], verdict.phases, clock)
    highest = max(max((y for y in d["y"] if y is not None), default=0.0) for d in data)
    ends = [d["x"] for d in data]
    span = (min(x[0] for x in ends), max(x[-1] for x in ends))
    layout = memory_layout(verdict.phases, clock, span)
    if len(verdict.phases) > MOST_BANDS:
        caption.append(f"Bands: the longest {MOST_BANDS} of {len(verdict.phases)} phases.")
    if total is not None and highest >= _FULL_FROM * total / GIB:
        layout["shapes"].append(_limit(total / GIB))
        caption.append(f"The dotted line is the size of the device, {total / GIB:.1f} GiB.")
        highest = max(highest, total / GIB)
    elif total is not None:
        caption.append(f"The device has {total / GIB:.1f} GiB.")
    events = [e for e in seen.trace.events if e.device in (None, verdict.device)]
    marks = event_marks(events, clock)
    if max(Counter(e.kind for e in events).values(), default=0) > MOST_MARKS:
        caption.append(f"Of frequent events at most {MOST_MARKS} are marked.")
    if marks:
        layout["yaxis2"] = {
            "overlaying": "y",
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
        }
    layout["yaxis"] = {"title": {"text": "GiB"}, "range": [0, max(highest * 1.25, 0.01)]}
    close = _close_up(seen)
    return Chart(
        title=f"Memory of {device_name(verdict.device)}",
        caption=" ".join(caption) + said_thinned(*columns),
        data=data + marks,
        layout=layout,
        close_up=close,
        starts_close=close is not None
        and verdict.shape not in ("flat", "idle", "unknown")
        and close[1] - close[0] < 0.2 * highest,
    )


_LEVELS = (
    ("reserved_bytes", "held by PyTorch", "--series-2", "solid"),
    ("allocated_bytes", "tensors", "--series-3", "solid"),
    ("peak_bytes", "peak of a step", "--series-4", "dot"),
)
_IN_WORDS = {
    "whole device": "all that is on it, as nvidia-smi shows it",
    "other programs": "processes on the device that are not the recorded one",
    "held by PyTorch": "what its allocator has taken from the device (reserved)",
    "tensors": "what is in use between two steps (allocated)",
    "peak of a step": "the most that was in use while it ran",
}


def curves_in_words(charts: Sequence[Chart]) -> str:
    """What the curves that are drawn mean."""
    drawn = {line["name"] for chart in charts for line in chart.data}
    said = [f"{n.capitalize()}: {words}." for n, words in _IN_WORDS.items() if n in drawn]
    return " ".join(said).replace("pytorch", "PyTorch")


def _name_phases(line: dict[str, Any], phases: Sequence[Phase], clock: Clock) -> None:
    """Has whoever points at the curve read which phase the moment belongs to."""
    if not phases:
        return
    starts = clock.elapsed(np.array([phase.from_s for phase in phases]))
    place = np.searchsorted(starts, np.array(line["x"], float), side="right") - 1
    names = [escape(phase.name, 24) for phase in phases]
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


def _limit(total_gib: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "yref": "y",
        "x0": 0,
        "x1": 1,
        "y0": round(total_gib, 3),
        "y1": round(total_gib, 3),
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
    }


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
