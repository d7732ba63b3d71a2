"""What PyTorch logs of its compiles, as events.

TORCH_LOGS_OUT names a file beside standard error, not instead of it (torch 2.11 to 2.14): PyTorch's
warnings reach it whatever TORCH_LOGS says, and what TORCH_LOGS asks for appears in both. The format is
for people: what is not understood here is passed over.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from draftline.signal.guards import describe, describe_break, inside_torch, name_function
from draftline.signal.trace import Event, one_line

_HEAD = re.compile(
    r"^(?:\[rank(?P<rank>\d+)\]:)?[VIWEC](?P<day>\d{4}) (?P<clock>\d\d:\d\d:\d\d)\.(?P<micro>\d{6}) "
    r"(?P<pid>\d+) (?P<place>.+?:\d+)\](?: \[(?P<compile>!?\d+/[\d_]+)\])?(?: \[__(?P<artifact>\w+)\])?"
    r" ?(?P<text>.*)$"
)
_RECOMPILING = re.compile(r"Recompiling function (\S+) in (.+):(\d+)")
_REASON = re.compile(r"\s+- (!?\d+/\d+(?:_\d+)?: .*)")
_BREAK = re.compile(r"Graph break (?:\(.*?\) )?in user code at (.+):(\d+)")
_SKIPPED = "Graph break: torch.compile cannot properly resume"
_WHOLE = "the whole function runs uncompiled"
_FRAME = re.compile(r'\s*File "(.+)", line (\d+), in ')
_BREAK_REASON = "Graph Break Reason: "
_LIMIT = re.compile(r"torch\._dynamo hit config\.(\w*recompile_limit)(?: \((\d+)\))?")
_LIMIT_FUNCTION = re.compile(r"\s*function: '(.+?)' \((.+):(\d+)\)")
_LIMIT_REASON = re.compile(r"\s*last reason: (.*)")
LONGEST = 1 << 16  # characters of a line, and lines of a record, that are looked at
LINES = 400


def place(path: str, line: str | int) -> str:
    """ "file.py:12" for a line of a source file."""
    return f"{PurePath(path).name}:{line}"


def read_time(day: str, clock: str, micro: str, now_s: float) -> float:
    """Unix seconds of a stamp without a year in local time: the latest such moment that is not more
    than a day after `now_s`."""
    year = time.localtime(now_s + 86400).tm_year
    for candidate in (year, year - 1):
        seconds = _whole_seconds(f"{candidate}{day} {clock}")
        if seconds is not None and seconds <= now_s + 86400:
            return seconds + int(micro) / 1e6
    return now_s


@functools.lru_cache(maxsize=64)
def _whole_seconds(stamp: str) -> float | None:
    try:
        return time.mktime(time.strptime(stamp, "%Y%m%d %H:%M:%S"))
    except (ValueError, OverflowError):  # the 29th of February in another year
        return None


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a line: who wrote it when, for which compile ("3/1") and which kind of log."""

    time_s: float
    pid: int
    rank: str | None
    compile: str | None
    artifact: str | None
    place: str


def read_head(line: str, now_s: float) -> tuple[Head, str] | None:
    """The head of a line and what follows it; None for a line that is not PyTorch's."""
    found = _HEAD.match(line[:LONGEST])
    if found is None:
        return None
    time_s = read_time(found["day"], found["clock"], found["micro"], now_s)
    head = Head(
        time_s,
        int(found["pid"]),
        found["rank"],
        found["compile"],
        found["artifact"],
        found["place"],
    )
    return head, found["text"]


