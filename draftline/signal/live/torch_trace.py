"""What TORCH_TRACE writes of a process's compiles, as events.

TORCH_TRACE names a directory with a file for each process and adds nothing to the program's output. It
alone has the compiles that are no recompiles, and their seconds. Payloads follow their record in lines
that begin with a tab; most are graphs and generated code, which nobody reads here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftline.signal.guards import is_limit, name_function
from draftline.signal.live.torch_logs import (
    LINES,
    LONGEST,
    Head,
    break_event,
    limit_event,
    make_event,
    place,
    read_head,
    recompile_event,
)
from draftline.signal.trace import Event

_MARKS = (
    '{"str": ',
    '{"dynamo_start": ',
    '{"artifact": ',
    '{"compilation_metrics": ',
    '{"bwd_compilation_metrics": ',
)


@dataclass
class TorchTrace:
    """Turns lines of one TORCH_TRACE file, as they come, into events: compiles with their seconds,
    refused captures, recompiles and graph breaks, with `limits` the recompile limit where it is
    reached."""

    limits: bool = True
    rank: str | None = None
    compiling: tuple[str, float] | None = None  # what is being compiled, and since when
    _strings: dict[int, str] = field(default_factory=dict)
    _functions: dict[int, str] = field(default_factory=dict)  # by the number of the frame
    _waiting: tuple[Head, str, int] | None = None
    _payload: list[str] = field(default_factory=list)
    _pending: dict[int, tuple[Head, list[str]]] = field(default_factory=dict)

    def feed(self, lines: Iterable[str], now_s: float) -> Iterator[Event]:
        """Events of the records that these lines complete."""
        for line in lines:
            if line.startswith("\t"):
                if self._waiting is not None and len(self._payload) < LINES:
                    self._payload.append(line[1 : 1 + LONGEST])
                continue
            yield from self._close()
            # Most records are graphs and timings; they are not worth parsing.
            if any(mark in line for mark in _MARKS):
                yield from self._open(line, now_s)

    def flush(self) -> Iterator[Event]:
        """The event of the record that is still open, if it is one."""
        yield from self._close()

    def _open(self, line: str, now_s: float) -> Iterator[Event]:
        read = _read_metadata(line, now_s)
        if read is None:
            return
        head, data = read
        if self.rank is not None:
            head = replace(head, rank=self.rank)
        frame = data.get("frame_id")
        frame = frame if isinstance(frame, int) else -1
        string = data.get("str")
        if isinstance(string, list) and len(string) == 2 and isinstance(string[1], int):
            self._strings[string[1]] = str(string[0])
        elif isinstance(start := data.get("dynamo_start"), dict):
            yield from self._start(head, frame, start.get("stack"))
        elif isinstance(artifact := data.get("artifact"), dict):
            if artifact.get("name") in ("recompile_reasons", "dynamo_graph_break_reason"):
                self._waiting = (head, artifact["name"], frame)
        else:
            for name, backward in (
                ("compilation_metrics", False),
                ("bwd_compilation_metrics", True),
            ):
                if isinstance(metrics := data.get(name), dict):
                    yield from self._compiled(head, frame, metrics, backward)

    def _start(self, head: Head, frame: int, stack: Any) -> Iterator[Event]:
        top = stack[-1] if isinstance(stack, list) and stack else None
        if isinstance(top, dict):
            number = top.get("filename")
            file = self._strings.get(number, "?") if isinstance(number, int) else "?"
            name = name_function(str(top.get("name", "?")))
            self._functions[frame] = f"`{name}` ({place(file, top.get('line', '?'))})"
            self.compiling = (self._functions[frame], head.time_s)
        if (waiting := self._pending.pop(frame, None)) is not None:
            reason_head, reasons = waiting
            yield recompile_event(reason_head, self._name(frame), reasons)

    def _name(self, frame: int) -> str:
        return self._functions.get(frame, "a function")

    def _compiled(
        self, head: Head, frame: int, metrics: dict[str, Any], backward: bool
    ) -> Iterator[Event]:
        name = self._name(frame)
        self.compiling = None
        self._pending.pop(frame, None)
        why = str(metrics.get("fail_reason") or "")
        limit = is_limit(why) or metrics.get("fail_type") == "FailOnRecompileLimitHit"
        if limit and self.limits:
            last = metrics.get("recompile_reason")
            number = re.search(r"currently set to (\d+)", why)
            yield limit_event(
                head, name, number and number[1], last if isinstance(last, str) else None
            )
        spent_us = metrics.get("duration_us")
        seconds = spent_us / 1e6 if isinstance(spent_us, (int, float)) else None
        if not limit:
            text = f"{name}, backward" if backward else name
            yield make_event(head, "compile", text, seconds)
        if isinstance(skipped := metrics.get("cudagraph_skip_reason"), str):
            yield make_event(head, "capture_skip", f"{name}: {skipped}")

    def _close(self) -> Iterator[Event]:
        waiting, payload, self._waiting, self._payload = self._waiting, self._payload, None, []
        if waiting is None:
            return
        head, kind, frame = waiting
        if kind == "recompile_reasons":
            # The function's name follows, with the start of the compile.
            self._pending[frame] = (head, _read_reasons(payload))
        elif payload and (event := break_event(head, payload)) is not None:
            yield event


def _read_reasons(payload: Sequence[str]) -> list[str]:
    """One reason as its text with a stack trace below, or several as a JSON list of such texts."""
    try:
        told = json.loads("\n".join(payload))
    except (ValueError, RecursionError):
        told = None
    return [str(reason) for reason in told] if isinstance(told, list) else list(payload[:1])


def _read_metadata(line: str, now_s: float) -> tuple[Head, dict[str, Any]] | None:
    start = line.find("] {")
    read = read_head(line[: start + 1], now_s) if start >= 0 else None
    if read is None:
        return None
    try:
        data = json.loads(line[start + 2 :])
    except (ValueError, RecursionError):
        return None
    return (read[0], data) if isinstance(data, dict) else None
