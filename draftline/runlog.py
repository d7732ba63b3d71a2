"""The run directory: events and metrics as JSON lines, atomic writes.

A full disk must not kill a training run through its log: a line that cannot be written is counted,
said once, and training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from draftline.errors import ConfigError

log = logging.getLogger(__name__)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text` so that a reader sees the old or the new file, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunLog:
    """Owns a run directory and its two append-only files, `events.jsonl` and `metrics.jsonl`.

    Raises ConfigError when the directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lost_lines = 0
        self._writing = threading.Lock()
        self._torn: set[FileIO] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._events = _open(directory / "events.jsonl")
            self._metrics = _open(directory / "metrics.jsonl")
        except OSError as error:
            raise ConfigError(
                f"run directory {directory} cannot be written: {error.strerror or error}; "
                "choose another with run.dir=PATH"
            ) from None

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Appends one event with its wall-clock time in seconds."""
        self._append(self._events, {"time_s": round(time.time(), 3), "event": kind, **fields})

    def metrics(self, fields: Mapping[str, object]) -> None:
        """Appends one line of step metrics."""
        self._append(self._metrics, {"time_s": round(time.time(), 3), **fields})

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run directory atomically; raises ConfigError when it cannot be."""
        try:
            write_atomic(self.directory / name, text)
        except OSError as error:
            raise ConfigError(
                f"{self.directory / name} cannot be written: {error.strerror or error}; make room, or "
                "choose another run.dir"
            ) from None

    def _append(self, file: FileIO, record: Mapping[str, object]) -> None:
        line = json.dumps(record, default=str).encode() + b"\n"
        with self._writing:
            # A full disk took a part of the last line; the next one begins a line of its own.
            rest = memoryview(b"\n" + line if file in self._torn else line)
            self._torn.discard(file)
            try:
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            except OSError as error:
                if self.lost_lines == 0:
                    log.warning("run log: %s; training goes on without these lines", error.strerror)
                self.lost_lines += 1
                self._torn.add(file)

    def close(self) -> None:
        for file in (self._events, self._metrics):
            try:
                file.close()
            except OSError:
                self.lost_lines += 1

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> FileIO:
    """Unbuffered, so that a line is on its way to the disk, or known to be lost, when written."""
    return path.open("ab", buffering=0)
