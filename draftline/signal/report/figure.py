"""The charts of a report as one plotly figure: a row per chart, one axis of time, a legend per row."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from draftline.signal.report.curves import Chart, Clock

_PLOT_PX, _TOP_PX, _BOTTOM_PX = 215, 90, 60
# Between two charts: ticks, buttons and a legend, which is high on a narrow screen.
_GAP_PX, _GAP_OF_DEVICES_PX = 110, 160
_UNITS = {"s": "seconds", "min": "minutes", "h": "hours"}
# The page's style sets texts and surfaces for light and dark; an image that is saved is light.
_AXIS = {
    "gridcolor": "rgba(128, 140, 152, 0.2)",
    "linecolor": "rgba(128, 140, 152, 0.4)",
    "zeroline": False,
}
_STYLE = {
    "margin": {"l": 60, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
    "font": {"color": "#1a1f25", "size": 12, "family": "system-ui, DejaVu Sans, sans-serif"},
    "hovermode": "x unified",
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#808c98", "activecolor": "#3579d8"},
    "xaxis": _AXIS | {"spikethickness": 1, "spikecolor": "#808c98"},
    "yaxis": _AXIS | {"automargin": True, "hoverformat": ",.4~g"},
}
# The title of a chart is its legend's.
_LEGEND = {"orientation": "h", "x": 0, "yanchor": "bottom", "traceorder": "normal"}
_TITLE = {"side": "top", "font": {"size": 15}}
_MARKS_AXIS = {"range": [0, 1], "visible": False, "fixedrange": True}
_MENU: dict[str, Any] = {"type": "buttons", "direction": "right", "pad": {"t": 22}}
_MENU |= {"x": 1, "xanchor": "right", "yanchor": "top"}


def figure(charts: Sequence[Chart], clock: Clock) -> dict[str, Any]:
    """Data and layout of the figure, as plotly has them, for at least one chart."""
    devices = sum(chart.close_up is not None for chart in charts)
    gap_px = _GAP_OF_DEVICES_PX if devices > 1 else _GAP_PX
    inner_px = len(charts) * (_PLOT_PX + gap_px) - gap_px
    end = max((line["x"][-1] for chart in charts for line in chart.data), default=1.0)
    pad = 0.01 * max(end, 1e-6)
    time = {
        "matches": "x",
        "range": [-pad, end + pad],
        "unifiedhovertitle": {"text": f"%{{x:,.2~f}} {clock.unit}"},
    }
    data: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    menus: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "template": {"layout": _STYLE},
        "height": inner_px + _TOP_PX + _BOTTOM_PX,
        "shapes": shapes,
        "updatemenus": menus,
    }
    for row, chart in enumerate(charts):
        number = str(row + 1) if row else ""
        x, y, legend, axis = (f"{noun}{number}" for noun in ("x", "y", "legend", "yaxis"))
        top = 1 - row * (_PLOT_PX + gap_px) / inner_px
        bottom = max(0.0, top - _PLOT_PX / inner_px)
        # Events are marked on a vertical axis of their own, which is not seen.
        marks = f"y{len(charts) + row + 1}"
        for line in chart.data:
            height = marks if line["mode"] == "markers" else y
            data.append(line | {"xaxis": x, "yaxis": height, "legend": legend, "showlegend": True})
        for shape in chart.shapes:
            xref, yref = shape["xref"].replace("x", x), shape["yref"].replace("y", y)
            shapes.append(shape | {"xref": xref, "yref": yref, "legend": legend})
        layout |= {
            f"xaxis{number}": time | {"anchor": y},
            axis: chart.axis
            | {"anchor": x, "domain": [bottom, top], "title": {"text": chart.axis["title"]}},
            marks.replace("y", "yaxis"): {"anchor": x, "overlaying": y, **_MARKS_AXIS},
            legend: _LEGEND
            | {"y": top, "title": _TITLE | {"text": f"<b>{html.escape(chart.title)}</b>"}},
        }
        if chart.close_up is not None:
            menus.append(_menu(axis, chart, chart.close_up) | {"y": bottom})
            if chart.starts_close:
                layout[axis]["range"] = chart.close_up
    layout[f"xaxis{number}"]["title"] = {"text": f"{_UNITS[clock.unit]} since the start"}
    return {"data": data, "layout": layout}


def _menu(axis: str, chart: Chart, close_up: tuple[float, float]) -> dict[str, Any]:
    """Buttons that switch between the whole vertical axis and its close-up."""
    ranges = {"From zero": chart.axis["range"], "Close up of the steady state": close_up}
    buttons = [
        {"label": words, "method": "relayout", "args": [{f"{axis}.range": limits}]}
        for words, limits in ranges.items()
    ]
    return _MENU | {"active": int(chart.starts_close), "buttons": buttons}
