"""Rows of `nvidia-smi --query-gpu=` and `--query-compute-apps=` with `--format=csv`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from draftline.signal.readers.clock import read_stamp
from draftline.signal.readers.columns import (
    INDEX_NAMES,
    Header,
    Role,
    Unnamed,
    has_no_value,
    read_bytes,
    read_header,
    read_quantity,
)
from draftline.signal.readers.identity import choose, one_to_one, read_index
from draftline.signal.readers.rows import DeviceRows, Part
from draftline.signal.readers.textfile import TextFile
from draftline.signal.readers.units import Bare
from draftline.signal.trace import MIB, one_line

_SAME_LIST_S = 0.1  # rows of one query are written at once
_MOST_WIDTHS = 4
_MOST_INDEX = 1024
_MOST_CELLS = 256
_HEAD_ROWS = 2048  # of a header, by which the column that names the device is chosen
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


def read(text: TextFile, before: Part | None = None) -> Part:
    """The rows of a file; one that continues the file `before` has no header of its own."""
    earlier = None if before is None else before.header
    reader = _QueryReader(text.name, earlier)
    part = reader.read(text.lines(whole=True))
    part.header = reader.header or earlier
    return part


class _QueryReader:
    """Makes a Part of the lines of one file.

    `header` says what the columns of an earlier file are: rows of a continued one have no header.
    Afterwards it holds those of this file.
    """

    def __init__(self, source: str, header: Header | None = None) -> None:
        self.part = Part(source, "query", clock="none")
        self.header: Header | None = None
        self._waiting: list[list[str]] = []  # rows below a header, until their device is known
        self._device: int | None = None  # the column that names it
        self._labels: dict[str, str] = {}  # the device by what that column says
        self._bare = Bare()
        self._earlier = header
        self._unnamed: dict[int, Unnamed] = {}
        self._bad = 0
        self._derived = False
        self._lists: dict[str, tuple[float, set[int]]] = {}

    def read(self, lines: Iterable[str]) -> Part:
        """The rows of all lines; a header may come again, and with other columns."""
        moment = ""  # of a line of date(1) above the rows of one query
        for line in lines:
            if not line.strip():
                continue
            cells = _cells(line)
            if len(cells) == 1 and read_stamp(cells[0]) is not None:
                moment = cells[0]
                continue
            header = read_header(cells)
            if moment and header is not None and "time" not in header.roles:
                header = header.with_time()
            elif moment and header is None and all(read_stamp(cell) is None for cell in cells):
                cells = [moment, *cells]
            if header is not None:
                self._replay(header)
                if header != self.header:
                    self._flush()
                self.header = header
            elif self.header is not None:
                self._waiting.append(cells)
                if len(self._waiting) >= _HEAD_ROWS:
                    self._flush(more=True)
            else:
                unnamed = self._unnamed.get(len(cells))
                if unnamed is None and len(self._unnamed) < _MOST_WIDTHS:
                    unnamed = self._unnamed[len(cells)] = Unnamed(len(cells))
                self._bad += unnamed is None or not unnamed.add(cells)
        self._flush()
        self._replay(None)
        if (nameless := self.part.devices.pop("", None)) is not None:
            if self.part.devices:
                self._bad += len(nameless.time_s)
            else:
                self._tell_devices(nameless)
        self.part.notes += self._bare.settle(self.part)
        if self._derived:
            self.part.notes.append("memory in use is what the total leaves beside the free memory")
        if self._bad:
            self.part.notes.append(f"{self._bad} line(s) could not be read")
        return self.part

    def _replay(self, header: Header | None) -> None:
        """Takes the rows that came before any header."""
        for unnamed in self._unnamed.values():
            if not set(unnamed.kinds) - {None, "text"}:  # prose, or no table at all
                self._bad += unnamed.rows
                continue
            best = max(u.rows for u in self._unnamed.values())
            known = next((h for h in (header, self._earlier) if unnamed.may_be(h)), None)
            if unnamed.rows < best or not best:
                self._bad += unnamed.rows
                continue
            if known is None:
                roles, notes = unnamed.roles()
                known = Header(tuple(roles), ("",) * len(roles), (None,) * len(roles))
                self.part.notes += notes
            self.header = known
            names = [list(n) for n in unnamed.names]
            for row in zip(*unnamed.values, strict=True):
                values: dict[Role, float | str] = {}
                for role, scale, kind, value, own in zip(
                    known.roles, known.scales, unnamed.kinds, row, names, strict=True
                ):
                    if role not in values:  # of several indices the first
                        values[role] = self._value(role, scale, kind, value, own)
                self._put(values, zoned=unnamed.zoned)
        self._unnamed = {}

    def _value(
        self, role: Role, scale: float | None, kind: str | None, value: float, names: list[str]
    ) -> float | str:
        if role in ("uuid", "bus"):
            return names[int(value)] if math.isfinite(value) and int(value) < len(names) else ""
        if kind == "number" and role in ("used", "total", "free", "held"):
            self._bare.see(scale is None, value)
            return value * (scale or MIB)
        return value

    def _flush(self, *, more: bool = False) -> None:
        """Takes the rows that wait; with `more` others of the same header follow."""
        rows, self._waiting = self._waiting, []
        if rows and self.header is not None and self._device is None:
            self._device = self._choose(self.header, [row for row in rows if self._fits(row)])
        for cells in rows:
            self._bad += not self._take(cells)
        if not more:
            self._device = None

    def _fits(self, cells: list[str]) -> bool:
        assert self.header is not None
        roles = self.header.roles
        # The only field with commas of its own is a process's name, which is not looked at.
        if (extra := len(cells) - len(roles)) > 0 and "pid" in roles:
            at = roles.index("pid") + 1
            if at < len(roles) and roles[at] == "skip":
                del cells[at : at + extra]
        return len(cells) == len(roles)

    def _choose(self, header: Header, rows: list[list[str]]) -> int:
        """The column that names the device, -1 for none; fills what its values are called."""
        order = ("uuid", "bus", *INDEX_NAMES)
        named = [
            (order.index(key), n)
            for n, (role, name) in enumerate(zip(header.roles, header.names, strict=True))
            if role in ("uuid", "bus", "index")
            and (key := name if role == "index" else role) in order
            and rows
            and (role != "index" or all(read_index(r[n]) is not None for r in rows))
        ]
        columns = [n for _, n in sorted(named)]
        if not columns:
            found = [n for n, role in enumerate(header.roles) if role in ("uuid", "bus", "index")]
            return found[0] if found else -1
        cells = [[row[n] for row in rows] for n in columns]
        stamps = (
            [read_stamp(row[header.roles.index("time")]) for row in rows]
            if ("time" in header.roles and "pid" not in header.roles)
            else []
        )
        times = np.array([math.nan if s is None else s.seconds for s in stamps])
        place = choose(cells, times if len(times) else None)
        chosen, own = columns[place], cells[place]
        for n in columns[:place]:
            self.part.notes.append(
                f"several rows of one moment have the same `{header.names[n]}`: devices are told apart by "
                f"`{header.names[chosen]}` instead"
            )
        if header.roles[chosen] != "index":
            for n, ids in zip(columns, cells, strict=True):
                if header.roles[n] == "index" and one_to_one(np.asarray(own), np.asarray(ids)):
                    self._labels |= {name: _label(i) for name, i in zip(own, ids, strict=True)}
                    break
        return chosen

    def _take(self, cells: list[str]) -> bool:
        assert self.header is not None
        if not self._fits(cells):
            return False
        row: dict[Role, float | str] = {}
        zoned = False
        for n, (role, scale, cell) in enumerate(
            zip(self.header.roles, self.header.scales, cells, strict=True)
        ):
            value: float | str | None
            if role == "skip" or (role == "index" and n != self._device):
                continue
            if role == "time":
                stamp = read_stamp(cell)
                value, zoned = (None, False) if stamp is None else (stamp.seconds, stamp.zoned)
            elif role in ("uuid", "bus"):
                value = one_line(cell, _LONGEST_NAME)
            elif role == "index":
                index = read_index(cell)
                value = math.nan if index is None and has_no_value(cell) else index
                value = None if value is None else float(value)
            elif role in ("used", "total", "free", "held"):
                value = read_bytes(cell, scale)
                if value is not None and cell[-1:].isdigit():
                    self._bare.see(scale is None, value / (scale or MIB))
            else:
                found = read_quantity(cell)
                value = None if found is None else found[0]
            if value is None:
                return False
            row[role] = value
        label = self._labels.get(cells[self._device]) if self._device not in (None, -1) else None
        self._put(row, zoned, label)
        return True

    def _put(self, row: dict[Role, float | str], zoned: bool, label: str | None = None) -> None:
        part = self.part
        numbers: dict[Role, float] = {k: v for k, v in row.items() if isinstance(v, float)}
        time_s, index = numbers.get("time", math.nan), numbers.get("index", math.nan)
        if "time" in row:
            part.clock = "utc" if zoned else "local"
        if not (math.isnan(index) or index in range(_MOST_INDEX)):
            self._bad += 1
            return
        others = [str(row[role]) for role in ("uuid", "bus") if role in row]
        name = label or (f"{index:.0f}" if index == index else others[0] if others else "")
        if others and name not in others and len(part.indices) < 2 * _MOST_INDEX:
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


def _label(cell: str) -> str:
    index = read_index(cell)
    return cell if index is None else str(index)


def _cells(line: str) -> list[str]:
    mark = "," if "," in line else ";" if ";" in line else "\t" if "\t" in line else ","
    if '"' in line:
        line = line.replace('"', "")
    return [cell.strip() for cell in line.split(mark, _MOST_CELLS)]
