"""Units of memory that a file does not name: inferred where all others are impossible, else refused."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

import numpy as np

from draftline.errors import ConfigError
from draftline.signal.readers.rows import Part, StepRows
from draftline.signal.trace import GIB, MIB, Column

_UNITS = {"bytes": 1.0, "KiB": 1024.0, "MiB": float(MIB), "GiB": float(GIB)}
# No GPU with CUDA has less or more memory.
_LEAST_TOTAL, _MOST_TOTAL = 256 * MIB, 2048 * GIB
# PyTorch's allocator takes whole segments of the driver and gives tensors whole blocks.
_SEGMENT, _BLOCK = 2 * MIB, 512
_LEVELS = ("reserved_bytes", "peak_bytes", "allocated_bytes", "inactive_bytes")


class Bare:
    """Memory in cells without a unit, below a name without one: MiB, as nvidia-smi means it, where
    that can be."""

    def __init__(self) -> None:
        self._bare = self._united = False
        self._most = 0.0
        self._broken = False

    def see(self, bare: bool, value: float) -> None:
        """A number without a unit of its own; `bare` where no header gives it one."""
        self._bare |= bare
        self._united |= not bare
        if bare and math.isfinite(value):
            self._most = max(self._most, value)
            self._broken |= value != math.floor(value)

    def settle(self, part: Part) -> list[str]:
        """Brings the rows of `part` to bytes and returns what is to be said of it. Raises ConfigError
        where several units, or none, would fit."""
        if not self._bare or self._united or not self._most:
            return []
        totals = {r.total_bytes / MIB for r in part.devices.values() if r.total_bytes > 0}
        if totals:
            fit = [u for u, b in _UNITS.items() if _possible(min(totals), max(totals), b)]
            what = f"a memory in all of {max(totals):,.6g}"
        elif self._most * MIB > _MOST_TOTAL:
            fit = [u for u in ("bytes", "KiB") if self._most * _UNITS[u] <= _MOST_TOTAL]
            fit = fit if self._most * _UNITS["bytes"] < _MOST_TOTAL / 1024 else fit[:1]
            what = f"a memory in use of {self._most:,.6g}"
        elif self._broken and self._most < 1024:
            fit, what = ["MiB", "GiB"], f"a memory in use of {self._most:,.6g}, with fractions,"
        else:
            return []
        if "MiB" in fit and not (self._broken and not totals and self._most < 1024):
            return []
        if len(fit) != 1:
            raise ConfigError(
                f"{part.source}: {what} has no unit, and {' or '.join(fit) or 'no unit'} would fit; name "
                "it in the header, as in memory.used [GiB]"
            )
        factor = _UNITS[fit[0]] / MIB
        for rows in part.devices.values():
            rows.used_bytes = array("d", np.asarray(rows.used_bytes) * factor)
            rows.total_bytes *= factor
        for lists in part.processes.values():
            lists.bytes = array("d", np.asarray(lists.bytes) * factor)
        return [f"memory without a unit was taken as {fit[0]}: {what} cannot be MiB"]


def _possible(low: float, high: float, unit: float) -> bool:
    return low * unit >= _LEAST_TOTAL and high * unit <= _MOST_TOTAL


def settle_steps(source: str, steps: Mapping[str, StepRows], keys: Mapping[str, str]) -> list[str]:
    """Brings levels of the steps, whose `keys` in the file say no unit, to bytes; returns what is to be
    said of it. `keys` gives the key by the column's name.

    A level of PyTorch's allocator has at least one segment, and what it holds is whole segments. Raises
    ConfigError, naming the key, where several units or none would fit.
    """
    found = {
        name: np.concatenate(
            [np.asarray(r.values[name]) for r in steps.values() if name in r.values]
        )
        for name in _LEVELS
        if any(name in rows.values for rows in steps.values())
    }
    found = {n: v[np.isfinite(v) & (v > 0)] for n, v in found.items()}
    name = next((n for n in _LEVELS if n in found and len(found[n])), None)
    if name is None or name == "inactive_bytes":
        return []
    level = found[name]
    most = float(level.max())
    unnamed = [n for n in found if n in keys]
    if not unnamed:
        if most >= _SEGMENT:
            return []
        raise ConfigError(
            f"{source}: {name} of at most {most:,.6g} is impossible in bytes (PyTorch's allocator holds "
            f"at least {_SEGMENT:,}): write bytes, or a key that says the unit, as in "
            f"{name.removesuffix('_bytes')}_mb"
        )
    digits = _digits(np.concatenate([found[n] for n in unnamed if len(found[n])]))
    whole = _SEGMENT if name == "reserved_bytes" else _BLOCK
    can = [u for u, b in _UNITS.items() if _SEGMENT <= most * b <= _MOST_TOTAL]
    fit = [u for u in can if _is_whole(level * _UNITS[u], whole, _rounding(_UNITS[u], digits))]
    # A unit under which nothing can be told of segments is no finding against the others.
    shown = [u for u in fit if _rounding(_UNITS[u], digits) < whole / 4]
    fit = shown if fit == shown else can
    if "bytes" in can and (can == ["bytes"] or "bytes" in shown):
        fit = ["bytes"]
    key = keys.get(name, name)
    fit = fit or can
    if len(fit) != 1:
        raise ConfigError(
            f"{source}: {key} is {most:,.6g} at most and does not say in what; "
            f"{' or '.join(fit) or 'no unit'} would fit: rename it, as in {key}_mb, or write bytes"
        )
    if fit[0] == "bytes":
        _check_one_unit(source, steps, keys)
        return []
    factor = _UNITS[fit[0]]
    for rows in steps.values():
        for column in unnamed:
            if column in rows.values:
                rows.values[column] = array("d", np.asarray(rows.values[column]) * factor)
    _check_one_unit(source, steps, keys)
    told = ", ".join(keys[n] for n in unnamed)
    return [f"{told} taken as {fit[0]}: {most:,.6g} can be nothing else"]


def _digits(values: Column) -> int:
    """Decimals, up to 9, to which the values are given."""
    for digits in range(9):
        if np.allclose(
            values, np.round(values, digits), rtol=0, atol=1e-10 * max(1.0, values.max())
        ):
            return digits
    return 9


def _rounding(unit: float, digits: int) -> float:
    """Bytes by which a size was rounded; whole KiB and MiB are exact for what comes in segments."""
    return 0.0 if digits == 0 and unit <= MIB else unit * 10.0**-digits


def _is_whole(sizes: Column, unit: int, rounding: float) -> bool:
    """Whether every size is a multiple of `unit`, as far as its rounding lets it be told."""
    if rounding >= unit:
        return True
    off = np.abs(sizes - np.round(sizes / unit) * unit)
    return bool((off <= max(rounding, 1e-9 * sizes.max())).all())


def _check_one_unit(source: str, steps: Mapping[str, StepRows], keys: Mapping[str, str]) -> None:
    for rows in steps.values():
        if "allocated_bytes" not in rows.values or "reserved_bytes" not in rows.values:
            continue
        used = np.asarray(rows.values["allocated_bytes"])
        held = np.asarray(rows.values["reserved_bytes"])
        known = np.isfinite(used) & np.isfinite(held)
        if known.any() and (used > 1.05 * held)[known].mean() > 0.5:
            names = [keys.get(n, n) for n in ("allocated_bytes", "reserved_bytes")]
            raise ConfigError(
                f"{source}: {' and '.join(names)} cannot be in one unit: tensors would occupy "
                f"{np.nanmax(used):,.6g} of the {np.nanmax(held):,.6g} bytes that the allocator holds; "
                "name the unit in each key, as in allocated_mb"
            )
