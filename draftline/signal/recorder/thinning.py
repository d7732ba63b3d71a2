"""What of a long recording is written: at first everything, later whatever moves and the fewer of the
other lines the longer it goes on. A day of steps of 200 ms would be 180 MB a device otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

FULL = 1024  # lines of a kind and device that are all written, and whole
# Not even a still device is recorded more rarely: a verdict needs some lines between two pauses.
MOST_APART_S = 4.2
# A value that moved so often tells nothing new by moving.
_MOST_MOVES = 16384
_WHOLE_EVERY = 64
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
_ALWAYS = ("kind", "time_s", "device")


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
        self._written: Mapping[str, Any] = {}
        self._short = 0

    def take(self, line: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What is to be written of the line, None where it is left out. A short line has `like_ms`, how
        long before it the last one was written, and lacks what is the same there."""
        time_s = line["time_s"]
        until_next_s, self._seen_s = time_s - self._seen_s, time_s
        rare = time_s + until_next_s - self._written_s > MOST_APART_S
        if not (self._moved(line) or rare or self._left_out + 1 >= self._stride):
            self._left_out += 1
            return None
        self._count()
        whole = self._wide + self._close <= FULL or self._short >= _WHOLE_EVERY
        told = line if whole else _differing(line, self._written)
        self._short = 0 if whole else self._short + 1
        self._written, self._written_s, self._left_out = line, time_s, 0
        return told

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


def _differing(line: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    told = {
        name: value
        for name, value in line.items()
        if name in _ALWAYS or name not in before or before[name] != value
    }
    told |= {name: None for name in before if name not in line}
    return {**told, "like_ms": round((line["time_s"] - before["time_s"]) * 1000)}
