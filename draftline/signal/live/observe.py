"""Observes a running program from outside: its devices, its processes, and what PyTorch tells of it.

What only the program itself can count (steps, memory requests, graph replays, flex_attention run
uncompiled) is not seen from here, unless it records itself with `draftline.signal`: then that recording
is found among its open files and read along.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from draftline.environment import environment, variables
from draftline.signal.draftline_run import Pace
from draftline.signal.live.foreign import Outlets
from draftline.signal.live.outlets import CompileLog
from draftline.signal.live.ownership import USED_BYTES, Ownership
from draftline.signal.live.processes import (
    PROC,
    Identity,
    ProcessTree,
    is_alive,
    is_visible,
    open_files,
    raw_command,
)
from draftline.signal.live.run_feed import event_of
from draftline.signal.readers.recording import RecordingTail
from draftline.signal.recorder.journal import Journal
from draftline.signal.recorder.nvml import Reading, Source, driver_facts, open_source
from draftline.signal.recorder.sample import DeviceSampler
from draftline.signal.trace import GIB, Event, Trace, join, one_line
from draftline.signal.words import LOGGED

_LOOK_S = 1.0  # how often processes and open files are looked at
_BACKLOG_S = 60.0  # recorded of the time before a device was used
_RECORDING = re.compile(r"signal(?:[-_.].*)?\.jsonl")
# Of the machine; the program's own versions are not known from outside.
_FACTS = ("kernel", "driver", "gpus", "cpus", "cpu_limit", "memory_bytes", "container")


class Observer:
    """Owns the observation of `root` and what it started, and its recording `directory`/signal.jsonl.

    `outlets` are where PyTorch writes (None: nowhere). `attached` says that the program ran before the
    observation; see Ownership for what its devices are. Raises ConfigError where the directory cannot
    be written.
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
        self._proc = proc
        self._tree = ProcessTree(root, proc)
        self._ownership = Ownership(
            root.pid,
            attached=attached,
            keep=max(1, round(_BACKLOG_S * hz)),
            is_visible=lambda pid: is_visible(pid, proc),
        )
        self._sampler = DeviceSampler(hz, self._sampled, source=source)
        self._journal = Journal(directory / "signal.jsonl")
        self._compiles = None if outlets is None else CompileLog(outlets, time.time())
        self._strangers: set[tuple[str, int]] = set()
        self._tails: dict[Path, RecordingTail] = {}
        self._look_at_s = 0.0

    def start(self, program: str, environ: Mapping[str, str] | None) -> None:
        """Begins, with the program's command line and environment (None where it is not to be seen)."""
        known = environment() | driver_facts()
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
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._tree.update()
            self._find_recordings()
            events += self._find_strangers(now_s)
        return self._taken(events)

    def finish(self, now_s: float) -> list[Event]:
        """The last that can be known of a program that has ended."""
        self._sampler.stop()
        return self._taken([] if self._compiles is None else self._compiles.finish(now_s))

    def _taken(self, events: list[Event]) -> list[Event]:
        """The events and what the program's own recordings add, written down."""
        # A program that records itself records its compiles too.
        for event in () if self._tails else events:
            if event.kind in LOGGED:
                self._journal.event(event)
        for tail in self._tails.values():
            told = filter(None, map(event_of, tail.poll()))
            # What PyTorch's logs tell the program's own recording has once more.
            events += (e for e in told if self._compiles is None or e.kind not in LOGGED)
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
        for passed in self._ownership.take(reading, self._tree.members):
            self._journal.sample(passed)

    def _find_strangers(self, now_s: float) -> list[Event]:
        """Processes of others that have come to the program's devices, once each."""
        found = []
        for device in sorted(self._ownership.devices):
            for pid, held in self._ownership.others.get(device, {}).items():
                if (device, pid) not in self._strangers and (held or 0) > USED_BYTES:
                    self._strangers.add((device, pid))
                    command = raw_command(pid, self._proc)
                    who = one_line(Path(command[0]).name, 40) if command else "not named"
                    text = f"process {pid} ({who}) holds {(held or 0) / GIB:.2f} GiB there"
                    found.append(Event(now_s, "other_process", text, device))
        return found

    def _find_recordings(self) -> None:
        mine = self._journal.file.path.absolute()
        for pid in self._tree.members:
            for path in open_files(pid, self._proc):
                if path not in self._tails and path != mine and _RECORDING.fullmatch(path.name):
                    self._tails[path] = RecordingTail(path)

    def close(self) -> None:
        """Ends the observation; the program goes on."""
        self._sampler.stop()
        self._journal.file.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ObserverFeed:
    """What `observer` sees, called `title`. `more_notes` are shown below the observer's own."""

    behind = False  # it tells what is, not what was written

    def __init__(self, observer: Observer, title: str) -> None:
        self.title = title
        self.pace = Pace()
        self.more_notes: list[str] = []
        self._observer = observer

    @property
    def no_devices(self) -> str:
        reason = self._observer.unsampled
        return "the program uses no GPU so far" if reason is None else f"not sampled: {reason}"

    @property
    def notes(self) -> list[str]:
        return [*self._observer.notes, *self.more_notes]

    def compiling(self) -> list[tuple[str, float]]:
        return self._observer.compiling

    def poll(self, now_s: float) -> list[Event]:
        return self._observer.poll(now_s)

    def trace(self) -> Trace:
        return self._observer.trace()

    def ended(self, _now_s: float) -> str | None:
        return None if self._observer.alive else "the process has ended"
