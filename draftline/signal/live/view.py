"""What a person sees of a running program: a memory line for each device, rate, waits, verdict, alerts.

A line is a list of (text, style) pairs; styles are rich's, and a plain terminal leaves them out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftline.signal.draftline_run import Pace
from draftline.signal.live.alerts import Alert
from draftline.signal.trace import GIB, Column, Samples, Steps, Trace, device_name, one_line

Line = list[tuple[str, str]]

WIDEST_ROW = 119
WINDOW_S = 300.0  # that the curves show
_STEPS = 50  # the latest, for the rate
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"
_GOOD, _BAD, _DIM = "green", "bold red", "dim"
# A curve that moves by less than this share of its level is drawn in the middle.
_LEAST_SPAN = 0.02


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device's memory: `bytes_` [n] at `time_s` [n], NaN where unknown."""

    name: str
    time_s: Column
    bytes_: Column
    total_bytes: float | None = None
    reserved_bytes: float | None = None
    util_pct: float | None = None
    shape: str = "?"


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a watched program; None where something is unknown."""

    title: str
    state: str
    devices: Sequence[DeviceRow] = ()
    no_devices: str = "no device is sampled"
    rate: str | None = None
    compiles: str | None = None
    verdict: str = "no verdict yet"
    fault: bool = False
    alerts: Sequence[Alert] = ()
    notes: Sequence[str] = field(default=())


def device_rows(trace: Trace, shapes: Mapping[str, str]) -> list[DeviceRow]:
    """A row for each device whose memory is known, as the driver sees it, else as the allocator."""
    rows = []
    samples = {part.device: part for part in trace.samples}
    steps = {part.device: part for part in trace.steps}
    for name in trace.devices:
        seen, counted = samples.get(name), steps.get(name)
        reserved = None if counted is None else counted.known("reserved_bytes")
        held = None if reserved is None else _last(reserved)
        shape = shapes.get(name, "?")
        if seen is not None:
            rows.append(_sampled(name, seen, held, shape))
        elif counted is not None and reserved is not None:
            rows.append(DeviceRow(name, counted.time_s, reserved, None, held, None, shape))
    return rows


def _sampled(name: str, seen: Samples, held: float | None, shape: str) -> DeviceRow:
    util = _last(seen.util_pct[-5:])
    return DeviceRow(name, seen.time_s, seen.used_bytes, seen.total_bytes, held, util, shape)


def _last(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else None


def rate(trace: Trace, pace: Pace) -> str | None:
    """Step time, rate and waits in words: from a run's own log, else from its recorded steps."""
    lead = max(trace.steps, key=lambda part: len(part.number), default=None)
    if pace.step_ms is None and lead is not None and len(lead.number) > 1:
        pace = _measured(lead)
    if pace.step_ms is None:
        return None
    words = [] if pace.step is None else [f"step {pace.step:.0f}"]
    words.append(f"{pace.step_ms:,.1f} ms per step")
    if pace.tokens_per_s is not None:
        words.append(f"{pace.tokens_per_s:,.0f} tokens/s")
    if pace.waited_pct:
        waits = ", ".join(f"{side} {value:.0f} %" for side, value in pace.waited_pct.items())
        words.append(f"waiting: {waits}")
    return ", ".join(words)


def _measured(steps: Steps) -> Pace:
    wall_ms = steps.wall_ms[-_STEPS:]
    known = wall_ms[np.isfinite(wall_ms)]
    step_ms = float(np.median(known)) if len(known) else None
    tokens, seconds = steps.known("tokens"), float(known.sum()) / 1000
    done = math.nan if tokens is None else float(np.nansum(tokens[-_STEPS:]))
    tokens_per_s = done / seconds if math.isfinite(done) and seconds > 0 else None
    return Pace(float(steps.number[-1]), step_ms, tokens_per_s)


def sparkline(time_s: Column, values: Column, width: int, bars: str = _BARS) -> str:
    """The curve over the last five minutes in `width` characters, from its lowest to its highest
    value; a curve that hardly moves is a line in the middle, and an unknown stretch is blank."""
    if width <= 0 or not len(time_s):
        return ""
    end = float(time_s[-1])
    start = max(float(time_s[0]), end - WINDOW_S)
    inside = (time_s >= start) & np.isfinite(values)
    if not inside.any():
        return " " * width
    times, shown = time_s[inside], values[inside]
    columns = np.minimum(((times - start) / max(end - start, 1e-9) * width).astype(int), width - 1)
    highest = np.full(width, -np.inf)
    np.maximum.at(highest, columns, shown)
    low, high = float(shown.min()), float(shown.max())
    span = high - low
    if span < _LEAST_SPAN * max(high, 1.0):
        middle = (low + high) / 2
        span = _LEAST_SPAN * max(high, 1.0)
        low = middle - span / 2
    characters, last = [], " "
    for value in highest:
        if math.isfinite(value):
            last = bars[min(len(bars) - 1, int((value - low) / span * len(bars)))]
        characters.append(last)  # between two readings memory is taken to stay
    return "".join(characters)


