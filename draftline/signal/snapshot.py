"""Memory snapshots of PyTorch's allocator (`torch.cuda.memory._dump_snapshot`), read without running
anything: a pickle can be a program, and this one may come from anywhere."""

from __future__ import annotations

import io
import pickle
import pickletools
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftline.errors import ConfigError
from draftline.signal.json_row import number
from draftline.signal.textfile import TextFile
from draftline.signal.trace import Snapshot

_MOST_BYTES = 1 << 29
# Of a compressed one: so much in any case, else so many times its size.
_UNPACKED_BYTES, _UNPACKED_TIMES = 1 << 26, 100
_LARGEST = 5
_MOST_DEVICES = 256
_MOST_FRAMES, _LOOKED_AT = 3, 100
# What builds containers, text and numbers, and keeps them for a second use; nothing that calls.
_HARMLESS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    )
)
_CONTAINERS = frozenset(("EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
# Memory goes back to the driver; several in a row are one flush of the cache.
_RETURNED = ("segment_free", "segment_unmap")
_LONGEST_INT = 9  # bytes; an unsigned address of 64 bits needs as many
# A snapshot's containers take some ten bytes each or more, one of nothing else would take one.
_BYTES_A_CONTAINER = 6
_FREE_CONTAINERS = 1000


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so is a pickle of a protocol that PyTorch writes."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: Path) -> tuple[list[Snapshot], list[str]]:
    """The allocator of each device that holds or held anything, and notes.

    Raises ConfigError for a file that would run code, would take much more memory than its size, is
    damaged, or is no snapshot. Nothing of it is run.
    """
    text = TextFile(path)
    most = min(_MOST_BYTES, max(_UNPACKED_BYTES, _UNPACKED_TIMES * path.stat().st_size))
    data = text.head(most + 1)
    if len(data) > most:
        raise ConfigError(
            f"{path} holds more than {most >> 20} MiB; record a shorter history "
            "(max_entries of torch.cuda.memory._record_memory_history)"
        )
    _check(path, data)
    try:
        tree = _Plain(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, TypeError, KeyError) as error:
        raise _damaged(path, str(error)) from None
    except (AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise _damaged(path, type(error).__name__) from None
    segments, traces = (_get(tree, key) for key in ("segments", "device_traces"))
    if not isinstance(segments, list) or not isinstance(traces, list | type(None)):
        raise ConfigError(
            f"{path} is a pickle, but no memory snapshot of PyTorch (no list of segments); "
            "write one with torch.cuda.memory._dump_snapshot"
        )
    budget = _Budget(path, len(data))
    devices: dict[int, _Device] = {}
    for segment in budget.items(segments):
        index = number(_get(segment, "device"))
        _device(devices, int(index) if index == index else 0).add_segment(segment, budget)
    for index, entries in enumerate(budget.items(traces)):
        if entries:
            _device(devices, index).add_trace(entries, budget)
    notes = [f"{budget.skipped} entries of an unknown form were left out"] if budget.skipped else []
    return [device.finished(str(i)) for i, device in sorted(devices.items())], notes


class _Plain(pickle.Unpickler):
    """The second lock: what `_check` let through cannot name anything to call."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _check(path: Path, data: bytes) -> None:
    """Raises ConfigError unless the pickle only builds plain values, within the size of the file."""
    puts = containers = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            name = opcode.name
            if name not in _HARMLESS:
                what = f" {argument!r:.80}" if isinstance(argument, str) else ""
                raise ConfigError(
                    f"{path} is refused: this pickle would run code ({name}{what} at byte "
                    f"{position}), which no memory snapshot does; do not load it elsewhere either"
                )
            if name in _CONTAINERS:
                containers += 1
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                puts += 1
                if isinstance(argument, int) and argument > puts:
                    raise _bomb(path, f"place {argument} of its memory")
            elif name == "LONG1" and isinstance(argument, int):
                if argument.bit_length() > 8 * _LONGEST_INT:
                    raise _bomb(path, f"an integer of {argument.bit_length()} bits")
            elif name == "FRAME" and isinstance(argument, int) and argument > len(data):
                raise _bomb(path, f"a frame of {argument} bytes")
    except (ValueError, EOFError, IndexError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None
    if containers > len(data) // _BYTES_A_CONTAINER + _FREE_CONTAINERS:
        raise _bomb(path, f"{containers} containers")


def _bomb(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} is refused: this pickle of {path.stat().st_size} bytes declares {what}, which would "
        "take far more memory than a snapshot of its size"
    )


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is a damaged pickle ({why:.200}); write the snapshot again")


class _Budget:
    """Ends the walk through values that refer to the same parts again and again."""

    def __init__(self, path: Path, left: int) -> None:
        self._path, self._left = path, left
        self.skipped = 0

    def items(self, values: Any) -> Iterator[Any]:
        if values is None:
            return
        if not isinstance(values, list | tuple):
            self.skipped += 1
            return
        for value in values:
            self._left -= 1
            if self._left < 0:
                raise _bomb(self._path, "the same parts again and again")
            yield value


class _Device:
    """What a snapshot says of one device."""

    def __init__(self) -> None:
        self._reserved = self._allocated = self._inactive = 0.0
        self._segments = self._flushes = self._ooms = 0
        self._live: list[tuple[float, str]] = []
        self._times, self._changes = array("d"), array("d")

    def add_segment(self, segment: Any, budget: _Budget) -> None:
        size = number(_get(segment, "total_size"))
        if not isinstance(segment, dict) or size != size:
            budget.skipped += 1
            return
        self._segments += 1
        self._reserved += size
        allocated = number(segment.get("allocated_size"))
        blocks = []
        for block in budget.items(segment.get("blocks")):
            held = number(_get(block, "size"))
            if held == held:
                blocks.append((held, block))
        active = [(held, block) for held, block in blocks if _is_live(block)]
        self._allocated += allocated if allocated == allocated else sum(h for h, _ in active)
        if active:
            # Free space within a segment that is in use: nobody can give it back.
            self._inactive += sum(held for held, _ in blocks) - sum(held for held, _ in active)
        self._live += [(held, _frames(block)) for held, block in _largest(active)]
        self._live = _largest(self._live)

    def add_trace(self, entries: Any, budget: _Budget) -> None:
        returning = False
        for entry in budget.items(entries):
            action, size = _get(entry, "action"), number(_get(entry, "size"))
            time_s = number(_get(entry, "time_us")) / 1e6
            if not isinstance(action, str):
                budget.skipped += 1
                continue
            returned = action in _RETURNED
            self._flushes += returned and not returning
            returning = returned
            self._ooms += action == "oom"
            change = {"alloc": size, "free_completed": -size}.get(action, 0.0)
            if change and change == change and time_s == time_s:
                self._times.append(time_s)
                self._changes.append(change)

    def finished(self, name: str) -> Snapshot:
        """Allocated bytes are counted back from the end, which the segments give."""
        times, changes = np.array(self._times), np.array(self._changes)
        levels = self._allocated - changes.sum() + np.cumsum(changes)
        order = np.argsort(times, kind="stable")
        history = np.column_stack([times, levels])[order] if len(times) else np.zeros((0, 2))
        return Snapshot(
            device=name,
            reserved_bytes=self._reserved,
            allocated_bytes=self._allocated,
            inactive_bytes=self._inactive,
            segments=self._segments,
            history=history,
            flushes=self._flushes,
            ooms=self._ooms,
            largest=tuple(self._live),
        )


def _device(devices: dict[int, _Device], index: int) -> _Device:
    if index not in devices and len(devices) >= _MOST_DEVICES:
        index = next(iter(devices))
    return devices.setdefault(index, _Device())


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _is_live(block: Any) -> bool:
    state = _get(block, "state")
    return isinstance(state, str) and state.startswith("active")


def _largest(blocks: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    return sorted(blocks, key=lambda block: -block[0])[:_LARGEST]


def _frames(block: Any) -> str:
    """The innermost frames that are not PyTorch's own, as file:line function."""
    frames = _get(block, "frames")
    words: list[str] = []
    for frame in frames[:_LOOKED_AT] if isinstance(frames, list | tuple) else ():
        file, line, function = (_get(frame, key) for key in ("filename", "line", "name"))
        if not (isinstance(file, str) and isinstance(line, int) and isinstance(function, str)):
            continue
        if file.endswith(".py") and "/torch/" not in file and len(words) < _MOST_FRAMES:
            words.append(f"{Path(file[-200:]).name}:{line} {function[:80]}")
    return " < ".join(words)
