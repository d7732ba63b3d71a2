"""What one device's evidence comes to: its shape, the faults in their order, and what to record where
it cannot tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draftline.signal.judge.cause import Cause, largest_blocks
from draftline.signal.judge.compiler_rules import COMPILER_RULES
from draftline.signal.judge.evidence import ALLOCATOR_TOLERANCE_BYTES, Evidence
from draftline.signal.judge.memory_rules import (
    allocator_retries,
    cache_flush,
    fragmentation,
    largest_so_far,
    leak,
    other_process,
    unbounded_shapes,
)
from draftline.signal.judge.phases import PAUSES
from draftline.signal.judge.processes import name_processes
from draftline.signal.judge.shape import TOLERANCE_BYTES, Shape, counted
from draftline.signal.trace import MIB, Snapshot, one_line

COUNTERS_NEEDED = (
    "record its counters: `from draftline import signal`, then `signal.mark_step()` after each step "
    "(docs/signal.md), or start it with `draftline watch -- python ...`; then diagnose both files together"
)

_FEWEST_STEPS = 5
_FEWEST_READINGS = 64  # for the ends of a curve to be compared
_LOOKS_LIKE = {
    "slope": "a leak, ever larger shapes or another process",
    "staircase": "ever larger shapes, fragmentation, a leak or another process",
    "sawtooth": "emptied caches, failed allocations, captures, evaluations or another process",
    "volatile": "changing shapes, emptied caches, failed allocations or another process",
}

# A finding of these explains whatever else moves; only a leak is still looked for.
_MOVING = ("compile_storm", "recompile_limit", "recompiling")


def find_causes(seen: Evidence) -> list[Cause]:
    """The faults that one device's evidence shows, the most telling first; empty if none."""
    rules = COMPILER_RULES if seen.of_program else ()
    compiler = next((c for rule in rules if (c := rule(seen)) is not None), None)
    lost = leak(seen)
    if compiler is not None and compiler.cause in _MOVING:
        failed = allocator_retries(seen)
        return [cause for cause in (compiler, failed, lost) if cause is not None]
    # Failed allocations flush and refill the cache, and kept tensors make the allocator take more.
    growth = () if lost is not None else (unbounded_shapes, fragmentation)
    if lost is None and (bounded := largest_so_far(seen)) is not None:
        return [
            cause for cause in (compiler, allocator_retries(seen), bounded) if cause is not None
        ]
    gaps = fragmentation(seen) if lost is None else None
    if gaps is not None and (failed := allocator_retries(seen)) is not None:
        failed = replace(
            failed, action="mend the fragmentation first: the memory is there, in gaps"
        )
        return [cause for cause in (compiler, gaps, failed) if cause is not None]
    found = (allocator_retries, cache_flush, *growth)
    allocator = next((c for rule in found if (c := rule(seen)) is not None), None)
    other = other_process(seen) if allocator is None and lost is None else None
    return [cause for cause in (compiler, allocator, lost, other) if cause is not None]


def shape_of(seen: Evidence) -> Shape:
    """Of the device where it was sampled, else of what the allocator holds; where tensors themselves
    grow steadily, of these: a leak fills what the allocator holds before the device shows it."""
    shape = seen.held
    if seen.seen.kind != "unknown" or (seen.samples is not None and shape.kind == "unknown"):
        shape = seen.seen
    if shape.kind in ("flat", "unknown") and seen.held.kind not in ("flat", "unknown"):
        shape = seen.held
    kept = seen.kept_by_pauses("reserved_bytes")
    if shape.kind == "flat" and kept is not None:
        pauses, more = kept
        words = f"each of the last {pauses} pauses left {more / MIB:,.0f} MiB more held"
        return replace(shape, kind="staircase", words=words)
    if seen.floor.kind == "slope" and shape.kind in ("flat", "unknown", "staircase", "slope"):
        words = f"what tensors occupy {seen.floor.words}"
        return replace(seen.floor, words=words)
    if shape.kind == "slope" and seen.floor.kind == "flat":
        words = f"rose again and again ({shape.words}), while what tensors occupy stayed the same"
        return replace(shape, kind="staircase", words=words)
    return shape


