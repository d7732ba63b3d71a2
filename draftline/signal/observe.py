"""Observes a running program from outside: its devices, its processes, and what PyTorch tells of it.

What only the program itself can count (steps, memory requests, graph replays, flex_attention run
uncompiled) is not seen from here, unless it records itself with `draftline.signal`: then that recording
is found among its open files and read along.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from draftline.signal.environment import environment, variables
from draftline.signal.foreign import Outlets
from draftline.signal.journal import Journal
from draftline.signal.nvml import Reading, Source, open_source
from draftline.signal.outlets import CompileLog
from draftline.signal.processes import (
    PROC,
    Identity,
    ProcessTree,
    command_line,
    is_alive,
    is_visible,
    written_files,
)
from draftline.signal.recording import RecordingTail
from draftline.signal.sample import DeviceSampler
from draftline.signal.trace import Event, Trace, join

_LOOK_S = 1.0  # how often processes and open files are looked at
_BACKLOG_S = 60.0  # of a device that the program does not use yet
_USED_BYTES = 64 << 20  # growth that counts as use where processes are hidden
_HELD_BYTES = 256 << 20  # more than a driver keeps for itself on an idle device
_RECORDING = re.compile(r"signal(?:[-_.].*)?\.jsonl")
# Of the machine; the program's own versions are not known from outside.
_FACTS = ("kernel", "driver", "gpus", "cpus", "cpu_limit", "memory_bytes", "container")


class Observer:
    """Owns the observation of `root` and what it started, and its recording `directory`/signal.jsonl.

    A device belongs to the program once the driver names one of its processes there; where processes
    are hidden (containers), once its memory grew by 64 MiB, or at once where `attached` to a program
    that runs already and the device holds memory. The minute before is recorded too.
    """

    def __init__(
        self,
        root: Identity,
        directory: Path,
        *,
        outlets: Outlets | None = None,
        attached: bool = False,
        hz: float = 5.0,
        source: Callable[[], Source] = open_source,
        proc: Path = PROC,
    ) -> None:
        self.root = root
        self.directory = directory
        self.devices: set[str] = set()  # that the program uses
        self._proc = proc
        self._attached = attached
        self._tree = ProcessTree(root, proc)
        self._sampler = DeviceSampler(hz, self._sampled, source=source)
        self._journal = Journal(directory / "signal.jsonl")
        self._compiles = None if outlets is None else CompileLog(outlets, time.time())
        self._backlog: dict[str, deque[Reading]] = {}
        self._keep = max(1, round(_BACKLOG_S * hz))
        self._others: dict[str, Mapping[int, int | None]] = {}
        self._told: set[tuple[str, int]] = set()
        self._tails: dict[Path, RecordingTail] = {}
        self._look_at_s = 0.0

    def start(self, program: str, environ: Mapping[str, str] | None) -> None:
        """Begins, with the program's command line and environment (None where it is not to be seen)."""
        known = environment()
        facts = {name: known[name] for name in _FACTS}
        facts["variables"] = None if environ is None else variables(environ)
        self._journal.start(program, (), {}, facts, pid=self.root.pid)
        self._sampler.start()

    @property
    def alive(self) -> bool:
        """Whether the program still runs."""
        return is_alive(self.root, self._proc)

    @property
    def unsampled(self) -> str | None:
        """Why no device is sampled, None where they are."""
        return self._sampler.reason

    @property
    def recordings(self) -> list[Path]:
        """Recordings that the program writes itself."""
        return sorted(self._tails)

    @property
    def compiling(self) -> list[tuple[str, float]]:
        """What the program compiles just now, and since when (unix seconds)."""
        return [] if self._compiles is None else self._compiles.compiling

    @property
    def notes(self) -> list[str]:
        return [] if self._compiles is None else self._compiles.notes

    def poll(self, now_s: float) -> list[Event]:
        """What happened since the last call; `now_s` is unix time."""
        events = [] if self._compiles is None else self._compiles.poll(now_s)
        for event in events:
            self._journal.event(event)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._tree.update()
            self._find_recordings()
            events += self._strangers(now_s)
        for tail in self._tails.values():
            tail.poll()
        self._journal.file.flush()
        return events

    def trace(self) -> Trace:
        """What is known so far: the program's own recordings, and what they lack."""
        seen = self._journal.trace()
        own = join(tail.trace() for tail in self._tails.values())
        if own.program is None:
            return seen
        sampled = {samples.device for samples in own.samples}
        kinds = {event.kind for event in own.events}
        more = replace(
            seen,
            samples=tuple(s for s in seen.samples if s.device not in sampled),
            events=tuple(e for e in seen.events if e.kind not in kinds),
        )
        return join([own, more])

    def _sampled(self, reading: Reading) -> None:
        """Takes a reading in, in the sampler's thread."""
        name, members = reading.device, self._tree.members
        told = reading.processes
        if told is not None and not any(is_visible(pid, self._proc) for pid in told):
            # Nobody, or nobody whom one may see: a container hides them.
            told = None if told or (reading.used_bytes or 0) > _HELD_BYTES else told
        if told is not None:
            own = {pid: held for pid, held in told.items() if pid in members}
            others = {pid: held for pid, held in told.items() if pid not in members}
            self._others[name] = others
            told = {**others, self.root.pid: _sum(list(own.values()))} if own else others
            uses = bool(own)
        else:
            uses = name in self.devices or self._grew(reading)
        reading = replace(reading, processes=told)
        before = self._backlog.setdefault(name, deque(maxlen=self._keep))
        if not uses and name not in self.devices:
            before.append(reading)
            return
        self.devices.add(name)
        while before:
            self._journal.sample(before.popleft())
        self._journal.sample(reading)

    def _grew(self, reading: Reading) -> bool:
        used = reading.used_bytes or 0
        if self._attached:
            return used > _HELD_BYTES
        before = self._backlog.get(reading.device)
        return used - (before[0].used_bytes or 0) > _USED_BYTES if before else False

    def _strangers(self, now_s: float) -> list[Event]:
        """Processes of others that have come to the program's devices, once each."""
        found = []
        for device in sorted(self.devices):
            for pid, held in self._others.get(device, {}).items():
                if (device, pid) not in self._told and held is not None and held > _USED_BYTES:
                    self._told.add((device, pid))
                    who = command_line(pid, self._proc).split(" ")[0]
                    text = f"process {pid} ({who}) holds {held / 2**30:.2f} GiB there"
                    found.append(Event(now_s, "other_process", text, device))
        return found

    def _find_recordings(self) -> None:
        for pid in self._tree.members:
            for path in written_files(pid, self._proc):
                if path not in self._tails and _RECORDING.fullmatch(path.name):
                    self._tails[path] = RecordingTail(path)

    def finish(self, now_s: float) -> list[Event]:
        """The last that can be known of a program that has ended."""
        self._sampler.stop()
        events = [] if self._compiles is None else self._compiles.finish(now_s)
        for event in events:
            self._journal.event(event)
        for tail in self._tails.values():
            tail.poll()
        return events

    def close(self) -> None:
        """Ends the observation; the program goes on."""
        self._sampler.stop()
        self._journal.file.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _sum(held: Sequence[int | None]) -> int | None:
    known = [value for value in held if value is not None]
    return sum(known) if len(known) == len(held) else None
