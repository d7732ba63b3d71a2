"""An append-only file of JSON lines that can neither stop nor kill the program that writes it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from draftline.errors import ConfigError

log = logging.getLogger(__name__)

PATIENCE_S = 2.0  # for another thread's write at the end; a mount may hang for ever
_PENDING = 65536  # lines kept while nobody writes them out; older ones are lost, and counted


def _open(path: Path) -> FileIO:
    """The file, unbuffered, so that a forked child has nothing of its parent's to write at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def _taken(file: FileIO) -> bool:
    """Whether another process records into the file; a file system without locks says no."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class LineFile:
    """`add` costs an append to a queue; `flush`, called by another thread, encodes and writes.

    A full disk or a broken mount is said once and counted in `lost`. A forked child writes nothing:
    the file is its parent's. Where somebody writes to `path` already (each rank of a distributed run
    was given the same), the lines go to a file beside it with the process's number in its name.
    Raises ConfigError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._owner = os.getpid()
        self._pending: deque[Mapping[str, Any]] = deque(maxlen=_PENDING)
        self._writing = threading.Lock()
        self._torn = False  # the last line on disk is a part of one
        try:
            self._file = _open(path)
            if _taken(self._file):
                self._file.close()
                self.path = path.with_name(f"{path.stem}-{self._owner}{path.suffix}")
                log.warning("%s is being written already; this recording is %s", path, self.path)
                self._file = _open(self.path)
        except OSError as error:
            raise ConfigError(
                f"recording {path} cannot be written: {error.strerror or error}; give another path"
            ) from None

    @property
    def mine(self) -> bool:
        """Whether this process opened the file, not one that it was forked from."""
        return os.getpid() == self._owner

    def add(self, line: Mapping[str, Any]) -> None:
        if len(self._pending) == _PENDING:
            self.lost += 1
        self._pending.append(line)

    def flush(self) -> None:
        """Writes what is pending."""
        if not self.mine or not self._pending:
            return
        with self._writing:
            self._write_pending()

    def _write_pending(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if lines and not self._file.closed:
            self._write("".join(f"{_encode(line)}\n" for line in lines).encode())

    def _write(self, data: bytes) -> None:
        whole = b"\n" + data if self._torn else data  # first ends the part of a line
        rest = memoryview(whole)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            if self.lost == 0:
                log.warning("recording %s: %s; lines are lost", self.path, error.strerror or error)
            self.lost += bytes(rest[-len(data) :]).count(b"\n")
        if written := whole[: len(whole) - len(rest)]:
            self._torn = not written.endswith(b"\n")

    def close(self) -> None:
        """Writes what is pending and closes the file; where another thread's write does not return
        within two seconds, the file is left to it and the lines are lost."""
        if not self.mine:
            return
        if not self._writing.acquire(timeout=PATIENCE_S):
            self.lost += len(self._pending)
            log.warning("recording %s: a write hangs; the last lines are lost", self.path)
            return
        try:
            self._write_pending()
            self._file.close()
        finally:
            self._writing.release()


def _encode(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"), default=str)
