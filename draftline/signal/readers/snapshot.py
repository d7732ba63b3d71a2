"""Memory snapshots of PyTorch's allocator, as `torch.cuda.memory._dump_snapshot` writes them."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from draftline.errors import ConfigError
from draftline.signal.readers.json_row import number
from draftline.signal.readers.plain_pickle import HostilePickleError, PickleError, items, load_plain
from draftline.signal.readers.textfile import TextFile
from draftline.signal.trace import Snapshot, one_line

_MOST_BYTES = 1 << 29
# Of a compressed one: so much in any case, else so many times its size.
_UNPACKED_BYTES, _UNPACKED_TIMES = 1 << 26, 100
_LARGEST = 5
_MOST_DEVICES = 256
_MOST_FRAMES, _LOOKED_AT = 3, 100
# Memory goes back to the driver; several in a row are one flush of the cache.
_RETURNED = ("segment_free", "segment_unmap")
_KEYS = (
    *("segments", "device_traces", "device", "total_size", "allocated_size", "blocks", "size"),
    *("state", "frames", "filename", "line", "name", "action", "time_us"),
)


def looks_like(head: bytes) -> bool:
    """Whether a file that begins so is a pickle of a protocol that PyTorch writes."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def read_snapshot(path: Path) -> tuple[list[Snapshot], list[str]]:
    """The allocator of each device that holds or held anything, and notes.

    Raises ConfigError for a file that would run code, would take much more memory than its size, is
    damaged, or is no snapshot. Nothing of it is run.
    """
    most = min(_MOST_BYTES, max(_UNPACKED_BYTES, _UNPACKED_TIMES * path.stat().st_size))
    data = TextFile(path).head(most + 1)
    if len(data) > most:
        raise ConfigError(
            f"{path} holds more than {most >> 20} MiB; record a shorter history "
            "(max_entries of torch.cuda.memory._record_memory_history)"
        )
    try:
        return _read(load_plain(data, _KEYS), [len(data)])
    except HostilePickleError as error:
        raise ConfigError(
            f"{path} is refused: {error}, which no memory snapshot does; do not unpickle it elsewhere"
        ) from None
    except PickleError as error:
        raise ConfigError(
            f"{path} is a damaged pickle or no memory snapshot of PyTorch ({error}); write one with "
            "torch.cuda.memory._dump_snapshot"
        ) from None


def _read(tree: Any, budget: list[int]) -> tuple[list[Snapshot], list[str]]:
    segments, traces = _get(tree, "segments"), _get(tree, "device_traces")
    if not isinstance(segments, list):
        raise PickleError("it has no list of segments")
    devices: dict[int, _Device] = {}
    undated = 0
    for segment in items(segments, budget):
        index = number(_get(segment, "device"))
        _device(devices, 0 if index != index else int(index)).add_segment(segment, budget)
    for index, entries in enumerate(items(traces, budget)):
        if entries:
            undated += _device(devices, index).add_trace(entries, budget)
    notes = [f"{undated} changes of memory carry no time and are left out"] if undated else []
    return [device.finished(str(index)) for index, device in sorted(devices.items())], notes


class _Device:
    """What a snapshot says of one device."""

    def __init__(self) -> None:
        self._reserved = self._allocated = self._inactive = 0.0
        self._segments = self._flushes = self._ooms = 0
        self._live: list[tuple[float, str]] = []
        self._times, self._changes = array("d"), array("d")

    def add_segment(self, segment: Any, budget: list[int]) -> None:
        size = number(_get(segment, "total_size"))
        if size != size:
            return
        self._segments += 1
        self._reserved += size
        allocated = number(segment.get("allocated_size"))
        blocks = []
        for block in items(segment.get("blocks"), budget):
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

    def add_trace(self, entries: Any, budget: list[int]) -> int:
        """Takes what happened on the device; returns how many changes had no time."""
        returning, undated = False, 0
        for entry in items(entries, budget):
            action, size = _get(entry, "action"), number(_get(entry, "size"))
            time_s = number(_get(entry, "time_us")) / 1e6
            if not isinstance(action, str):
                continue
            returned = action in _RETURNED
            self._flushes += returned and not returning
            returning = returned
            self._ooms += action == "oom"
            change = {"alloc": size, "free_completed": -size}.get(action, 0.0)
            if change == 0.0 or change != change:
                continue
            if time_s != time_s:
                undated += 1
                continue
            self._times.append(time_s)
            self._changes.append(change)
        return undated

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
    return one_line(" < ".join(words))
