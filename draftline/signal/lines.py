"""An append-only file of JSON lines that can neither stop nor kill the program that writes it."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.errors import ConfigError

log = logging.getLogger(__name__)

_PENDING = 65536  # lines kept while nobody writes them out; older ones are lost, and counted


class LineFile:
    """`add` costs an append to a queue; `flush`, called by another thread, encodes and writes.

    A full disk or a broken mount is said once and counted in `lost`. A forked child writes nothing:
    the file is its parent's. Raises ConfigError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._owner = os.getpid()
        self._pending: deque[Mapping[str, Any]] = deque(maxlen=_PENDING)
        self._writing = threading.Lock()
        self._torn = False  # the last line on disk is a part of one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that a forked child has nothing of its parent's to write at its end.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"recording {path} cannot be written: {error.strerror or error}; give another path"
            ) from None

    @property
    def mine(self) -> bool:
        """Whether this process opened the file, not one that was forked from it."""
        return os.getpid() == self._owner

    def add(self, line: Mapping[str, Any]) -> None:
        if len(self._pending) == _PENDING:
            self.lost += 1
        self._pending.append(line)

    def flush(self) -> None:
        """Writes what is pending."""
        if not self.mine:
            return
        with self._writing:
            lines = [self._pending.popleft() for _ in range(len(self._pending))]
            if lines and not self._file.closed:
                self._write([json.dumps(line, default=str, allow_nan=False) for line in lines])

    def _write(self, lines: list[str]) -> None:
        data = ("\n" if self._torn else "").encode() + "".join(f"{x}\n" for x in lines).encode()
        view = memoryview(data)
        try:
            while view:
                written = self._file.write(view)
                view = view[written:]
            self._torn = False
        except OSError as error:
            if self.lost == 0:
                log.warning("recording %s: %s; these lines are lost", self.path, error.strerror)
            self.lost += max(1, bytes(view).count(b"\n"))
            self._torn = len(view) < len(data)

    def close(self) -> None:
        self.flush()
        if self.mine:
            self._file.close()
