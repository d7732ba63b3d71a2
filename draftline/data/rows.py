"""Rows of a conversation file: JSON Lines, a JSON array or one JSON object, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from draftline.errors import DataError

_BLANK = "\ufeff \t\r\n"


class BadRow(ValueError):
    """Why a row is not used: its args are the reason and the detail of the Reject."""


def rows_of(path: Path) -> Iterator[tuple[int, object]]:
    """Every row with its number: the line, or the place in a JSON array; no JSON is a BadRow.

    Raises DataError for a file that cannot be read.
    """
    text = _text(path)
    # Not splitlines(): it also splits at U+2028 and others that JSON allows inside a string.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip(_BLANK)]
    if not lines:
        raise DataError(f"{path} is empty; check that the step which was to write it finished")
    first = _parse(lines[0][1])
    if isinstance(first, BadRow) or (isinstance(first, list) and len(lines) == 1):
        document = _parse(text)
        if not isinstance(document, BadRow):
            yield from enumerate(document if isinstance(document, list) else [document], 1)
            return
        if not any(isinstance(_parse(line), dict) for _, line in lines):
            raise DataError(
                f"{path} is neither JSON Lines nor one JSON document ({document.args[1]}); "
                f"it begins {text[:30]!a}, likely cut off or another format. Write JSON Lines"
            )
    for number, line in lines:
        row = _parse(line)
        if isinstance(row, BadRow) and line is lines[-1][1] and not text.endswith("\n"):
            row = BadRow("truncated_line", f"the last line is cut off: {row.args[1]}")
        yield number, row


def _text(path: Path) -> str:
    """The file's text, unzipped; raises DataError that says what was found instead."""
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        seen = f"is not UTF-8 ({at}), it begins {raw[:8]!r}; likely another format: convert it"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        seen = f"is a damaged gzip file of {len(raw)} bytes: {error}; likely cut off. Copy it again"
    except IsADirectoryError:
        seen = f"is a directory; give the files in it, for example with {path / '*.jsonl'}"
    except OSError as error:
        seen = f"cannot be read: {error.strerror}; check the path, seen from {Path.cwd()}"
    raise DataError(f"{path} {seen}") from None


def _parse(text: str) -> object:
    try:
        return json.loads(text.strip(_BLANK))
    except (ValueError, RecursionError) as error:
        return BadRow("not_json", str(error))