def device_line(row: DeviceRow, width: int, bars: str = _BARS) -> Line:
    """One device in one line of `width` characters, the numbers that matter less left out first."""
    recent = row.bytes_[row.time_s >= row.time_s[-1] - WINDOW_S] if len(row.time_s) else row.bytes_
    known = recent[np.isfinite(recent)]
    name = f"{device_name(row.name):<7} "
    good = row.shape in ("flat", "idle", "?", "unknown")
    shape = (f" {row.shape}", _GOOD if row.shape == "flat" else "" if good else _BAD)
    if not len(known):
        return [(name, "bold"), ("memory unknown", _DIM)]
    now, low, high = (float(v) / GIB for v in (known[-1], known.min(), known.max()))
    total = "" if row.total_bytes is None else f"/{row.total_bytes / GIB:.0f}"
    parts = [f" {now:.2f}{total} GiB", f" min {low:.2f} max {high:.2f}"]
    if row.reserved_bytes is not None and row.total_bytes is not None:
        parts.append(f" reserved {row.reserved_bytes / GIB:.2f}")
    if row.util_pct is not None:
        parts.append(f" util {row.util_pct:.0f} %")
    while len(parts) > 1 and width - len(name) - len("".join(parts)) - len(shape[0]) < 12:
        parts.pop()
    room = width - len(name) - len("".join(parts)) - len(shape[0])
    curve = sparkline(row.time_s, row.bytes_, min(room, 60), bars)
    return [(name, "bold"), (curve, "cyan"), ("".join(parts), ""), shape]


def lines(
    view: View,
    width: int,
    *,
    row_width: int = WIDEST_ROW,
    alerts: int = 3,
    verdict_lines: int = 2,
    ascii_only: bool = False,
) -> list[Line]:
    """The whole view, each line at most `width` characters and a device's at most `row_width`, with so
    many lines for the verdict and of the latest alerts."""
    bars = _ASCII_BARS if ascii_only else _BARS
    title = _cut(view.title, width - len(view.state) - 2, ascii_only)
    space = " " * max(2, width - len(title) - len(view.state))
    found: list[Line] = [[(title, "bold"), (space, ""), (view.state, _DIM)]]
    found += [device_line(row, min(width, row_width), bars) for row in view.devices]
    if not view.devices:
        found.append([("memory  ", "bold"), (_cut(view.no_devices, width - 8, ascii_only), _DIM)])
    if view.rate is not None:
        found.append([("rate    ", "bold"), (_cut(view.rate, width - 8, ascii_only), "")])
    if view.compiles is not None:
        found.append([("torch   ", "bold"), (_cut(view.compiles, width - 8, ascii_only), "")])
    style = _BAD if view.fault else ""
    for number, part in enumerate(_wrap(view.verdict, width - 8, verdict_lines, ascii_only)):
        found.append([("verdict " if number == 0 else " " * 8, "bold"), (part, style)])
    found += [[(_cut(note, width, ascii_only), _DIM)] for note in view.notes]
    shown = list(view.alerts)[-alerts:] if alerts else []
    found += [[(_cut(alert.line, width, ascii_only), "yellow")] for alert in shown]
    return found


def _cut(text: str, width: int, ascii_only: bool) -> str:
    """The text in one line of at most `width` characters, without control characters."""
    plain = one_line(text, max(len(text), 4))
    if ascii_only:
        plain = plain.encode("ascii", "replace").decode()
    if len(plain) <= width:
        return plain
    mark = "..." if ascii_only else "…"
    return plain[: max(0, width - len(mark))] + mark


def _wrap(text: str, width: int, most: int, ascii_only: bool) -> list[str]:
    """The text in at most `most` lines, the last one cut where it is not enough."""
    parts = textwrap.wrap(_cut(text, len(text), ascii_only), max(width, 8)) or [""]
    if len(parts) > most:
        parts[most - 1] = _cut(" ".join(parts[most - 1 :]), width, ascii_only)
    return parts[:most]


def plain(line: Line) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line).rstrip()
