"""Columns that rise in time, from rows in the order, and with the faults, of a file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftline.errors import ConfigError
from draftline.signal.readers.clock import median_period, spread, straighten
from draftline.signal.readers.rows import DeviceRows, ProcessRows, StepRows
from draftline.signal.trace import TOTALS, Column, Samples, Steps

MOST_PROCESSES = 16  # each costs a column as long as its device's
_GAP_PERIODS = 5
# Runs shorter than this, on average, are no runs: counters or numbers start again by themselves.
_LEAST_RUN = 3
_MIXED = 0.3  # of the steps


def finish_samples(
    device: str, rows: DeviceRows | None, lists: ProcessRows | None, *, dated: bool
) -> tuple[Samples | None, list[str]]:
    """The samples of a device, straight in time, and notes on what was mended.

    Without readings of the device its memory is the sum of its processes. None where nothing is left.
    """
    notes: list[str] = []
    by_process: dict[int, Column] = {}
    list_times, tables = _lists(lists, notes)
    if rows is None or not len(rows.time_s):
        if list_times is None:
            return None, notes
        rows = DeviceRows()
        rows.time_s = array("d", list_times)
        rows.used_bytes = array("d", tables.pop(None))
        rows.util_pct = array("d", [math.nan]) * len(rows.time_s)
        notes.append("memory is the sum of the processes listed; the driver's own share is missing")
    time_s = np.asarray(rows.time_s)
    if not np.isfinite(time_s).any():
        time_s, dated = np.arange(len(time_s), dtype=np.float64), False
        notes.append("the rows carry no time: 1 s between them is assumed")
    known = np.flatnonzero(np.isfinite(time_s))
    if len(known) < len(time_s):
        notes.append(f"{len(time_s) - len(known)} rows without a time were left out")
    straight = straighten(time_s[known], np.asarray(rows.used_bytes)[known])
    picked, times = known[straight.order], straight.time_s
    used, util = np.asarray(rows.used_bytes)[picked], np.asarray(rows.util_pct)[picked]
    new = _new(times, used, util)
    notes += _clock_notes(straight.stepped_s, straight.moved, int((~new).sum()))
    times, used, util = spread(times[new]), used[new], util[new]
    notes += _gap_notes(times)
    if list_times is not None:
        at = np.searchsorted(list_times, times, side="right") - 1
        age = times - list_times[np.maximum(at, 0)]
        # A list holds until the next one, or until it is clearly overdue.
        fresh = (at >= 0) & (age <= 3 * median_period(list_times))
        by_process = {
            pid: np.where(fresh, table[np.maximum(at, 0)], np.nan)
            for pid, table in tables.items()
            if pid is not None
        }
    total = None if math.isnan(rows.total_bytes) else rows.total_bytes
    return Samples(device, times, used, util, total, by_process, dated), notes


def _lists(
    lists: ProcessRows | None, notes: list[str]
) -> tuple[Column | None, dict[int | None, Column]]:
    """Times of the lists and a column by process, that of None being their sum."""
    if lists is None or not len(lists.time_s):
        return None, {}
    count, entry_list = len(lists.time_s), np.asarray(lists.list_no)
    used, pids = np.asarray(lists.bytes), np.asarray(lists.pid)
    time_s = np.asarray(lists.time_s)
    if not np.isfinite(time_s).any():
        time_s = np.arange(count, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(time_s))
    in_all = np.bincount(entry_list, weights=used, minlength=count).astype(np.float64)
    straight = straighten(time_s[known], in_all[known])
    order = known[straight.order]

    def column(chosen: npt.NDArray[np.bool_]) -> Column:
        sums = np.bincount(entry_list[chosen], weights=used[chosen], minlength=count)
        return np.asarray(sums[order], dtype=np.float64)

    names, codes = np.unique(pids, return_inverse=True)
    weight = np.bincount(codes, weights=np.nan_to_num(used) + 1.0, minlength=len(names))
    heaviest = np.sort(np.argsort(-weight, kind="stable")[:MOST_PROCESSES])
    if len(names) > len(heaviest):
        notes.append(f"of {len(names)} processes the {len(heaviest)} with most memory are shown")
    tables: dict[int | None, Column] = {int(names[c]): column(codes == c) for c in heaviest}
    tables[None] = in_all[order]
    return spread(straight.time_s), tables


def _new(times: Column, *columns: Column) -> npt.NDArray[np.bool_]:
    """False for a row that repeats the one before it. Whole seconds repeat by themselves."""
    new = np.ones(len(times), dtype=bool)
    if len(times) > 1 and not np.equal(times, np.floor(times)).all():
        same = np.diff(times) == 0
        for column in columns:
            same &= column[1:].view(np.int64) == column[:-1].view(np.int64)
        new[1:] = ~same
    return new


def _clock_notes(stepped_s: Sequence[float], moved: int, repeated: int) -> list[str]:
    found = []
    if stepped_s:
        found.append(
            f"the clock went back {len(stepped_s)} time(s), by {max(stepped_s):.0f} s at most; "
            "what follows was moved to after what came before"
        )
    if moved:
        found.append("rows out of order were sorted by time")
    if repeated:
        found.append(f"{repeated} repeated rows were left out")
    return found


def _gap_notes(times: Column) -> list[str]:
    """Says where nothing was recorded for more than five usual periods."""
    if len(times) < 3:
        return []
    between, period = np.diff(times), median_period(times)
    gaps = between[between > _GAP_PERIODS * period]
    if not len(gaps):
        return []
    return [f"{len(gaps)} gap(s) in the samples, the longest {gaps.max():.1f} s"]


def finish_steps(device: str, rows: StepRows) -> tuple[Steps | None, list[str]]:
    """The steps of the last run in `rows`, straight in time, and notes. None where nothing is left."""
    notes: list[str] = []
    time_s, wall_ms = np.asarray(rows.time_s), np.asarray(rows.wall_ms)
    if not len(time_s):
        return None, notes
    if not np.isfinite(time_s).any():
        time_s = np.cumsum(np.where(np.isfinite(wall_ms), wall_ms, 1000.0)) / 1000
        notes.append("the steps carry no time: their durations were added up (1 s where unknown)")
    known = np.flatnonzero(np.isfinite(time_s))
    if len(known) < len(time_s):
        notes.append(f"{len(time_s) - len(known)} steps without a time were left out")
    picked, times, said = _ordered(known, time_s[known], np.asarray(rows.number)[known])
    notes += said
    number = np.asarray(rows.number)[picked]
    new = np.ones(len(times), dtype=bool)
    new[1:] = (np.diff(times) != 0) | (np.diff(number) != 0)
    if not new.all():
        notes.append(f"{int((~new).sum())} repeated steps were left out")
    picked, times, number = picked[new], times[new], number[new]
    values = {name: np.asarray(column)[picked] for name, column in rows.values.items()}
    start, number = _last_run(number, values, notes)
    times, wall_ms = spread(times)[start:], wall_ms[picked][start:]
    values = {
        name: _risen(c[start:]) if name in TOTALS else c[start:] for name, c in values.items()
    }
    if len(times) > 1:
        since = np.append(np.nan, np.diff(times) * 1000)
        since[0] = since[1]
        wall_ms = np.where(np.isfinite(wall_ms), wall_ms, since)
    return Steps(device, number[start:], times, wall_ms, values), notes


def refuse_mixed(source: str, rows: StepRows) -> None:
    """Raises ConfigError for steps of several processes in turn that nothing tells apart: their numbers
    do not rise, in far less time than a step takes, and what they hold differs."""
    time_s, number = np.asarray(rows.time_s), np.asarray(rows.number)
    same = np.diff(number) <= 0
    if not same.any() or same.all() or same.mean() < _MIXED or not np.isfinite(time_s).all():
        return
    between = np.diff(time_s)
    # A step that is recorded in parts takes its time for each.
    if np.median(between[same]) > 0.1 * np.median(between[~same]):
        return
    columns = [np.asarray(column) for column in rows.values.values()]
    if max((float(np.mean(np.diff(c)[same] != 0)) for c in columns), default=0.0) > 0.5:
        raise ConfigError(
            f"{source}: {same.sum() + 1:,} of {len(number):,} steps have the number of another one at the "
            "same moment and other values, so they are of several processes: name the device in each line "
            "(`device` or `local_rank`), or diagnose the lines of each process by themselves"
        )


def _ordered(
    rows: npt.NDArray[np.intp], time_s: Column, number: Column
) -> tuple[npt.NDArray[np.intp], Column, list[str]]:
    """Rows in order and their times. Where numbers rise the order is theirs: threads may end a step
    later than the next one."""
    straight = straighten(time_s, number)
    if straight.moved and (np.diff(number) > 0).all():
        return rows, np.maximum.accumulate(time_s), []
    said = _clock_notes(straight.stepped_s, straight.moved, 0)
    return rows[straight.order], straight.time_s, said


def _last_run(number: Column, values: dict[str, Column], notes: list[str]) -> tuple[int, Column]:
    """The row with which the last run begins, and step numbers that rise within it."""
    restarts = np.flatnonzero(np.diff(number) <= 0) + 1
    if len(restarts) and len(number) < _LEAST_RUN * (len(restarts) + 1):
        notes.append("step numbers repeat or go back and forth: they were counted anew")
        number, restarts = np.arange(len(number), dtype=np.float64), restarts[:0]
    totals = [column for name, column in values.items() if name in TOTALS]
    resets = np.flatnonzero(_all_fell(totals, len(number))) + 1
    if len(number) >= _LEAST_RUN * (len(resets) + 1):
        restarts = np.union1d(restarts, resets)
    if not len(restarts):
        return 0, number
    start = int(restarts[-1])
    why = "step numbers or counters start again"
    notes.append(f"{why}: only the last run was kept, {start} earlier steps left out")
    return start, number


def _all_fell(totals: Sequence[Column], rows: int) -> npt.NDArray[np.bool_]:
    """[rows - 1] whether every total that had counted anything begins anew, as in a new process."""
    fell = np.zeros(max(rows - 1, 0), dtype=bool)
    stayed = np.zeros_like(fell)
    for column in totals:
        before, after = column[:-1], column[1:]
        fell |= after < before
        stayed |= (after >= before) & (before > 0)
    return fell & ~stayed


def _risen(total: Column) -> Column:
    """A total that never falls: what was counted before a reset is added to what follows."""
    known = np.flatnonzero(np.isfinite(total))
    counted = total[known]
    falls = np.flatnonzero(np.diff(counted) < 0)
    if not len(falls):
        return total
    carried = np.zeros(len(counted))
    carried[falls + 1] = counted[falls]
    risen = total.copy()
    risen[known] = counted + np.cumsum(carried)
    return risen