class TorchLogs:
    """Turns lines of a TORCH_LOGS_OUT file, as they come, into events."""

    def __init__(self) -> None:
        self._head: Head | None = None
        self._lines: list[str] = []

    def feed(self, lines: Iterable[str], now_s: float) -> Iterator[Event]:
        """Events of the records that these lines complete; the last record waits for the next line,
        or for `flush`."""
        for line in lines:
            read = read_head(line, now_s)
            if read is None:
                continue
            head, text = read
            if head != self._head or _opens(text):
                yield from self.flush()
                self._head = head
            if len(self._lines) < LINES:
                self._lines.append(text)

    def flush(self) -> Iterator[Event]:
        """The event of the record that is still open, if it is one."""
        head, lines, self._head, self._lines = self._head, self._lines, None, []
        if head is not None and lines and (event := _read_record(head, lines)) is not None:
            yield event


def _opens(text: str) -> bool:
    return text.startswith(("Recompiling function ", "Graph break ", "torch._dynamo hit"))


def _read_record(head: Head, lines: Sequence[str]) -> Event | None:
    if (found := _RECOMPILING.match(lines[0])) is not None:
        reasons = [reason[1] for line in lines if (reason := _REASON.match(line)) is not None]
        where = f"`{name_function(found[1])}` ({place(found[2], found[3])})"
        return recompile_event(head, where, reasons)
    if lines[0].startswith("Graph break"):
        return break_event(head, lines)
    if (found := _LIMIT.match(lines[0])) is not None:
        function = next(filter(None, map(_LIMIT_FUNCTION.match, lines)), None)
        reason = next(filter(None, map(_LIMIT_REASON.match, lines)), None)
        where = "a function"
        if function is not None:
            where = f"`{name_function(function[1])}` ({place(function[2], function[3])})"
        return limit_event(head, where, found[2], reason and reason[1])
    if head.artifact == "cudagraphs" or "cudagraph" in head.place:
        return _cudagraph(head, lines[0])
    return None


def make_event(head: Head, kind: str, text: str, seconds: float | None = None) -> Event:
    rank = "" if head.rank is None else f" [rank {head.rank}]"
    return Event(head.time_s, kind, f"{one_line(text)}{rank}", None, seconds)


def recompile_event(head: Head, where: str, reasons: Sequence[str]) -> Event:
    return make_event(head, "recompile", f"{where}: {describe(reasons)}")


def limit_event(head: Head, where: str, limit: str | None, reason: str | None) -> Event:
    told = f" of {limit}" if limit else ""
    why = f"; last: {describe([reason])}" if reason else ""
    text = f"{where}: limit{told} reached, new cases run uncompiled or, with fullgraph, fail{why}"
    return make_event(head, "recompile_limit", text)


def break_event(head: Head, lines: Sequence[str]) -> Event | None:
    """Of Dynamo's text: a first line that says where it was, then the reason, or a general sentence and
    the reason after an empty line; None where it is another text."""
    found = _BREAK.match(lines[0])
    if found is None:
        if not lines[0].startswith(_SKIPPED):
            return None
        frames = list(filter(None, map(_FRAME.match, lines)))
        where = place(frames[-1][1], frames[-1][2]) if frames else "a place not told"
        return make_event(head, "graph_break", f"at {where}: {_WHOLE}")
    told = [line.strip() for line in lines[1:]]
    general = next((t.removeprefix(_BREAK_REASON) for t in told if t.startswith(_BREAK_REASON)), "")
    after = "\n".join(lines[told.index("") + 2 :]).lstrip("\n") if "" in told else ""
    particular = "" if after.startswith("User code traceback") else describe_break(after)
    reason = particular if general.endswith(":") or "graph break" in general else general
    whole = f"; {_WHOLE}" if "Skipping the function" in general else ""
    where = f"{place(found[1], found[2])}{inside_torch(found[1])}"
    text = f"at {where}: {reason or general or 'no reason is given'}{whole}"
    return make_event(head, "graph_break", text)


def _cudagraph(head: Head, text: str) -> Event | None:
    lowered = text.lower()
    if "skipping cudagraph" in lowered or "disabling cudagraph" in lowered:
        return make_event(head, "capture_skip", text.strip())
    if "recording cudagraph tree" in lowered:
        return make_event(head, "capture", text.strip())
    return None
