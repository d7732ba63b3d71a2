"""Which of a device's processes moves its memory, in words."""

from __future__ import annotations

import numpy as np

from draftline.signal.judge.evidence import Evidence
from draftline.signal.judge.shape import TOLERANCE_BYTES, find_shape
from draftline.signal.trace import Column

_MOST_NAMED = 4


def name_processes(seen: Evidence) -> str:
    """What each process does, the one that moves most first; "" where none that is listed moves."""
    samples = seen.samples
    if samples is None:
        return ""
    told = []
    for pid, column in samples.by_process.items():
        known = np.isfinite(column)
        if known.any():
            moved, words = _describe(samples.time_s[known], column[known], seen)
            told.append((moved, f"process {pid} {words}"))
    told.sort(key=lambda one: -one[0])
    if not told or told[0][0] <= TOLERANCE_BYTES:
        return ""
    rest = len(told) - _MOST_NAMED
    return "; ".join(words for _, words in told[:_MOST_NAMED]) + (
        f"; and {rest} more" if rest > 0 else ""
    )


def _describe(times: Column, used: Column, seen: Evidence) -> tuple[float, str]:
    """Bytes by which a process moves, and how: its shape while it is there, and whether it always was."""
    there = used > 0
    if not there.any():
        return 0.0, "holds nothing"
    stays = int(np.sum(there & ~np.r_[False, there[:-1]]))
    shape = find_shape(times[there], used[there], seen.sampled_windows)
    words = (
        f"{shape.words} {shape.level}" if shape.kind == "flat" else f"{shape.words}, {shape.level}"
    )
    words = f"has {words}" if words[:1].isdigit() else words
    words = f"is flat {shape.level}" if shape.kind == "flat" else words
    moved = shape.range_bytes if np.isfinite(shape.range_bytes) else float(np.ptp(used[there]))
    if shape.kind == "unknown":
        words = f"held up to {used.max() / 2**20:,.0f} MiB"
    if stays > 1:
        words += f", and came {stays} times under this number (perhaps several programs)"
    elif not there[0] or not there[-1]:
        words += f", and {'came' if not there[0] else 'went'} while it was watched"
    if not there.all():
        moved = max(moved, float(used.max()))
    return moved, words
