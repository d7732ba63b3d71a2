"""Reads a file while another process writes it, and keeps its size on disk in bounds."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_LONGEST_BYTES = 4 << 20  # an unfinished line longer than this is dropped
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of Linux's fallocate(2)


class GrowingFile:
    """Whole lines of `path` as they come. The file may not exist yet, be cut short or be replaced: it
    is then read from its new start. `from_end` skips what it holds now."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.read_bytes = 0
        self._node: int | None = None
        self._rest = b""
        if from_end:
            try:
                found = path.stat()
            except OSError:
                return
            self.read_bytes, self._node = found.st_size, found.st_ino

    def lines(self, most_bytes: int = 16 << 20) -> list[str]:
        """The lines completed since the last call, of at most `most_bytes`; what is left comes with
        the next call. A file that cannot be read now gives none."""
        found: list[str] = []
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if self._node not in (None, state.st_ino) or state.st_size < self.read_bytes:
                    self.read_bytes, self._rest = 0, b""
                self._node = state.st_ino
                file.seek(self.read_bytes)
                while most_bytes > 0 and (data := file.read(min(_CHUNK_BYTES, most_bytes))):
                    self.read_bytes += len(data)
                    most_bytes -= len(data)
                    found += self._split(data)
        except OSError:
            return found
        return found

    def _split(self, data: bytes) -> list[str]:
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= _LONGEST_BYTES else b""
        return [line.decode("utf-8", "replace").strip("\0\r") for line in whole]

    def release(self, keep_bytes: int) -> bool:
        """Gives back the disk space of what was read beyond the first `keep_bytes`, without moving
        what the writer does; reading it again gives zeros. False where the file system cannot."""
        start = -(-keep_bytes // 4096) * 4096
        length = self.read_bytes // 4096 * 4096 - start
        if length <= 0:
            return True
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError:
            return False
        try:
            return _punch(file, start, length)
        finally:
            os.close(file)


def _punch(file: int, start: int, length: int) -> bool:
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is None:
        return False
    mode = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE)
    done: int = fallocate(ctypes.c_int(file), mode, ctypes.c_int64(start), ctypes.c_int64(length))
    return done == 0