def without_fault(seen: Evidence, shape: Shape) -> Cause:
    """What to say of a device on which no fault was found: healthy, a pause, or unknown and what to
    record."""
    failed = seen.events("error", steady=False) + seen.events("oom", steady=False)
    ended = failed and seen.count < _FEWEST_STEPS
    early = f"the program ended early ({one_line(failed[-1].text, 200)}): " if ended else ""
    if seen.device == "cpu":
        words = f"{early}the program used no GPU: there is no device memory to judge."
        return Cause("unknown", "high", words, "nothing to do")
    if seen.snapshots and seen.steps is None and seen.samples is None:
        return _of_snapshot(seen.snapshots[-1])
    if shape.kind == "idle":
        words = f"the device is idle {shape.level}: {shape.words}."
        return Cause("unknown", "high", words, "nothing to do, unless the program uses this device")
    if shape.kind == "unknown":
        needed = "record a longer stretch" if seen.samples or seen.steps else "record its memory"
        return Cause(
            "unknown", "low", f"{early}{_at(shape)}{shape.words}.", f"{needed}; {COUNTERS_NEEDED}"
        )
    has_counters = seen.known("allocator_calls") or seen.known("reserved_bytes")
    if has_counters and seen.count < _FEWEST_STEPS:
        words = f"{counted(seen.count, 'step')} in the steady state, too few to judge"
        return Cause(
            "unknown",
            "low",
            f"{early}{words}; memory: {_at(shape)}{shape.words}.",
            "record a longer stretch",
        )
    if shape.kind != "flat":
        moves = "the device's memory moves" if seen.samples else "what the allocator holds moves"
        if not has_counters and (named := name_processes(seen)):
            return Cause(
                "unknown",
                "medium",
                f"the device's memory moves ({shape.words}, {shape.level}): {named}.",
                f"`ps -p PID` names a process; to know why it grows, {COUNTERS_NEEDED}",
            )
        rest = (
            "none of the recorded counters explains it"
            if has_counters
            else f"{_LOOKS_LIKE[shape.kind]} can look like this"
        )
        return Cause(
            "unknown",
            "low",
            f"{moves}: {shape.words}, {shape.level}; {rest}.",
            "record a memory snapshot of a few steps" if has_counters else COUNTERS_NEEDED,
        )
    if not has_counters:
        # One process may grow into what another gives back.
        named = name_processes(seen)
        listed = f" in all, of which {named}" if named else ""
        return Cause(
            "unknown",
            "low",
            f"memory is flat {shape.level} ({shape.words}){listed}; whether the step is compiled or "
            "captured cannot be told from the device's memory alone (an uncompiled step can look like this "
            "too).",
            COUNTERS_NEEDED,
        )
    if seen.pauses:
        marked = any(phase.name in PAUSES for phase in seen.phases)
        return Cause(
            "pause",
            "high" if marked else "medium",
            f"the steps are interrupted by {', '.join(seen.pauses)}"
            f"{', which is normal' if marked else ''}; between them memory stands still "
            f"{shape.level} ({shape.words}).",
            "nothing to do",
        )
    unseen = (
        "" if seen.samples else "; the device itself was not sampled, so nothing is known of others"
    )
    floor = seen.floor
    moves = (
        ""
        if floor.kind in ("flat", "unknown")
        else f"; what tensors occupy between two steps is {floor.kind} {floor.level}"
    )
    if moves and (more := _late_rise(seen)) > ALLOCATOR_TOLERANCE_BYTES:
        return Cause(
            "unknown",
            "low",
            f"what the allocator holds is flat {shape.level}{moves}, at the end {more / MIB:,.0f} MiB "
            "above all but the highest readings before: a leak that began late, or a new level.",
            "record a longer stretch",
        )
    hides = f"{moves}, under which a slow growth is not seen" if moves else ""
    # One rise is no pattern, and not nothing either.
    sure = "high" if not moves and not shape.range_bytes > TOLERANCE_BYTES else "medium"
    return Cause(
        "healthy",
        sure,
        f"{_at(shape)}{shape.words}; {_quiet(seen)}{unseen}{hides}.",
        "nothing to do",
    )


def _late_rise(seen: Evidence) -> float:
    """Bytes by which what tensors occupy lies higher in the last eighth than in the first three quarters,
    their highest readings left out."""
    level = seen.level("allocated_bytes")
    before, last = level[: 3 * len(level) // 4], level[-len(level) // 8 :]
    if len(level) < _FEWEST_READINGS:
        return 0.0
    return float(np.median(last) - np.quantile(before, 0.98))


def _at(shape: Shape) -> str:
    return f"{shape.level}: " if shape.level else ""


def _of_snapshot(shot: Snapshot) -> Cause:
    """What one moment shows: where the memory lies, and no movement."""
    return Cause(
        "unknown",
        "low",
        f"at the snapshot the allocator holds {shot.reserved_bytes / MIB:,.0f} MiB in "
        f"{counted(shot.segments, 'segment')}: {shot.allocated_bytes / MIB:,.0f} MiB in use, "
        f"{shot.inactive_bytes / MIB:,.0f} MiB in gaps of split blocks. "
        f"{largest_blocks(shot)} One moment says nothing of movement.",
        COUNTERS_NEEDED,
    )


def _quiet(seen: Evidence) -> str:
    """What the counters said of the steady state."""
    parts = []
    for name, noun, each in (
        ("allocator_calls", "memory request", " per step"),
        ("compiles", "compile", ""),
        ("retries", "retry", ""),
        ("graph_replays", "graph replay", " per step"),
    ):
        grown = seen.grown(name)
        if grown is None:
            continue
        value = grown / max(seen.count, 1) if each else grown
        parts.append(f"{counted(value, noun)}{each}")
    said = ", ".join(parts) or "no counters of compiles or requests"
    return f"{said} in {seen.count} steps"
