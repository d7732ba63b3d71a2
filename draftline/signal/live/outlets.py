"""Follows what PyTorch writes for a watcher, and keeps files that are ours from filling the disk."""

from __future__ import annotations

import re
from pathlib import Path

from draftline.signal.live.foreign import Outlets
from draftline.signal.live.torch_logs import TorchLogs
from draftline.signal.live.torch_trace import TorchTrace
from draftline.signal.readers.tail import GrowingFile
from draftline.signal.trace import Event

LOG_BYTES = 64 << 20  # of torch.log that stay on disk
TRACE_BYTES = 64 << 20  # of each process's trace that stay on disk
_MOST_FILES = 256
_RANK = re.compile(r"_rank_(\d+)_")
_TRACED = ("recompile", "graph_break")  # in the log too, where TORCH_LOGS asks for them
_RECENT_S = 2.0  # file systems' clocks may lag behind


class CompileLog:
    """Events out of the files of `outlets`. A file of ours that grows beyond 64 MiB loses what was
    read of it, from there on; the user's own files are left alone."""

    def __init__(self, outlets: Outlets, began_s: float) -> None:
        self.notes: list[str] = []
        self._outlets = outlets
        self._began_s = began_s
        self._logs = TorchLogs()
        self._log = None
        if outlets.log is not None:
            self._log = GrowingFile(outlets.log, from_end=not outlets.own_log)
        self._traces: dict[Path, tuple[GrowingFile, TorchTrace]] = {}
        self._unbounded = False

    def poll(self, now_s: float) -> list[Event]:
        """Events that have been completed since the last call."""
        events: list[Event] = []
        if self._log is not None:
            lines = self._log.lines()
            # A record of several lines is whole once nothing follows for a while.
            events += self._logs.feed(lines, now_s) if lines else self._logs.flush()
            self._bound(self._log, LOG_BYTES, self._outlets.own_log)
        files = self._trace_files()
        if files:
            # Each trace has them too, and begins before its program's first one.
            events = [event for event in events if event.kind not in _TRACED]
        for file, parser in files:
            if lines := file.lines():
                events += parser.feed(lines, now_s)
            else:
                events += parser.flush()
            self._bound(file, TRACE_BYTES, self._outlets.own_trace)
        return sorted(events, key=lambda event: event.time_s)

    def finish(self, now_s: float) -> list[Event]:
        """The last events, once the program has ended."""
        events, read_bytes = [], -1
        while read_bytes != self._read_bytes:
            read_bytes = self._read_bytes
            events += self.poll(now_s)
        return events

    @property
    def _read_bytes(self) -> int:
        log = 0 if self._log is None else self._log.read_bytes
        return log + sum(file.read_bytes for file, _ in self._traces.values())

    @property
    def compiling(self) -> list[tuple[str, float]]:
        """What is being compiled now, and since when, in any of the processes."""
        return [parser.compiling for _, parser in self._traces.values() if parser.compiling]

    def _trace_files(self) -> list[tuple[GrowingFile, TorchTrace]]:
        folder = self._outlets.trace
        if folder is not None and len(self._traces) < _MOST_FILES:
            for path in sorted(folder.glob("*.log")):
                if path not in self._traces and self._is_new(path):
                    rank = _RANK.search(path.name)
                    # What the log always tells is not told twice.
                    parser = TorchTrace(limits=self._log is None, rank=rank and rank[1])
                    self._traces[path] = (GrowingFile(path), parser)
        return list(self._traces.values())

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self._began_s - _RECENT_S
        except OSError:
            return False

    def _bound(self, file: GrowingFile, keep_bytes: int, ours: bool) -> None:
        if not ours or file.read_bytes <= keep_bytes or self._unbounded:
            return
        if not file.release(keep_bytes):
            self._unbounded = True
            self.notes.append(f"{file.path} cannot be kept short on this file system; it grows")
