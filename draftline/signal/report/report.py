"""One self-contained page about a run: verdict, memory, training, speed, compiles, choices, environment."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftline.errors import ConfigError
from draftline.runlog import write_atomic
from draftline.signal.report.report_charts import speed_charts, training_charts
from draftline.signal.report.report_curves import MOST_POINTS, Chart, Clock, clock_of
from draftline.signal.report.report_marks import SIGNS
from draftline.signal.report.report_memory import curves_in_words, memory_charts
from draftline.signal.report.report_page import GENERATOR, page
from draftline.signal.report.report_tables import sections
from draftline.signal.report.report_verdict import header, moment, phase_legend, text, verdict_card
from draftline.signal.report.run_facts import RunFacts, read_run

_HEAD_BYTES = 4096


def write_report(run: Path | Sequence[Path], out: Path) -> None:
    """Writes the report of a run directory, or of the recordings of one run, to `out`.

    Raises ConfigError where the run cannot be read, or `out` not be written or is another file.
    """
    paths = [run] if isinstance(run, Path) else list(run)
    _check_place(out)
    text = render(read_run(paths))
    try:
        write_atomic(out, text)
    except OSError as error:
        raise ConfigError(
            f"report {out} cannot be written: {error.strerror or error}; give another path with -o"
        ) from None


def _check_place(out: Path) -> None:
    """A report replaces an earlier one and nothing else."""
    if out.is_dir():
        raise ConfigError(f"{out} is a directory; name the file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no directory; make it first, or give another path")
    if not out.exists():
        return
    with out.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.strip() and GENERATOR.encode() not in head:
        raise ConfigError(f"{out} exists and is no report; give another path with -o, or remove it")


def render(run: RunFacts) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    clock = clock_of(run)
    memory = memory_charts(run, clock)
    groups = [
        ("memory", "Memory", memory),
        ("training", "Training", training_charts(run, clock)),
        ("speed", "Speed", speed_charts(run, clock)),
    ]
    shown = [chart for _, _, charts in groups for chart in charts]
    end = _end_of(shown)
    figures: dict[str, dict[str, Any]] = {}
    parts: list[tuple[str, str, str]] = []
    for name, title, charts in groups:
        if not charts:
            continue
        blocks = []
        for chart in charts:
            key = f"figure-{len(figures) + 1}"
            figures[key] = _figure(chart, clock, end)
            blocks.append(_block(key, chart))
        inner = "".join(blocks)
        if name == "memory":
            inner = (
                f'<p class="caption">{text(curves_in_words(charts))}</p>{phase_legend(run)}{inner}'
            )
        elif len(charts) > 1:
            inner = f'<div class="pair">{inner}</div>'
        parts.append((name, title, inner))
    parts += sections(run, clock)
    body = "".join(
        [
            f"<header>{header(run)}{_navigation(parts, bool(figures))}</header>",
            "<main>",
            verdict_card(run),
            *(f'<section id="{n}"><h2>{t}</h2>{inner}</section>' for n, t, inner in parts),
            "</main>",
            _footer(run, clock, bool(figures)),
        ]
    )
    return page(f"{run.name} - draftline report", body, figures, get_plotlyjs() if figures else "")


def _end_of(charts: Iterable[Chart]) -> float:
    """The last moment that any chart shows, on the page's clock."""
    ends = [line["x"][-1] for chart in charts for line in chart.data if line["x"]]
    return max((end for end in ends if end is not None), default=1.0)


