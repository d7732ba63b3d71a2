"""What the columns of comma-separated rows hold: from their names, or without any from the values."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from draftline.errors import ConfigError
from draftline.signal.readers.clock import read_stamp
from draftline.signal.readers.identity import collisions, instants, one_to_one
from draftline.signal.readers.json_row import MOST
from draftline.signal.trace import MIB, one_line

Role = Literal[
    "time", "index", "uuid", "bus", "used", "total", "free", "util", "pid", "held", "skip"
]
Kind = Literal["time", "uuid", "bus", "bytes", "pct", "number", "text"]

# Fields of `nvidia-smi --help-query-gpu` and `--help-query-compute-apps`, aliases included, and the
# names that loggers give the same things; what is no letter or digit counts as a dot.
_NAMES: dict[str, Role] = {
    "timestamp": "time",
    "uuid": "uuid",
    "gpu.uuid": "uuid",
    "pci.bus.id": "bus",
    "gpu.bus.id": "bus",
    "index": "index",
    "memory.used": "used",
    "memory.total": "total",
    "memory.free": "free",
    "utilization.gpu": "util",
    "pid": "pid",
    "used.memory": "held",
    "used.gpu.memory": "held",
}
# Loggers call the device so; such a column alone makes no header. In the order of their say.
INDEX_NAMES = ("gpu", "gpu.id", "gpu.index", "gpu.idx", "index", "device", "device.id")
_MEMORY = ("used", "total", "free", "held")
_BYTES = {"": MIB, "b": 1.0, "kb": 1024.0, "mb": MIB, "gb": 1024 * MIB, "tb": MIB * MIB}
_QUANTITY = re.compile(r"(-?\d{1,300}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,5})?) ?([A-Za-z%]{0,5})")
_BRACKETED = re.compile(r"(.{1,80}?)[\s._]*[\[(]\s*([^\[\]()]{0,20}?)\s*[\])]")
_SUFFIXED = re.compile(
    r"(.{1,80}?)(?:[\s._-]+([KMGT]?i?B|bytes?)|(?<=[a-z])([KMGT]i?B))", re.IGNORECASE
)
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F/-]{8,60}")
_BUS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_NO_VALUE = frozenset(("", "-", "n/a", "not supported", "unknown error", "no permission"))
_INDICES = 64  # GPUs of one machine, at most
_LARGE = 128  # a bare number above is a process id, not a temperature
_MOST_NAMES = 1024


@dataclass(frozen=True, slots=True)
class Header:
    """What the columns hold: `roles`, their plain `names`, and bytes of one unit of each that holds
    memory, None where its name says no unit."""

    roles: tuple[Role, ...]
    names: tuple[str, ...]
    scales: tuple[float | None, ...]

    def with_time(self) -> Header:
        """The same behind a column of times."""
        return Header(("time", *self.roles), ("timestamp", *self.names), (None, *self.scales))


def read_header(cells: Sequence[str]) -> Header | None:
    """What the columns hold where `cells` are names of nvidia-smi's fields, else None.

    Raises ConfigError for memory in a unit that is none of memory.
    """
    if cells[0][:1].isdigit():  # every row of data would go through all that follows
        return None
    parted = [_part(cell) for cell in cells]
    if not any(name in _NAMES for name, _ in parted) or any(n[:1].isdigit() for n, _ in parted):
        return None
    roles: list[Role] = []
    scales: list[float | None] = []
    for cell, (name, unit) in zip(cells, parted, strict=True):
        # A share called "gpu" is no device.
        role: Role = _NAMES.get(name, "index" if name in INDEX_NAMES and not unit else "skip")
        scale = unit_bytes(unit) if unit else None
        if role in _MEMORY and unit and scale is None:
            raise ConfigError(
                f"the column {one_line(cell, 80)!r} gives memory in {one_line(unit, 20)!r}, which is no "
                "unit of memory; known are B, KiB, MiB, GiB and TiB (KB to TB are read as these): name "
                "the right one in the header"
            )
        roles.append(role)
        scales.append(scale)
    return Header(tuple(roles), tuple(name for name, _ in parted), tuple(scales))


def _part(cell: str) -> tuple[str, str]:
    """The plain name and the unit of a column's name, "" where it has none."""
    name, unit = cell[:120], ""
    if (m := _BRACKETED.fullmatch(name)) is not None:
        name, unit = m[1], m[2]
    elif (m := _SUFFIXED.fullmatch(name)) is not None:
        name, unit = m[1], m[2] or m[3]
    return re.sub(r"[^a-z0-9]+", ".", name.lower()).strip("."), unit


