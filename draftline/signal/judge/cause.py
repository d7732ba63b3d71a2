"""A cause, and what rules share to find and word one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftline.signal.judge.evidence import Evidence
from draftline.signal.trace import GIB, MIB, Event, Snapshot, one_line


@dataclass(frozen=True, slots=True)
class Cause:
    """`cause` is a name in `words.CAUSES`; `confidence` is high, medium or low; `evidence` and
    `action` are sentences."""

    cause: str
    confidence: str
    evidence: str
    action: str


Rule = Callable[[Evidence], Cause | None]


def calls_a_step(seen: Evidence) -> str:
    gained = seen.gained("allocator_calls")
    return (
        f"{float(gained.sum()) / max(seen.count, 1):,.0f} memory requests per step. "
        if len(gained)
        else ""
    )


def peak_over_floor(seen: Evidence) -> str:
    peak, floor = seen.level("peak_bytes"), seen.level("allocated_bytes")
    if not len(peak) or not len(floor):
        return ""
    over = float(np.median(peak) - np.median(floor))
    tokens = seen.level("tokens")
    if over < MIB:
        return ""
    usual = float(np.median(tokens)) if len(tokens) else 0.0
    each = f", {over / usual / 1024:,.0f} KiB per token" if usual > 0 else ""
    return f"Inside a step {over / GIB:.2f} GiB come and go{each}."


def last_text(events: Sequence[Event]) -> str:
    """What the last of them says, on one line: a later reason knows the earlier ones."""
    return one_line(next((event.text for event in reversed(events) if event.text), ""))


def because(reason: str) -> str:
    return f" ({reason.strip().rstrip('.')})" if reason else ""


def largest_blocks(shot: Snapshot) -> str:
    blocks = [f"{size / MIB:,.0f} MiB from {frame}" for size, frame in shot.largest[:5]]
    return f"Largest live blocks: {'; '.join(blocks) or 'not recorded'}."
