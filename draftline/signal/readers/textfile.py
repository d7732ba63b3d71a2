"""Text of a file as it comes, whatever its encoding, line ends and compression."""

from __future__ import annotations

import codecs
import gzip
import lzma
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from draftline.errors import ConfigError

_CHUNK = 1 << 17
# A longer line is not one of a recording; without a bound, a file without line ends fills memory.
LONGEST_LINE = 1 << 18
# A packed file is read up to this size, or this many times its own: recordings shrink less.
_UNPACKED_BYTES, _UNPACKED_TIMES = 64 << 20, 100
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def open_plain(path: Path) -> IO[bytes] | gzip.GzipFile | lzma.LZMAFile:
    """The bytes of a regular file, unpacked where it is gzip or xz.

    Raises ConfigError for what is missing, not a file, or may not be read.
    """
    try:
        kind = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; name a recording or a run directory"
        ) from None
    except ValueError:  # a NUL in the name
        raise ConfigError(f"{str(path)!r} cannot be the name of a file") from None
    if not stat.S_ISREG(kind.st_mode):
        what = "a directory" if stat.S_ISDIR(kind.st_mode) else "a pipe, a socket or a device"
        raise ConfigError(f"{path} is {what}, not a file; write the recording to a file first")
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic.startswith(b"\x1f\x8b"):
            return gzip.open(path)
        if magic.startswith(b"\xfd7zXZ"):
            return lzma.open(path)
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def clean(line: bytes) -> str:
    """One line as text, without byte-order marks; what is no UTF-8 is replaced."""
    for mark in _MARKS:
        line = line.removeprefix(mark)
    return line.decode("utf-8", "replace")


class TextFile:
    """The text of one file, read once and in bounded memory; afterwards it knows what was wrong.

    NUL bytes are left out, which makes plain text of UTF-16 (PowerShell writes it) as long as it is
    ASCII, and of holes that a crash left. Errors while opening are those of `open_plain`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.cut = False  # the compressed stream ends early or is damaged
        self.unended = False  # the last line has no end
        self.left_out = False  # and was not given
        self.overlong = 0
        self._most: int | None = None  # bytes of a packed file after which reading stopped
        self._nuls = 0
        self._size = 0
        self._packed = self._wide = False

    def head(self, most: int) -> bytes:
        """Up to `most` first bytes, unpacked, NUL bytes included."""
        found, size = [], 0
        for chunk in self._chunks():
            found.append(chunk)
            size += len(chunk)
            if size >= most:
                break
        return b"".join(found)[:most]

    def lines(self, *, whole: bool = False) -> Iterator[str]:
        """Every line without its end; a lone carriage return ends a line too. With `whole` not a
        last one that lacks its end, since nobody can tell a number from the start of one."""
        rest, skipping, first = b"", False, True
        for chunk in self._plain():
            *ended, last = chunk.split(b"\n")
            for piece in ended:
                if not skipping:
                    yield from _split(rest + piece)
                rest, skipping, first = b"", False, False
            rest = b"" if skipping else rest + last
            if len(rest) > LONGEST_LINE:
                self.overlong += 1
                rest, skipping = b"", True
        self.unended = bool(rest.strip())
        self.left_out = self.unended and whole and not first
        if rest and not self.left_out:
            yield from _split(rest)

    def pieces(self) -> Iterator[str]:
        """The text in pieces that are no lines, control characters included."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for chunk in self._plain():
            yield decoder.decode(chunk)

    def notes(self) -> list[str]:
        """What was wrong with the file as a text, after it was read."""
        found = []
        if self._most is not None:
            found.append(
                f"it unpacks to more than {self._most >> 20} MiB, which is more than recordings do; "
                "what came before was read"
            )
        if self.cut:
            found.append("the compressed file is cut off or damaged; what came before was read")
        if self._wide:
            found.append("UTF-16 text; characters beyond ASCII are lost")
        elif self._nuls:
            found.append(
                f"{self._nuls} NUL bytes were left out (a crash or a full disk leaves them)"
            )
        if self.left_out:
            found.append("the last line is cut off and was left out")
        if self.overlong:
            found.append(f"{self.overlong} line(s) of more than {LONGEST_LINE} bytes were left out")
        return found

    def _plain(self) -> Iterator[bytes]:
        most = max(_UNPACKED_BYTES, _UNPACKED_TIMES * _size(self.path))
        for chunk in self._chunks():
            if self._size == 0:
                self._wide = chunk.startswith(_MARKS[1:])
            if self._size + len(chunk) > most and self._packed:
                self._most = most
                return
            self._size += len(chunk)
            if b"\0" in chunk:
                self._nuls += chunk.count(b"\0")
                chunk = chunk.replace(b"\0", b"")
            yield chunk

    def _chunks(self) -> Iterator[bytes]:
        with open_plain(self.path) as stream:
            self._packed = isinstance(stream, gzip.GzipFile | lzma.LZMAFile)
            while True:
                try:
                    chunk = stream.read(_CHUNK)
                except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
                    self.cut = True
                    return
                except OSError as error:
                    raise ConfigError(
                        f"{self.path} cannot be read: {error.strerror or error}"
                    ) from None
                if not chunk:
                    return
                yield chunk


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # opening it says what is wrong
        return 0


def _split(line: bytes) -> list[str]:
    text = clean(line).rstrip("\r")
    return text.split("\r") if "\r" in text else [text]