def unit_bytes(unit: str) -> float | None:
    """Bytes of a unit of memory in any spelling, MiB for none; None for what is no such unit. 1 MB is
    taken for 1 MiB, as nvidia-smi and PyTorch mean it."""
    plain = unit.lower()
    plain = "b" if plain in ("byte", "bytes") else plain.replace("ib", "b")
    return _BYTES.get(plain)


def has_no_value(cell: str) -> bool:
    """Whether the cell says that there is no value, as [N/A] or [Not Supported] do."""
    return (cell[:1] == "[" and cell[-1:] == "]") or cell.lower() in _NO_VALUE


def read_quantity(cell: str) -> tuple[float, str] | None:
    """The number and unit of a cell, NaN for one that cannot be; None for what is no quantity."""
    if not cell[:1].isdigit() and has_no_value(cell):
        return math.nan, ""
    m = _QUANTITY.fullmatch(cell)
    if m is None:
        return None
    value = float(m[1])
    return (value if 0 <= value < MOST else math.nan), m[2]


def read_bytes(cell: str, scale: float | None = None) -> float | None:
    """Bytes of a cell of memory, in units of `scale` bytes, else MiB, where it names none; None for
    what is none."""
    found = read_quantity(cell)
    if found is None:
        return None
    own = unit_bytes(found[1]) if found[1] or scale is None else scale
    value = math.nan if own is None else found[0] * own
    return None if own is None else value if value < MOST else math.nan


