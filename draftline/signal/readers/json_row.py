"""Values of one JSON line, taken with care: a line may come from anywhere. Unknown is NaN or ""."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from draftline.signal.readers.clock import read_epoch
from draftline.signal.trace import one_line

Row = dict[str, Any]

MOST = 2.0**63  # more nanoseconds or bytes than there are; sums of such stay finite
_MOST_TEXT = 2000
_MOST_DEPTH = 8  # of what a program tells of itself
_MOST_PID = 2**53
_CUDA = re.compile(r"cuda:?(\d{1,4})?")
_NAME = re.compile(r"[\w./:-]{1,80}")


def parse(line: str) -> Row | None:
    """The object that the line is, None where it is none."""
    text = line.strip()
    if text[:1] != "{":
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number(value: object) -> float:
    """A number that is not negative and that something could count; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if 0 <= found < MOST else math.nan


def moment(value: object) -> float:
    """Seconds since 1970, of a number in any of the usual units."""
    return read_epoch(number(value))


def words(value: object) -> str:
    """A text as one printable line of bounded length; "" for anything else."""
    return one_line(value, _MOST_TEXT) if isinstance(value, str) else ""


def facts(value: object) -> Row:
    """An object with all its text made printable; what lies too deep in it, and anything else than an
    object, is left out."""
    return {words(k): _plain(v, 1) for k, v in value.items()} if isinstance(value, dict) else {}


def _plain(value: object, depth: int) -> Any:
    if isinstance(value, str):
        return words(value)
    if not isinstance(value, dict | list):
        return value
    if depth >= _MOST_DEPTH:
        return None
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    return {words(key): _plain(each, depth + 1) for key, each in value.items()}


def process_id(value: object) -> int | None:
    """A process id, of a number or of its digits."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value < _MOST_PID else None


def device(value: object) -> str:
    """A device's name: "3" of 3, "3" or "cuda:3"; "" where there is none."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000:
        return str(value)
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        return ""
    if (m := _CUDA.fullmatch(value)) is not None:
        return str(int(m[1] or 0))
    return str(int(value)) if value.isdecimal() and len(value) < 5 else value
