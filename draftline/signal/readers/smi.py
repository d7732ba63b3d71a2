"""Rows of `nvidia-smi --query-gpu=` and `--query-compute-apps=` with `--format=csv`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from draftline.signal.readers.clock import read_stamp
from draftline.signal.readers.columns import (
    Role,
    Unnamed,
    read_bytes,
    read_header,
    read_quantity,
)
from draftline.signal.readers.rows import DeviceRows, Part
from draftline.signal.trace import MIB, one_line

_SAME_LIST_S = 0.1  # rows of one query are written at once
_MOST_WIDTHS = 4
_MOST_INDEX = 1024
_MOST_CELLS = 256
_LONGEST_NAME = 80  # characters of a uuid or bus id


def recognises(line: str) -> bool:
    """Whether the line may be a header or a row of such a query."""
    cells = _cells(line)
    if len(cells) < 2:
        return read_header(cells) is not None
    if read_header(cells) is not None:
        return True
    quantities = [read_quantity(cell) for cell in cells]
    return any(q is not None for q in quantities) and (
        any(q is not None and q[1] in ("MiB", "MB", "%") for q in quantities)
        or any(read_stamp(cell) is not None for cell in cells)
        or all(q is not None for q in quantities)
    )


class QueryReader:
    """Makes a Part of the lines of one file.

    `header` are the roles of the columns of an earlier file: rows of a continued one have no header.
    Afterwards it holds those of this file.
    """

    def __init__(self, source: str, header: Sequence[Role] | None = None) -> None:
        self.part = Part(source, "query", clock="none")
        self.header: Sequence[Role] | None = None
        self._earlier = header
        self._unnamed: dict[int, Unnamed] = {}
        self._bad = 0
        self._derived = False
        self._lists: dict[str, tuple[float, set[int]]] = {}

    def read(self, lines: Iterable[str]) -> Part:
        """The rows of all lines; a header may come again, and with other columns."""
        for line in lines:
            if not line.strip():
                continue
            cells = _cells(line)
            roles = read_header(cells)
            if roles is not None:
                self._replay(roles)
                self.header = roles
            elif self.header is not None:
                self._bad += not self._take(cells)
            else:
                unnamed = self._unnamed.get(len(cells))
                if unnamed is None and len(self._unnamed) < _MOST_WIDTHS:
                    unnamed = self._unnamed[len(cells)] = Unnamed(len(cells))
                self._bad += unnamed is None or not unnamed.add(cells)
        self._replay(None)
        if (nameless := self.part.devices.pop("", None)) is not None:
            if self.part.devices:
                self._bad += len(nameless.time_s)
            else:
                self._tell_devices(nameless)
        if self._derived:
            self.part.notes.append("memory in use is what the total leaves beside the free memory")
        if self._bad:
            self.part.notes.append(f"{self._bad} line(s) could not be read")
        return self.part

    def _replay(self, roles: Sequence[Role] | None) -> None:
        """Takes the rows that came before any header."""
        for unnamed in self._unnamed.values():
            best = max(u.rows for u in self._unnamed.values())
            known = next((r for r in (roles, self._earlier) if unnamed.may_be(r)), None)
            if unnamed.rows < best or not best:
                self._bad += unnamed.rows
                continue
            if known is None:
                known, notes = unnamed.roles()
                self.part.notes += notes
            self.header = known
            names = [list(n) for n in unnamed.names]
            for row in zip(*unnamed.values, strict=True):
                self._put(
                    {
                        role: _value(role, kind, value, own)
                        for role, kind, value, own in zip(
                            known, unnamed.kinds, row, names, strict=True
                        )
                    },
                    zoned=unnamed.zoned,
                )
        self._unnamed = {}

    def _take(self, cells: list[str]) -> bool:
        assert self.header is not None
        # The only field with commas of its own is a process's name, which is not looked at.
        if (extra := len(cells) - len(self.header)) > 0 and "pid" in self.header:
            at = self.header.index("pid") + 1
            if at < len(self.header) and self.header[at] == "skip":
                del cells[at : at + extra]
        if len(cells) != len(self.header):
            return False
        row: dict[Role, float | str] = {}
        zoned = False
        for role, cell in zip(self.header, cells, strict=True):
            value: float | str | None
            if role == "skip":
                continue
            if role == "time":
                stamp = read_stamp(cell)
                value, zoned = (None, False) if stamp is None else (stamp.seconds, stamp.zoned)
            elif role in ("uuid", "bus"):
                value = one_line(cell, _LONGEST_NAME)
            elif role in ("used", "total", "free", "held"):
                value = read_bytes(cell)
            else:
                found = read_quantity(cell)
                value = None if found is None else found[0]
            if value is None:
                return False
            row[role] = value
        self._put(row, zoned)
        return True

    def _put(self, row: dict[Role, float | str], zoned: bool) -> None:
        part = self.part
        numbers: dict[Role, float] = {k: v for k, v in row.items() if isinstance(v, float)}
        time_s, index = numbers.get("time", math.nan), numbers.get("index", math.nan)
        if "time" in row:
            part.clock = "utc" if zoned else "local"
        if not (math.isnan(index) or index in range(_MOST_INDEX)):
            self._bad += 1
            return
        others = [str(row[role]) for role in ("uuid", "bus") if role in row]
        name = f"{index:.0f}" if index == index else others[0] if others else ""
        if others and index == index and len(part.indices) < 2 * _MOST_INDEX:
            part.indices.update(dict.fromkeys(others, name))
        if "pid" in row:
            self._list(name, time_s, numbers.get("pid", math.nan), numbers.get("held", math.nan))
            return
        used, total = numbers.get("used", math.nan), numbers.get("total", math.nan)
        if "used" not in row and "free" in row:
            used = max(total - numbers.get("free", math.nan), 0.0)
            self._derived = True
        rows = part.device(name)
        if rows is None:
            self._bad += 1
            return
        rows.add(time_s, used, numbers.get("util", math.nan))
        if total == total:
            rows.total_bytes = total

    def _list(self, name: str, time_s: float, pid: float, held: float) -> None:
        lists = self.part.listing(name)
        if lists is None or not 0 < pid < 2**53:
            self._bad += 1
            return
        last_s, seen = self._lists.get(name, (-math.inf, set[int]()))
        if pid in seen or abs(time_s - last_s) > _SAME_LIST_S or not len(lists.time_s):
            lists.begin(time_s)
            seen = set()
        seen.add(int(pid))
        self._lists[name] = (time_s, seen)
        lists.see(int(pid), held)

    def _tell_devices(self, rows: DeviceRows) -> None:
        """Names devices by their place in each query, since no column does."""
        part, count = self.part, _rows_a_query(np.asarray(rows.time_s))
        for n in range(count):
            own = part.device(str(n))
            assert own is not None
            for column in ("time_s", "used_bytes", "util_pct"):
                setattr(own, column, getattr(rows, column)[n::count])
            own.total_bytes = rows.total_bytes
        what = "one device, called 0" if count == 1 else f"{count} devices, named by their order"
        part.notes.append(f"no column names the device: taken as {what}")


def _rows_a_query(times: np.typing.NDArray[np.float64]) -> int:
    """How many rows each query wrote, judged by the time between them; 1 where that is unclear."""
    between = np.diff(times)
    if len(between) < 2 or not np.isfinite(between).all():
        return 1
    starts = np.flatnonzero(between > np.quantile(between, 0.95) / 4) + 1
    counts = np.diff(np.concatenate(([0], starts, [len(times)])))
    count = int(counts[0])
    return count if (counts == count).all() and count <= 64 else 1


def _value(role: Role, kind: str | None, value: float, names: list[str]) -> float | str:
    if role in ("uuid", "bus"):
        return names[int(value)] if math.isfinite(value) and int(value) < len(names) else ""
    if kind == "number" and role in ("used", "total", "free", "held"):
        return value * MIB
    return value


def _cells(line: str) -> list[str]:
    mark = "," if "," in line else ";" if ";" in line else "\t" if "\t" in line else ","
    if '"' in line:
        line = line.replace('"', "")
    return [cell.strip() for cell in line.split(mark, _MOST_CELLS)]