def _figure(chart: Chart, clock: Clock, end: float) -> dict[str, Any]:
    axis = {"gridcolor": "--grid", "linecolor": "--line", "zeroline": False, "automargin": True}
    pad = 0.01 * max(end, 1e-6)
    layout = {
        "height": 270,
        # Room on top for the names of phases and the tools.
        "margin": {"l": 58, "r": 10, "t": 26, "b": 42},
        "paper_bgcolor": "--surface",
        "plot_bgcolor": "--surface",
        "font": {"color": "--ink", "size": 12, "family": "system-ui, DejaVu Sans, sans-serif"},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "--surface", "bordercolor": "--line", "font": {"color": "--ink"}},
        "showlegend": False,
        "modebar": {"bgcolor": "--surface", "color": "--muted", "activecolor": "--accent"},
        **chart.layout,
        "xaxis": axis
        | {
            "title": {"text": f"{_UNITS[clock.unit]} since the start"},
            "range": [-pad, end + pad],
            "unifiedhovertitle": {"text": f"%{{x:,.2~f}} {clock.unit}"},
        },
        "yaxis": axis | {"hoverformat": ",.4~g"} | chart.layout.get("yaxis", {}),
    }
    layout["yaxis"]["title"] = layout["yaxis"]["title"] | {"standoff": 10}
    if chart.starts_close and chart.close_up is not None:
        layout["yaxis"] = layout["yaxis"] | {"range": list(chart.close_up)}
    return {"data": chart.data, "layout": layout}


_UNITS = {"s": "seconds", "min": "minutes", "h": "hours"}


def _block(key: str, chart: Chart) -> str:
    button = ""
    if chart.close_up is not None:
        ranges = json.dumps(
            {"close": chart.close_up, "whole": chart.layout["yaxis"]["range"]}, allow_nan=False
        )
        pressed = str(chart.starts_close).lower()
        words = "Show from zero" if chart.starts_close else "Close up of the steady state"
        button = (
            f'<button type="button" aria-controls="{key}-plot" aria-pressed="{pressed}" '
            f'data-ranges="{html.escape(ranges)}">{words}</button>'
        )
    title, caption = html.escape(chart.title), html.escape(chart.caption)
    return (
        f'<figure><div class="row"><h3>{title}</h3>{button}</div>'
        f"{_keys(key, chart)}"
        f'<div class="plot" id="{key}-plot" data-figure="{key}" role="img" '
        f'aria-label="{title}. {caption}"></div>'
        f'<figcaption class="caption">{caption}</figcaption></figure>'
    )


def _keys(key: str, chart: Chart) -> str:
    """The names of the curves, each a button that hides its curve."""
    if len(chart.data) < 2:
        return ""
    items = []
    for number, line in enumerate(chart.data):
        if line["mode"] == "markers":
            sign = f'<i class="mark">{SIGNS[line["marker"]["symbol"]]}</i>'
        else:
            style = f"border-top-color: var({line['line']['color']})"
            dash = {"dash": "dashed", "dot": "dotted"}.get(line["line"].get("dash", ""), "solid")
            if "fillcolor" in line:
                style += f"; background: var({line['fillcolor']}); height: 11px"
            sign = f'<i style="{style}; border-top-style: {dash}"></i>'
        items.append(
            f'<button type="button" class="key" aria-pressed="true" aria-controls="{key}-plot" '
            f'data-curve="{number}">{sign}{text(line["name"])}</button>'
        )
    return f'<div class="keys">{"".join(items)}</div>'


def _navigation(parts: Sequence[tuple[str, str, str]], charts: bool) -> str:
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in parts)
    whole = '<button type="button" id="whole">Show the whole run</button>' if charts else ""
    return f"<nav>{links}{whole}</nav>"


def _footer(run: RunFacts, clock: Clock, charts: bool) -> str:
    said = ["Made by draftline."]
    if charts:
        zero = moment(clock.start_s, run) if clock.dated else "the first reading"
        said.append(
            "On a wide screen drag over a chart to zoom, all of them follow; double-click to go back. "
            f"Time 0 is {zero}. "
            f"Curves have at most {MOST_POINTS:,} points and keep the lowest and highest of every "
            "stretch. A line is broken where nothing was recorded."
        )
    sources = ", ".join(text(Path(source).name) for source in run.trace.sources)
    if sources:
        said.append(f"Read from {sources}.")
    return f"<footer><p>{' '.join(said)}</p></footer>"