class Unnamed:
    """Rows of one width whose columns have no names, kept as numbers until all are there."""

    def __init__(self, width: int) -> None:
        self.kinds: list[Kind | None] = [None] * width
        self.values = [array("d") for _ in range(width)]  # a place in `names` for what is no number
        self.names: list[dict[str, int]] = [{} for _ in range(width)]
        self.zoned = False

    @property
    def rows(self) -> int:
        return len(self.values[0])

    def add(self, cells: Sequence[str]) -> bool:
        """Takes a row in; False where a cell is of another kind than its column."""
        row: list[float] = []
        for cell, kind, names in zip(cells, self.kinds, self.names, strict=True):
            own, value = self._read(cell, names)
            if own is not None and kind is not None and own != kind:
                return False
            row.append(value)
            if own is not None and kind is None:
                self.kinds[len(row) - 1] = own
        for column, value in zip(self.values, row, strict=True):
            column.append(value)
        return True

    def _read(self, cell: str, names: dict[str, int]) -> tuple[Kind | None, float]:
        if has_no_value(cell):
            return None, math.nan
        if (stamp := read_stamp(cell)) is not None:
            self.zoned = stamp.zoned
            return "time", stamp.seconds
        if (found := read_quantity(cell)) is not None:
            value, unit = found
            if unit == "%":
                return "pct", value
            if unit and (scale := unit_bytes(unit)) is not None:
                return "bytes", value * scale
            return ("text", 0.0) if unit else ("number", value)
        kind: Kind = "uuid" if _UUID.fullmatch(cell) else "bus" if _BUS.fullmatch(cell) else "text"
        if kind == "text" or (cell not in names and len(names) >= _MOST_NAMES):
            return kind, math.nan
        return kind, float(names.setdefault(cell, len(names)))

    def may_be(self, header: Header | None) -> bool:
        """Whether the columns can be those of the header."""
        if header is None or len(header.roles) != len(self.kinds):
            return False
        roles = header.roles
        fit: dict[str, tuple[str, ...]] = {k: (k,) for k in ("time", "uuid", "bus")}
        fit |= dict.fromkeys(("index", "pid"), ("number",))
        fit |= dict.fromkeys(("used", "total", "free", "held"), ("bytes", "number"))
        fit["util"] = ("pct", "number")
        return all(
            role == "skip" or kind is None or kind in fit[role]
            for role, kind in zip(roles, self.kinds, strict=True)
        )

    def roles(self) -> tuple[list[Role], list[str]]:
        """What each column holds, judged by all rows, with notes; unknown where two are alike."""
        found: list[Role] = ["skip"] * len(self.kinds)
        for kind in ("time", "uuid", "bus"):
            if kind in self.kinds:
                found[self.kinds.index(kind)] = kind
        of = {k: [n for n, own in enumerate(self.kinds) if own == k] for k in ("bytes", "pct")}
        numbers = [n for n, own in enumerate(self.kinds) if own == "number" and self._whole(n)]
        index = next((n for n in numbers if self._names_devices(n, found)), None)
        if index is not None:
            found[index] = "index"
            numbers.remove(index)
        memory, shares = of["bytes"], of["pct"]
        large = [n for n in numbers if self._finite(n).max() > _LARGE]
        if len(memory) == 1 and not shares and large:
            found[large[0]], found[memory[0]] = "pid", "held"
            return found, [self._say(found)]
        if not memory:
            memory = [n for n in numbers if np.nanmax(self.values[n]) > 100]
            shares = shares or [n for n in numbers if n not in memory]
        self._name_memory(found, memory)
        share = self._above(shares)
        if share is not None:
            found[share] = "util"
        notes = [self._say(found)]
        if "used" not in found:
            notes.append("which column is the memory in use cannot be told: record with a header")
        return found, notes

    def _name_memory(self, found: list[Role], memory: list[int]) -> None:
        top = self._above(memory)
        if len(memory) > 1 and top is not None and len(np.unique(self._finite(top))) <= 2:
            found[top] = "total"
            memory = [n for n in memory if n != top]
        if len(memory) == 1:
            found[memory[0]] = "used"

    def _above(self, columns: list[int]) -> int | None:
        """The column that is never below another one of `columns`, None where there is none."""
        if not columns:
            return None
        table = np.nan_to_num(np.array([self.values[n] for n in columns]))
        top = int(table.sum(axis=1).argmax())
        return columns[top] if (table[top] >= table).all() else None

    def _whole(self, column: int) -> bool:
        values = self._finite(column)
        return len(values) > 0 and bool((values == np.floor(values)).all())

    def _names_devices(self, column: int, found: Sequence[Role]) -> bool:
        """Whether the numbers are devices: temperatures, PCIe generations and shares look alike."""
        values = np.asarray(self.values[column])
        if not np.isfinite(values).all():
            return False
        for role in ("uuid", "bus"):
            if role in found:
                return one_to_one(np.asarray(self.values[found.index(role)]), values)
        ids, counts = np.unique(values, return_counts=True)
        # In turn, each comes about as often as the others.
        if counts.max() - counts.min() > max(2, 0.02 * len(values)):
            return False
        # All of a machine count from 0; some of them are believed where a query has them by habit.
        second = list(found[:column]) == ["time"]
        if not (ids == np.arange(len(ids))).all() and not (second and ids.max() < _INDICES):
            return False
        if "time" not in found:
            return True
        times = np.asarray(self.values[found.index("time")])
        return not np.isfinite(times).all() or collisions(values, instants(times)) == 0.0

    def _finite(self, column: int) -> npt.NDArray[np.float64]:
        values: npt.NDArray[np.float64] = np.asarray(self.values[column])
        return values[np.isfinite(values)]

    @staticmethod
    def _say(found: Sequence[Role]) -> str:
        words = {
            "held": "memory of a process",
            "used": "memory in use",
            "total": "memory in all",
            "util": "utilization",
            "pid": "process",
        }
        said = [
            f"{n} as {words.get(role, role)}" for n, role in enumerate(found, 1) if role != "skip"
        ]
        return f"no header: took column {', '.join(said) or 'none for anything'}"
