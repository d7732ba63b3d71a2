"""What of a long recording is written: at first everything, later whatever moves and the fewer of the
other lines the longer it goes on. A day of steps of 200 ms would be 180 MB per device otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

FULL = 1024  # lines per kind and device that are all written
# Not even a still device is recorded more rarely: a verdict needs some lines between two pauses.
MOST_APART_S = 4.2
# A value that moved so often tells nothing new by moving.
_MOST_MOVES = 16384
_MOVES = (
    "device_allocations",
    "device_frees",
    "retries",
    "ooms",
    "frames",
    "compiles",
    "graph_breaks",
    "recompiles",
    "recompile_limits",
    "captures",
    "capture_skips",
    "reserved_bytes",
    "used_bytes",
)


class Thinning:
    """Decides line by line, for one kind and device.

    Of lines that tell nothing new one in `_stride` is written. The stride doubles when as many lines
    stand so far apart as stand closer: a distance that is rare in a file looks like a pause.
    """

    def __init__(self) -> None:
        self._stride = 1
        self._wide = self._close = 0  # lines written, by their distance to the one before
        self._left_out = 0
        self._seen: dict[str, Any] = {}
        self._moves: Counter[str] = Counter()
        self._seen_s = self._written_s = 0.0

    def take(self, line: Mapping[str, Any]) -> bool:
        """Whether the line is to be written."""
        time_s = line["time_s"]
        until_next_s, self._seen_s = time_s - self._seen_s, time_s
        rare = time_s + until_next_s - self._written_s > MOST_APART_S
        if not (self._moved(line) or rare or self._left_out + 1 >= self._stride):
            self._left_out += 1
            return False
        self._count()
        self._written_s, self._left_out = time_s, 0
        return True

    def _moved(self, line: Mapping[str, Any]) -> bool:
        """Whether the line tells what none before it told."""
        now = {name: line.get(name) for name in _MOVES}
        moved = [name for name in _MOVES if name not in self._seen or now[name] != self._seen[name]]
        self._seen = now
        self._moves.update(moved)
        return any(self._moves[name] <= _MOST_MOVES for name in moved)

    def _count(self) -> None:
        if self._left_out + 1 < self._stride:
            self._close += 1
            return
        self._wide += 1
        if self._wide >= max(FULL, self._close):
            self._close += self._wide
            self._wide = 0
            self._stride *= 2
