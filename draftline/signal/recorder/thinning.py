"""What of a long recording is written: everything at first, later everything that moves and one line in
four of what does not. A day of steps of 150 ms would be 300 MB a device otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL = 4096  # lines of a kind and device that are all written
# With this many left out in a row a gap is still too short to be taken for a pause.
_LEFT_OUT = 3
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
    "phase",
)


class Thinning:
    """Decides line by line; one for each kind and device."""

    def __init__(self) -> None:
        self._seen = 0
        self._left_out = 0
        self._before: tuple[Any, ...] = ()

    def keeps(self, line: Mapping[str, Any]) -> bool:
        """Whether the line is to be written."""
        self._seen += 1
        now = tuple(line.get(name) for name in _MOVES)
        moved, self._before = now != self._before, now
        if self._seen <= FULL or moved or self._left_out >= _LEFT_OUT:
            self._left_out = 0
            return True
        self._left_out += 1
        return False
