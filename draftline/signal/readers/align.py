"""Lays the files of one run over each other: their clocks, and steps that name no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftline.signal.readers.clock import DAY_S, straighten
from draftline.signal.readers.rows import DeviceRows, Part, StepRows
from draftline.signal.trace import MIB, Column

_QUARTER_S = 900.0  # zones differ by multiples of it
_FARTHEST_S = 14 * 3600.0
# Memory that the driver reports lags and lacks no more than this against what PyTorch holds.
_SLACK_BYTES = 64 * MIB


def span(parts: Sequence[Part]) -> tuple[float, float] | None:
    """The first and last moment in any row of the parts."""
    low, high = math.inf, -math.inf
    for part in parts:
        for column in part.times():
            known = np.asarray(column)[np.isfinite(column)]
            if len(known):
                low, high = min(low, float(known.min())), max(high, float(known.max()))
    return None if low > high else (low, high)


def align_clocks(parts: Sequence[Part]) -> list[str]:
    """Moves the rows of parts on a wall clock to that of the others; returns what was done.

    A stamp without a zone is off by a multiple of 15 minutes, up to 14 hours; one without a date by
    whole days besides. Of all that make the files overlap best, the one is taken under which the
    driver's memory follows PyTorch's, and of those alike the smallest.
    """
    notes = []
    for clock in ("local", "daytime"):
        moving = [part for part in parts if part.clock == clock]
        fixed = [part for part in parts if part.clock == "utc"]
        if not fixed and clock == "daytime":
            fixed = [part for part in parts if part.clock == "local"]
        own, other = span(moving), span(fixed)
        if own is None or other is None:
            continue
        whole_days = clock == "daytime" and fixed[0].clock == "local"
        offset = _best_offset(moving, fixed, own, other, clock == "daytime", whole_days)
        names = ", ".join(part.source for part in moving)
        if offset is None:
            notes.append(f"{names}: its times are not those of the other files, whatever the zone")
            continue
        for part in moving:
            move(part, offset)
            part.clock = fixed[0].clock
        if clock == "daytime":
            notes.append(f"{names}: times without a date were laid beside the other files")
        elif offset:
            notes.append(
                f"{names}: its local times were moved by {offset / 3600:+g} h to overlap the others"
            )
    return notes


def _best_offset(
    moving: Sequence[Part],
    fixed: Sequence[Part],
    own: tuple[float, float],
    other: tuple[float, float],
    undated: bool,
    whole_days: bool,
) -> float | None:
    unit = DAY_S if whole_days else _QUARTER_S
    if undated:
        low, high = other[0] - own[1], other[1] - own[0]
    else:
        low, high = -_FARTHEST_S, _FARTHEST_S
    first, last = math.ceil(low / unit), math.floor(high / unit)
    if last - first > 400:  # a recording of days: near its start is as good as anywhere
        last = first + 400
    offsets = np.arange(first, last + 1) * unit
    overlap = np.minimum(own[1] + offsets, other[1]) - np.maximum(own[0] + offsets, other[0])
    if not len(overlap) or overlap.max() <= 0:
        return None
    offsets = offsets[overlap >= 0.8 * overlap.max()]
    zone = (offsets + DAY_S / 2) % DAY_S - DAY_S / 2 if undated else offsets
    misfit = np.array([_misfit_of(moving, fixed, float(offset)) for offset in offsets])
    if np.isfinite(misfit).any():
        good = misfit <= np.nanmin(misfit) + _SLACK_BYTES
        offsets, zone = offsets[good], zone[good]
    return float(offsets[np.abs(zone).argmin()])


def _misfit_of(moving: Sequence[Part], fixed: Sequence[Part], offset: float) -> float:
    """The least misfit of any steps of one side with any device of the other."""
    found = [math.nan]
    for sampled, stepped, shift in ((moving, fixed, offset), (fixed, moving, -offset)):
        devices = [rows for part in sampled for rows in part.devices.values()]
        for steps in (rows for part in stepped for rows in part.steps.values()):
            found += [misfit(rows, steps, shift) for rows in devices]
    known = [value for value in found if not math.isnan(value)]
    return min(known, default=math.nan)


def misfit(rows: DeviceRows, steps: StepRows, offset: float = 0.0) -> float:
    """Bytes by which the device's memory, moved by `offset` seconds, fails to follow what PyTorch
    reserved: its spread around a constant, and what is less. NaN where they have no time in common."""
    if "reserved_bytes" not in steps.values:
        return math.nan
    at, reserved = np.asarray(steps.time_s), np.asarray(steps.values["reserved_bytes"])
    times, used = np.asarray(rows.time_s) + offset, np.asarray(rows.used_bytes)
    known = np.isfinite(times) & np.isfinite(used)
    if not known.any():
        return math.nan
    times, used = _sorted(times[known], used[known])
    inside = np.isfinite(at) & np.isfinite(reserved) & (at >= times[0]) & (at <= times[-1])
    if not inside.any():
        return math.nan
    beyond = np.interp(at[inside], times, used) - reserved[inside]
    lacking = np.maximum(-beyond - _SLACK_BYTES, 0.0)
    return float(np.abs(beyond - np.median(beyond)).mean() + lacking.mean())


def _sorted(times: Column, values: Column) -> tuple[Column, Column]:
    order = np.argsort(times, kind="stable")
    return times[order], values[order]


def move(part: Part, offset: float) -> None:
    """Adds `offset` seconds to every time of the part."""
    for column in part.times():
        view = np.frombuffer(column, dtype=np.float64)
        view += offset


def settle_events(part: Part) -> None:
    """Moves the events after a fall of the clock as far as the rows after it will be moved."""
    columns = [(rows.time_s, rows.used_bytes) for rows in part.devices.values()]
    columns += [(steps.time_s, steps.number) for steps in part.steps.values()]
    if not part.falls or not columns:
        return
    times, values = (np.asarray(c) for c in max(columns, key=lambda column: len(column[0])))
    known = np.isfinite(times)
    stepped_s = straighten(times[known], values[known]).stepped_s
    if len(stepped_s) != len(part.falls):  # rows out of order, of which events are sorted anyway
        return
    moved = np.zeros(len(part.events) + 1)
    for first, shift in zip(part.falls, stepped_s, strict=True):
        moved[first:] += shift
    part.events = [
        replace(event, time_s=event.time_s + float(shift))
        for event, shift in zip(part.events, moved, strict=False)
    ]


def find_device(steps: StepRows, devices: dict[str, DeviceRows]) -> tuple[str, str | None]:
    """The device whose memory moves with the steps', and a note where that is a guess.

    "0" where none was sampled.
    """
    if not devices:
        return "0", None
    if len(devices) == 1:
        return next(iter(devices)), None
    fits = {name: misfit(rows, steps) for name, rows in devices.items()}
    known = sorted((value, name) for name, value in fits.items() if not math.isnan(value))
    if len(known) > 1 and known[1][0] - known[0][0] > _SLACK_BYTES:
        return known[0][1], f"the steps name no device: memory of {known[0][1]} moves with them"
    name = known[0][1] if known else min(devices)
    return name, f"the steps name no device and several would fit: {name} was assumed"
