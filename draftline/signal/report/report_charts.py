"""A report's charts of training: loss and accept length, step time, waits, rate."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftline.signal.report.report_curves import Chart, Clock, curve, said_thinned
from draftline.signal.report.run_facts import RunFacts
from draftline.signal.report.run_logs import Metrics
from draftline.signal.trace import Column, Steps

# An axis is cut where its longest step would squeeze all others: this many times what 98 % stay below.
_FAR_ABOVE = 4.0
_ORDERS = 10.0


def training_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """Loss and accept length, where the run logged them."""
    metrics = run.metrics
    if metrics is None:
        return []
    clock = _clock_for(metrics, clock)
    charts = []
    for name, title, caption in (
        ("loss", "Loss", "Training loss, averaged over the steps between two lines of the log."),
        (
            "accept_length_forced",
            "Accept length",
            "Tokens committed per target call on the training data itself, bonus included: 1 is plain "
            "decoding. An evaluation by decoding gives other numbers.",
        ),
    ):
        column = metrics.known(name)
        if column is None:
            continue
        line = curve(
            clock, metrics.time_s, column, name=title, colour="--series-1", step=metrics.step
        )
        axis: dict[str, Any] = {"title": {"text": title.lower()}}
        if name == "loss" and _spans_orders(column):
            axis |= _logarithmic(column) | {"title": {"text": "loss, logarithmic"}}
        charts.append(Chart(title, caption + said_thinned(column), [line], {"yaxis": axis}))
    return charts


def speed_charts(run: RunFacts, clock: Clock) -> list[Chart]:
    """Where the time of a step goes, how long either side waited, and the rate."""
    metrics = run.metrics
    if metrics is not None and metrics.known("step_ms") is not None:
        return _speed_of_log(metrics, _clock_for(metrics, clock))
    steps = max(run.trace.steps, key=lambda s: len(s.time_s), default=None)
    if steps is None or not np.isfinite(steps.wall_ms).any():
        return []
    return _speed_of_recording(steps, clock)


def _speed_of_log(metrics: Metrics, clock: Clock) -> list[Chart]:
    step_ms = metrics.columns["step_ms"]
    waited = metrics.known("drafters_waited_pct")
    if waited is None:
        data = [
            curve(
                clock,
                metrics.time_s,
                step_ms,
                name="a step",
                colour="--series-1",
                unit="ms",
                step=metrics.step,
            )
        ]
        caption = "Milliseconds a step, averaged between two lines of the log."
    else:
        waiting = step_ms * np.clip(waited, 0, 100) / 100
        parts = (
            ("drafters work", "--series-1", step_ms - waiting),
            ("drafters wait for features", "--series-2", waiting),
        )
        data = _stack(clock, metrics.time_s, step_ms, parts, step=metrics.step)
        caption = (
            "Milliseconds a step, averaged between two lines of the log: what the drafters work, and on "
            "top of it what they stand still for the targets' features."
        )
    axis, cut = _cut(step_ms)
    charts = [_chart("Step time", caption + cut, data, step_ms, axis | {"title": {"text": "ms"}})]
    sides = [
        (name, colour, column)
        for name, colour, key in (
            ("targets", "--series-3", "targets_waited_pct"),
            ("drafters", "--series-2", "drafters_waited_pct"),
        )
        if (column := metrics.known(key)) is not None
    ]
    if sides:
        data = [
            curve(clock, metrics.time_s, column, name=name, colour=colour, unit="%")
            for name, colour, column in sides
        ]
        caption = (
            "Share of its time that a side stood still for the other. Zero for the drafters and "
            "something for the targets is what you want."
        )
        most = max(float(np.nanmax(column)) for _, _, column in sides)
        top = min(103.0, max(10.0, 1.15 * most))
        axis = {"title": {"text": "% of the time"}, "range": [0, top]}
        charts.append(_chart("Waiting", caption, data, sides[0][2], axis))
    rows = metrics.known("rows_per_s")
    if rows is not None:
        data = [curve(clock, metrics.time_s, rows, name="rows a second", colour="--series-1")]
        caption = "Drafted positions trained on in a second, all drafters together."
        charts.append(_chart("Rate", caption, data, rows, {"title": {"text": "rows a second"}}))
    return charts


def _speed_of_recording(steps: Steps, clock: Clock) -> list[Chart]:
    wall_ms = steps.wall_ms
    spent = steps.known("compile_s")
    if spent is None:
        data = [
            curve(
                clock,
                steps.time_s,
                wall_ms,
                name="a step",
                colour="--series-1",
                unit="ms",
                step=steps.number,
            )
        ]
        caption = "Milliseconds from the end of one step to the end of the next."
    else:
        compiling = np.clip(np.diff(spent, prepend=spent[0]) * 1000, 0, wall_ms)
        parts = (
            ("everything else", "--series-1", wall_ms - compiling),
            ("compiling", "--series-2", compiling),
        )
        data = _stack(clock, steps.time_s, wall_ms, parts, step=steps.number)
        caption = (
            "Milliseconds from the end of one step to the end of the next, and how many of them went "
            "into compiling."
        )
    axis, cut = _cut(wall_ms)
    charts = [_chart("Step time", caption + cut, data, wall_ms, axis | {"title": {"text": "ms"}})]
    tokens = steps.known("tokens")
    if tokens is not None:
        rate = tokens * 1000 / np.where(wall_ms > 0, wall_ms, np.nan)
        data = [curve(clock, steps.time_s, rate, name="tokens a second", colour="--series-1")]
        charts.append(
            _chart(
                "Rate",
                "Tokens a second, step by step.",
                data,
                rate,
                {"title": {"text": "tokens a second"}},
            )
        )
    return charts


def _chart(
    title: str, caption: str, data: list[dict[str, Any]], drawn: Column, axis: dict[str, Any]
) -> Chart:
    layout = {"yaxis": {"rangemode": "tozero"} | axis}
    return Chart(title, caption + said_thinned(drawn), data, layout)


def _stack(
    clock: Clock,
    time_s: Column,
    whole: Column,
    parts: tuple[tuple[str, str, Column], ...],
    step: Column,
) -> list[dict[str, Any]]:
    """Areas on top of one another, that add up to `whole`."""
    return [
        curve(clock, time_s, part, name=name, colour=colour, unit="ms", by=whole, step=step)
        | {
            "stackgroup": "step",
            "fillcolor": f"{colour}-wash",
            "line": {"color": colour, "width": 1},
        }
        for name, colour, part in parts
    ]


def _cut(values: Column) -> tuple[dict[str, Any], str]:
    """The vertical axis of step times, and what the caption says where some lie above it."""
    known = values[np.isfinite(values)]
    usual = float(np.percentile(known, 98))
    above = int(np.sum(known > _FAR_ABOVE * usual))
    if not above or usual <= 0:
        return {}, ""
    top = usual * 1.3
    above = int(np.sum(known > top))
    longer = "one longer step leaves" if above == 1 else f"{above} longer steps leave"
    return {"range": [0, top]}, (
        f" The axis ends at {top:,.0f} ms; {longer} it, up to {known.max():,.0f} ms."
    )


def _logarithmic(column: Column) -> dict[str, Any]:
    """An axis with ticks at 1, 2 and 5 of every order."""
    low, high = np.log10(np.nanmin(column)), np.log10(np.nanmax(column))
    orders = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    ticks = [digit * 10.0**order for order in orders for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.4g}" for tick in ticks]}


def _spans_orders(column: Column) -> bool:
    known = column[np.isfinite(column)]
    late = known[-max(1, len(known) // 4) :]
    return bool(known.min() > 0 and known.max() > _ORDERS * np.median(late))


def _clock_for(metrics: Metrics, clock: Clock) -> Clock:
    """The page's clock, or for a log without dates one that starts at its training time zero."""
    if metrics.dated == clock.dated:
        return clock
    return Clock(0.0, clock.unit_s, clock.unit, metrics.dated)
