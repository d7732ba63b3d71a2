"""Reads recordings of GPU memory in every format that is known, told apart by what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from draftline.errors import ConfigError
from draftline.signal.draftline_run import EVENTS, METRICS, RECORDING, files_of, machines_of
from draftline.signal.readers import dmon, recording, smi, smi_table, snapshot
from draftline.signal.readers.assemble import assemble
from draftline.signal.readers.rows import Part
from draftline.signal.readers.screen import without_colours
from draftline.signal.readers.textfile import TextFile, clean
from draftline.signal.trace import Trace, one_line

FORMATS = (
    "a recording of draftline.signal or one JSON object per step (JSON lines), a draftline run "
    "directory, `nvidia-smi --query-gpu=... --format=csv` or --query-compute-apps, `nvidia-smi dmon` "
    "or pmon, plain `nvidia-smi` logged in a loop, a PyTorch memory snapshot; also as .gz or .xz"
)
_MOST_PATH, _MOST_NAMED = 1000, 8
_HEAD_BYTES = 1 << 16
_LOOKED_AT, _MOST_LOOKED_AT = 400, 1_000_000  # lines that tell the format
_BLANK = b"\0 \t\r\n"
# Others that people give, by how they begin, and what to do with them.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"BZh", "a bzip2 archive; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it first"),
    (b"PK\x03\x04", "a zip archive (torch.save writes one); it holds no recording"),
    (b"SQLite format 3", "an SQLite database (of a profiler?)"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG", "a picture"),
    (b"%PDF", "a PDF"),
    (b"<?xml", "XML (nvidia-smi -q -x?); record with --query-gpu=... --format=csv"),
    (b"==============NVSMI", "the long form of nvidia-smi -q; record with --query-gpu=..."),
    (b"<", "HTML or XML"),
)


def read_trace(paths: Sequence[Path]) -> Trace:
    """Everything that the files of one run tell, on one clock and by the driver's device indices.

    A run directory stands for the recording and logs in it, those of its other machines excepted: a
    note names them, since device numbers of two machines would clash. What was mended, guessed or
    left out is in the notes. Raises ConfigError for no file, and for one that is missing, empty,
    unreadable, hostile or of no known format.
    """
    if not paths:
        raise ConfigError(f"no file was given to read; what can be read: {FORMATS}")
    parts: list[Part] = []
    notes: list[str] = []
    seen: set[Path] = set()
    before: Part | None = None
    for given in paths:
        notes += _other_machines(given)
    for path in (file for given in paths for file in _files_of(given)):
        real = path.resolve()
        if real in seen:
            notes.append(f"{path} was given twice and read once")
            continue
        seen.add(real)
        part = _read(path, before)
        # What the columns of a query are is known of its first file alone.
        before = before if part.header is None else part
        part.source = _shown(path)
        parts.append(part)
    parts.sort(key=lambda part: part.kind != "recording")
    trace = assemble(parts)
    if not trace.devices:
        raise ConfigError(
            f"{', '.join(_shown(path) for path in paths)} holds no memory reading and no step"
            f"{': ' if trace.notes else ''}{'; '.join(trace.notes)}; what can be read: {FORMATS}"
        )
    return replace(trace, notes=(*notes, *trace.notes))


def _files_of(path: Path) -> list[Path]:
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError):
        is_directory = False
    if not is_directory:
        return [path]
    try:
        # A run that has just begun has its files, but nothing in them.
        filled = [file for file in files_of(path) if file.is_file() and file.stat().st_size]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if not filled:
        raise ConfigError(
            f"{path} is a directory without {RECORDING}, {EVENTS} and {METRICS}, or they are "
            f"empty; name a run directory or a file; what can be read: {FORMATS}"
        )
    return filled


def _shown(path: Path) -> str:
    """A path for people: whoever made a file chose its name."""
    return one_line(str(path), _MOST_PATH)


def _other_machines(path: Path) -> list[str]:
    """What is to be said of the folders that a run directory has for its other machines."""
    try:
        found = machines_of(path)
    except (OSError, ValueError):  # no directory, or what reading its files will say
        return []
    if not found:
        return []
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return [
        f"the run's other machines are not in this: diagnose {', '.join(found[:_MOST_NAMED])}{more} in "
        f"{_shown(path)} each by its own name"
    ]


def _read(path: Path, before: Part | None) -> Part:
    text = TextFile(path)
    head = text.head(_HEAD_BYTES)
    if snapshot.looks_like(head):
        found, notes = snapshot.read_snapshot(path)
        return Part(path.name, "snapshot", snapshots=found, notes=notes)
    if head[257:262] == b"ustar":
        raise ConfigError(
            f"{_shown(path)} is a tar archive, perhaps of several runs; unpack it and name the files of one"
        )
    reader = _reader_for(TextFile(path).lines())
    if reader is None and not head.strip(_BLANK):
        raise ConfigError(
            f"{_shown(path)} is empty; record for a few minutes of steady steps first"
        )
    if reader is None:
        raise ConfigError(
            f"{_shown(path)} looks like {_describe(head)}; what can be read: {FORMATS}"
        )
    part = reader.read(text, before)
    part.notes += text.notes()
    return part


class Reader(Protocol):
    """One format of text files: a module with these two functions and an entry below."""

    def recognises(self, line: str, /) -> bool:
        """Whether the line is one of such a file."""
        ...

    def read(self, text: TextFile, before: Part | None, /) -> Part:
        """What the file holds; `before` is what an earlier file of the run gave, if any."""
        ...


# By how much a line that is recognised speaks for the format: one of the first three cannot be anything
# else, a row of numbers can. Of a monitor's lines only headers are told apart.
_READERS: tuple[tuple[Reader, int], ...] = (
    (recording, 8),
    (dmon, _LOOKED_AT),
    (smi_table, 8),
    (smi, 1),
)


def _reader_for(lines: Iterable[str]) -> Reader | None:
    """Of the format for which most lines speak, of the first that are known and those that follow."""
    votes = [0] * len(_READERS)
    last = _MOST_LOOKED_AT
    for n, line in enumerate(filter(str.strip, lines)):
        if n >= last:
            break
        plain = without_colours(line)
        for place, (reader, weight) in enumerate(_READERS):
            if reader.recognises(plain):
                votes[place] += weight
                last = min(last, n + _LOOKED_AT)
                break
    best = max(votes)
    return _READERS[votes.index(best)][0] if best else None


def _describe(head: bytes) -> str:
    for magic, what in _OTHERS:
        if head.startswith(magic):
            return what
    sample = head[:4096]
    odd = sum(byte < 9 or 13 < byte < 32 for byte in sample)
    if odd * 20 > len(sample):
        return "binary data"
    first = next(iter(clean(head).strip().splitlines()), "")[:60]
    if first[:1] in "[{":
        return "a JSON document, not one JSON object per line"
    return f"text that begins with {first!r}"
