"""The record of a warm-up: one row a warmed graph, the table of them, and a sign of life."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

COMPILED, CACHE_HIT = "compiled", "cache hit"
CAPTURED, NOTHING = "captured", "nothing to compile"


@dataclass(frozen=True, slots=True)
class WarmRow:
    """One warmed graph. `compiles` counts forward, backward and every shape; `late` marks one that
    was warmed after the seal, while everybody waited."""

    name: str
    device: str
    outcome: str
    compiles: int
    seconds: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One compile: the `forward` or `backward` part of a function."""

    name: str
    device: str
    part: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Graphs so far that came from inductor's cache, and those that had to be generated."""

    hits: int
    misses: int

    @classmethod
    def now(cls) -> CacheCounts:
        """Zero where this torch keeps no such counters: a hit then shows as compiled."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        counted = getattr(dynamo, "counters", {}).get("inductor", {})
        return cls(
            hits=counted.get("fxgraph_cache_hit", 0),
            misses=counted.get("fxgraph_cache_miss", 0) + counted.get("fxgraph_cache_bypass", 0),
        )


def outcome(compiles: int, before: CacheCounts, after: CacheCounts, *, captured: bool) -> str:
    """What a warm-up came to. A cache hit has every graph from the cache."""
    if captured:
        return CAPTURED
    if not compiles:
        return NOTHING
    hit = after.hits > before.hits and after.misses == before.misses
    return CACHE_HIT if hit else COMPILED


def table_lines(
    rows: Sequence[WarmRow], graphs: Sequence[GraphRow], cold: Sequence[tuple[str, str]]
) -> list[str]:
    """Aligned lines: a head, one line per compile, one per warm-up, one for each of `cold` (name, device),
    and the coverage."""
    cells = [("graph", "device", "part", "outcome", "seconds")]
    cells += [(g.name, g.device, g.part, g.outcome, f"{g.seconds:.1f}") for g in graphs]
    for row in rows:
        said = f"{row.outcome}, late" if row.late else row.outcome
        cells.append((row.name, row.device, "whole", said, f"{row.seconds:.1f}"))
    cells += [(name, device, "-", "never called", "-") for name, device in cold]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = []
    for line in cells:
        texts = [text.ljust(width) for text, width in zip(line[:4], widths[:4], strict=True)]
        lines.append("  ".join([*texts, line[4].rjust(widths[4])]))
    seconds = sum(row.seconds for row in rows)
    lines.append(f"{len(rows)} of {len(rows) + len(cold)} warmed in {seconds:.1f} s")
    return lines


@contextmanager
def heartbeat(what: str, every_s: float) -> Iterator[None]:
    """Logs "still warming `what`: n s" every `every_s` seconds until the block is left."""
    done = threading.Event()
    began = time.monotonic()

    def beat() -> None:
        while not done.wait(every_s):
            log.info("still warming %s: %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=beat, name=f"heartbeat {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
