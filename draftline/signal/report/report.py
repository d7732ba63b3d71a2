"""One self-contained page about a run: verdict, memory, training, speed, compiles, choices, environment.

The page asks nothing of the network, and its policy lets nothing run but the scripts that are named
by their digest: a text of the run that slipped through the escaping would still be only a text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from draftline.errors import ConfigError
from draftline.files import irregular
from draftline.runlog import write_atomic
from draftline.signal.report.charts import speed_charts, training_charts
from draftline.signal.report.curves import MOST_POINTS, clock_of
from draftline.signal.report.figure import figure
from draftline.signal.report.memory import IN_WORDS, memory_charts
from draftline.signal.report.run_facts import RunFacts, read_run
from draftline.signal.report.summary import (
    command_of,
    devices_of,
    facts_of,
    headline,
    moment,
    tiles_of,
)
from draftline.signal.report.tables import tables_of
from draftline.signal.trace import one_line

# How a file says that it is a report, which another report may replace.
_GENERATOR = '<meta name="generator" content="draftline report">'
_HEAD_BYTES = 4096
_MOST_LETTERS = 2000  # of one text of the page
_MOST_ROWS = 200


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
    try:
        if kind := irregular(out):
            raise ConfigError(f"{out} is {kind}; name a regular file with -o")
        if not out.exists():
            return
        with out.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be read: {error.strerror}; give another path with -o"
        ) from None
    if head.strip() and _GENERATOR.encode() not in head:
        raise ConfigError(f"{out} exists and is no report; give another path with -o, or remove it")


def render(run: RunFacts) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    clock = clock_of(run)
    charts = [*memory_charts(run, clock), *training_charts(run, clock), *speed_charts(run, clock)]
    drawn = {line["name"] for chart in charts for line in chart.data}
    scripts = [get_plotlyjs(), _file("report.js")] if charts else []
    tone, sign, words = headline(run)
    page = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    ).from_string(_file("report.html"))
    return page.render(
        run=run,
        generator=_GENERATOR,
        allowed=" ".join(map(_digest, scripts)) or "'none'",
        style=_file("report.css"),
        command=command_of(run),
        facts=facts_of(run),
        tone=tone,
        sign=sign,
        headline=words,
        devices=devices_of(run),
        tiles=tiles_of(run),
        charts=charts,
        curves=[(name, words) for name, words in IN_WORDS.items() if name in drawn],
        tables=tables_of(run, clock),
        most_rows=_MOST_ROWS,
        zero=moment(clock.start_s, run) if clock.dated else "the first reading",
        most_points=f"{MOST_POINTS:,}",
        sources=[Path(source).name for source in run.trace.sources],
        figure=figure(charts, clock) if charts else {},
        scripts=scripts,
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _shown(value: Any) -> Any:
    """Anything of the run as text of the page, which escapes it; markup as it is."""
    if hasattr(value, "__html__"):
        return value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "yes", False: "no"}[value]
    if isinstance(value, (dict, list)):
        value = json.dumps(value, default=str, ensure_ascii=False)
    return one_line(str(value), _MOST_LETTERS)
