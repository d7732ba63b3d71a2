"""Which devices belong to a watched program, and who else is on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from draftline.signal.recorder.nvml import Reading

USED_BYTES = 64 << 20  # growth that counts as use where processes are hidden
HELD_BYTES = 256 << 20  # more than a driver keeps for itself on an idle device


class Ownership:
    """Passes on the readings of the program's devices, with its processes summed up under `root`.

    A device belongs to the program once the driver names one of its processes there; where processes
    are hidden (containers), once its memory grew by 64 MiB, or at once where `attached` to a program
    that runs already and the device holds memory. `keep` readings from before are passed on then.
    """

    def __init__(
        self, root: int, *, attached: bool, keep: int, is_visible: Callable[[int], bool]
    ) -> None:
        self.devices: set[str] = set()
        self.others: dict[str, Mapping[int, int | None]] = {}  # bytes by process, of each device
        self._root = root
        self._attached = attached
        self._keep = keep
        self._is_visible = is_visible
        self._before: dict[str, deque[Reading]] = {}
        self._first_bytes: dict[str, int] = {}

    def take(self, reading: Reading, members: Collection[int]) -> list[Reading]:
        """What to record now that `reading` came, while the program's processes are `members`."""
        name, told = reading.device, self._told(reading)
        if told is None:
            uses, shown = self._grew(reading), None
        else:
            own = {pid: held for pid, held in told.items() if pid in members}
            self.others[name] = {pid: held for pid, held in told.items() if pid not in members}
            uses = bool(own)
            mine = {self._root: _sum(list(own.values()))} if own else {}
            shown = {**self.others[name], **mine}
        reading = replace(reading, processes=shown)
        before = self._before.setdefault(name, deque(maxlen=self._keep))
        if not uses and name not in self.devices:
            before.append(reading)
            return []
        self.devices.add(name)
        passed = [*before, reading]
        before.clear()
        return passed

    def _told(self, reading: Reading) -> Mapping[int, int | None] | None:
        """The processes on the device; None where there must be some that one may not see."""
        told = reading.processes
        if told is None or any(self._is_visible(pid) for pid in told):
            return told
        hidden = bool(told) or (reading.used_bytes or 0) > HELD_BYTES
        return None if hidden else told

    def _grew(self, reading: Reading) -> bool:
        used = reading.used_bytes
        if used is None:
            return False
        first = self._first_bytes.setdefault(reading.device, used)
        return used > HELD_BYTES if self._attached else used - first > USED_BYTES


def _sum(held: Sequence[int | None]) -> int | None:
    known = [value for value in held if value is not None]
    return sum(known) if len(known) == len(held) else None
