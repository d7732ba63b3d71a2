"""What a report's charts show besides curves: phases as bands, events as marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftline.signal.judge.phases import Phase
from draftline.signal.report.report_curves import Clock, escape, numbers
from draftline.signal.trace import EVENT_WORDS, Event

_MARKS_AT = 0.93
MOST_BANDS = 120
MOST_MARKS = 400
_LABELLED_SHARE = 0.07  # a phase narrower than this share of the chart has no room for its name
_PHASE_COLOURS = {
    "load": "--band-load",
    "warm": "--band-warm",
    "run": "--band-run",
    "evaluate": "--band-evaluate",
    "checkpoint": "--band-checkpoint",
}
_SYMBOLS = {
    "compile": "triangle-up",
    "recompile": "triangle-up-open",
    "graph_break": "x",
    "recompile_limit": "hourglass",
    "eager_flex": "cross",
    "capture": "square",
    "capture_skip": "square-open",
    "cache_flush": "diamond",
    "oom": "star",
    "error": "circle-x",
}
# How these marks look in a text.
SIGNS = {
    "triangle-up": "▲",
    "triangle-up-open": "△",
    "x": "✖",
    "hourglass": "⧗",
    "cross": "✚",
    "square": "■",
    "square-open": "□",
    "diamond": "◆",
    "star": "★",
    "circle-x": "⊗",
}


def memory_layout(
    phases: Sequence[Phase], clock: Clock, span: tuple[float, float]
) -> dict[str, Any]:
    """The phases as bands behind the curves, with their names where there is room."""
    shown = sorted(phases, key=lambda p: -p.seconds)[:MOST_BANDS]
    bands, labels = [], []
    whole = max(span[1] - span[0], 1e-9)
    for phase in sorted(shown, key=lambda p: p.from_s):
        left, right = (float(clock.elapsed(np.array(t))) for t in (phase.from_s, phase.to_s))
        bands.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": round(left, 4),
                "x1": round(right, 4),
                "y0": 0,
                "y1": 1,
                "layer": "below",
                "fillcolor": _PHASE_COLOURS.get(phase.name, "--band-other"),
                "line": {"width": 1, "color": "--band-edge"},
            }
        )
        if (right - left) / whole >= _LABELLED_SHARE:
            labels.append(
                {
                    "xref": "x",
                    "yref": "paper",
                    "x": round((left + right) / 2, 4),
                    "y": 1,
                    "yanchor": "bottom",
                    "showarrow": False,
                    "text": escape(phase.name, 24),
                    "font": {"size": 11, "color": "--muted"},
                }
            )
    return {"shapes": bands, "annotations": labels}


def event_marks(events: Sequence[Event], clock: Clock) -> list[dict[str, Any]]:
    """Events as marks along the top of a chart, one kind of mark for each kind of event."""
    marks = []
    for kind, words in EVENT_WORDS.items():
        of_kind = [event for event in events if event.kind == kind]
        if not of_kind:
            continue
        every = -(-len(of_kind) // MOST_MARKS)
        shown = of_kind[::every]
        name = f"{words} ({len(of_kind)})" if len(of_kind) > 1 else words
        marks.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": numbers(clock.elapsed(np.array([e.time_s for e in shown])), 4),
                "y": [_MARKS_AT] * len(shown),
                "yaxis": "y2",
                "text": [escape(e.text) or words for e in shown],
                "hovertemplate": "%{text}",
                "marker": {"symbol": _SYMBOLS[kind], "size": 9, "color": "--event"},
            }
        )
    return marks
