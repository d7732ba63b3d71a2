"""Other processes of this machine as Linux shows them: who is alive, whose child, what is open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftline.errors import ConfigError

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for good: its number and when it began, since numbers are used again."""

    pid: int
    began_ticks: int


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: int
    began_ticks: int
    alive: bool


def _read(pid: int, proc: Path) -> _Entry | None:
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The program's name stands in parentheses and may hold anything.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return _Entry(int(fields[1]), int(fields[19]), fields[0] not in "ZX")


def _pids(proc: Path) -> Iterator[int]:
    try:
        names = os.listdir(proc)
    except OSError:
        return
    for name in names:
        if name.isdigit():
            yield int(name)


def identify(pid: int, proc: Path = PROC, *, ended_too: bool = False) -> Identity:
    """The running process with this number, or with `ended_too` one that its parent has not taken
    leave of. Raises ConfigError where there is none to be seen."""
    entry = _read(pid, proc)
    if entry is None or not (entry.alive or ended_too):
        here = "it has ended" if entry is not None else "no such process is visible here"
        raise ConfigError(
            f"process {pid}: {here}; `nvidia-smi` or `ps` list the processes that run (in a container "
            "only its own are visible)"
        )
    return Identity(pid, entry.began_ticks)


def is_alive(who: Identity, proc: Path = PROC) -> bool:
    """Whether it is this very process that runs, not a later one with its number."""
    entry = _read(who.pid, proc)
    return entry is not None and entry.alive and entry.began_ticks == who.began_ticks


def is_visible(pid: int, proc: Path = PROC) -> bool:
    """Whether the number belongs to a process that can be seen from here."""
    return (proc / str(pid)).exists()


def began_s(who: Identity, proc: Path = PROC) -> float | None:
    """When the process began, in unix seconds; None where the machine does not tell."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    boot = next((line.split()[1] for line in lines if line.startswith("btime ")), None)
    return None if boot is None else float(boot) + who.began_ticks / os.sysconf("SC_CLK_TCK")


class ProcessTree:
    """A process and what it started, orphans included: `members` by number."""

    def __init__(self, root: Identity, proc: Path = PROC) -> None:
        self._proc = proc
        self.members: dict[int, Identity] = {root.pid: root}

    def update(self) -> None:
        """Looks again; members that have ended leave."""
        entries = {pid: entry for pid in _pids(self._proc) if (entry := _read(pid, self._proc))}
        members = {
            pid: who
            for pid, who in self.members.items()
            if (entry := entries.get(pid)) is not None and entry.began_ticks == who.began_ticks
        }
        children: dict[int, list[int]] = {}
        for pid, entry in entries.items():
            children.setdefault(entry.parent, []).append(pid)
        waiting = list(members)
        while waiting:
            for pid in children.get(waiting.pop(), ()):
                if pid not in members:
                    members[pid] = Identity(pid, entries[pid].began_ticks)
                    waiting.append(pid)
        self.members = members


def open_files(pid: int, proc: Path = PROC) -> list[Path]:
    """Files that a process has open, to read or to write, as far as it lets one look."""
    found = []
    folder = proc / str(pid) / "fd"
    try:
        for name in os.listdir(folder):
            target = os.readlink(folder / name)
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                found.append(Path(target))
    except OSError:
        return found
    return found


def environ_of(pid: int, proc: Path = PROC) -> dict[str, str] | None:
    """The environment a process was started with, secrets and all; None where one may not look
    (another user's)."""
    try:
        data = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    pairs = (item.partition("=") for item in os.fsdecode(data).split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def raw_command(pid: int, proc: Path = PROC) -> list[str]:
    """The words of a process's command, secrets and all; empty where it does not tell."""
    try:
        data = (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        data = b""
    return [word for word in data.decode(errors="replace").split("\0") if word]
