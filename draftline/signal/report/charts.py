"""A report's charts of training: loss and acceptance length, step time, waits, rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from draftline.signal.report.curves import Chart, Clock, curve, said_thinned
from draftline.signal.report.run_facts import RunFacts
from draftline.signal.report.run_logs import Metrics
from draftline.signal.trace import Column, Steps

# An axis is cut where its longest step would squeeze all others: this many times what 98 % stay below.
_FAR_ABOVE = 4.0
_ORDERS = 10.0
Draw = Callable[..., dict[str, Any]]


def training_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """Loss and acceptance length, where the run logged them."""
    metrics = run.metrics
    if metrics is None:
        return []
    draw = _draw(metrics, clock)
    charts = []
    if (loss := metrics.known("loss")) is not None:
        axis = {"title": "loss", "rangemode": "normal"}
        if _spans_orders(loss):
            axis = {"title": "loss, logarithmic", "type": "log", "dtick": "D2"}
        caption = "Training loss, averaged over the steps between two lines of the log."
        charts.append(_chart("Loss", caption, [draw(loss, name="loss")], loss, axis))
    if (length := metrics.known("accept_length_forced")) is not None:
        caption = (
            "Tokens committed per target call on the training data itself, bonus included: 1 is plain "
            "decoding. An evaluation by decoding gives other numbers."
        )
        axis = {"title": "tokens per call", "rangemode": "normal"}
        data = [draw(length, name="acceptance length")]
        charts.append(_chart("Acceptance length", caption, data, length, axis))
    return charts


def speed_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """Where the time of a step goes, how long either side waited, and the rate."""
    metrics = run.metrics
    if metrics is not None and metrics.known("step_ms") is not None:
        return _speed_of_log(metrics, _draw(metrics, clock))
    steps = max(run.trace.steps, key=lambda s: len(s.time_s), default=None)
    if steps is None or not np.isfinite(steps.wall_ms).any():
        return []
    return _speed_of_recording(steps, partial(curve, clock, steps.time_s, step=steps.number))


def _draw(metrics: Metrics, clock: Clock) -> Draw:
    """Draws a column on the page's clock; of a log without dates, on one that starts with its training."""
    if metrics.dated != clock.dated:
        clock = Clock(0.0, clock.unit_s, clock.unit, metrics.dated)
    return partial(curve, clock, metrics.time_s, step=metrics.step)


def _speed_of_log(metrics: Metrics, draw: Draw) -> list[Chart]:
    step_ms = metrics.columns["step_ms"]
    waited = {side: metrics.known(f"{side}_waited_pct") for side in ("targets", "drafters")}
    caption, waiting = "Milliseconds per step, averaged between two lines of the log", None
    if waited["drafters"] is not None:
        waiting = step_ms * np.clip(waited["drafters"], 0, 100) / 100
        caption += ": the time the drafters work, and on top of it the time they wait for features"
    names = ("drafters work", "drafters wait for features")
    charts = [_step_time(draw, step_ms, waiting, names, f"{caption}.")]
    sides = [
        draw(column, name=side, colour=colour, unit="%")
        for (side, column), colour in zip(waited.items(), ("green", "orange"), strict=True)
        if column is not None
    ]
    if sides:
        most = max(float(np.nanmax(column)) for column in waited.values() if column is not None)
        caption = (
            "Share of the time that a side waited for the other. You want zero for the drafters and "
            "something for the targets."
        )
        axis = {"title": "% of the time", "range": [0, min(103.0, max(10.0, 1.15 * most))]}
        charts.append(_chart("Waiting", caption, sides, step_ms, axis))
    rows = metrics.known("rows_per_s")
    if rows is not None:
        caption = "Drafted positions trained on per second, all drafters together."
        charts.append(_rate(draw, rows, "rows per second", caption))
    return charts


def _speed_of_recording(steps: Steps, draw: Draw) -> list[Chart]:
    caption, compiling = "Milliseconds from the end of one step to the end of the next", None
    if (spent := steps.known("compile_s")) is not None:
        compiling = np.clip(np.diff(spent, prepend=spent[0]) * 1000, 0, steps.wall_ms)
        caption += ", and how many of them went into compiling"
    names = ("everything else", "compiling")
    charts = [_step_time(draw, steps.wall_ms, compiling, names, f"{caption}.")]
    if (tokens := steps.known("tokens")) is not None:
        rate = tokens * 1000 / np.where(steps.wall_ms > 0, steps.wall_ms, np.nan)
        charts.append(_rate(draw, rate, "tokens per second", "Tokens per second, step by step."))
    return charts


def _step_time(
    draw: Draw, whole: Column, part: Column | None, names: tuple[str, str], caption: str
) -> Chart:
    """The time of a step: one curve or, where a part of it is known, two areas on top of one another."""
    if part is None:
        data = [draw(whole, name="one step", unit="ms")]
    else:
        areas = zip((whole - part, part), names, ("blue", "orange"), strict=True)
        data = [
            draw(column, name=name, colour=colour, unit="ms", by=whole, width=1)
            | {"stackgroup": "step"}
            for column, name, colour in areas
        ]
    axis, cut = _cut(whole)
    return _chart("Step time", caption + cut, data, whole, {"title": "ms", **axis})


def _rate(draw: Draw, rate: Column, unit: str, caption: str) -> Chart:
    return _chart("Rate", caption, [draw(rate, name=unit)], rate, {"title": unit})


def _chart(
    title: str, caption: str, data: list[dict[str, Any]], drawn: Column, axis: dict[str, Any]
) -> Chart:
    return Chart(title, caption + said_thinned(drawn), data, {"rangemode": "tozero"} | axis)


def _cut(values: Column) -> tuple[dict[str, Any], str]:
    """The vertical axis of step times, and what the caption says where some lie above it."""
    known = values[np.isfinite(values)]
    usual = float(np.percentile(known, 98))
    if usual <= 0 or known.max() <= _FAR_ABOVE * usual:
        return {}, ""
    top = usual * 1.3
    above = int(np.sum(known > top))
    longer = "one longer step leaves" if above == 1 else f"{above} longer steps leave"
    return {"range": [0, top]}, (
        f" The axis ends at {top:,.0f} ms; {longer} it, up to {known.max():,.0f} ms."
    )


def _spans_orders(column: Column) -> bool:
    known = column[np.isfinite(column)]
    late = known[-max(1, len(known) // 4) :]
    return bool(known.min() > 0 and known.max() > _ORDERS * np.median(late))
