"""The judgement of a trace: each device's shape and causes, and what to record where it cannot tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftline.signal.judge.cause import FAULTS, Cause
from draftline.signal.judge.compiler_rules import COMPILER_RULES
from draftline.signal.judge.evidence import ALLOCATOR_TOLERANCE_BYTES, Evidence, gather
from draftline.signal.judge.memory_rules import (
    allocator_retries,
    cache_flush,
    fragmentation,
    leak,
    other_process,
    unbounded_shapes,
)
from draftline.signal.judge.phases import PAUSES, Phase
from draftline.signal.judge.shape import MIB, TOLERANCE_BYTES, Shape, counted
from draftline.signal.trace import Snapshot, Trace, device_name

COUNTERS_NEEDED = (
    "record its counters: `from draftline import signal`, then `signal.mark_step()` after each step "
    "(docs/signal.md), or start it with `draftline watch -- python ...`; then diagnose both files together"
)

_FEWEST_STEPS = 5
_LOOKS_LIKE = {
    "slope": "a leak, ever larger shapes or another process",
    "staircase": "ever larger shapes, fragmentation, a leak or another process",
    "sawtooth": "emptied caches, failed allocations, captures, evaluations or another process",
    "volatile": "changing shapes, emptied caches, failed allocations or another process",
}


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """One device: `shape` is one of shape.SHAPES, `words` describes it, `causes` has at least one;
    `allocator` is the shape of what this program's allocator holds on it."""

    device: str
    shape: str
    words: str
    phases: tuple[Phase, ...]
    causes: tuple[Cause, ...]
    allocator: str = "unknown"

    @property
    def faults(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.cause in FAULTS]

    @property
    def flat(self) -> bool:
        return self.shape == "flat"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`verdict` is healthy, fault, not_flat (no cause can be named) or unknown."""

    devices: tuple[DeviceVerdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if any(device.faults for device in self.devices):
            return "fault"
        if any(device.shape not in ("flat", "unknown") for device in self.devices):
            return "not_flat"
        if not self.devices or any(
            device.shape == "unknown" and device.causes[0].cause == "unknown"
            for device in self.devices
        ):
            return "unknown"
        return "healthy" if all(d.causes[0].cause != "unknown" for d in self.devices) else "flat"

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong with it; 3: not flat, or a fault; 4: it cannot be told."""
        return {"fault": 3, "not_flat": 3, "unknown": 4}.get(self.verdict, 0)

    @property
    def worst(self) -> DeviceVerdict:
        """The device that the line speaks of; there must be one."""
        return max(self.devices, key=lambda device: (bool(device.faults), not device.flat))

    @property
    def line(self) -> str:
        """The judgement in one line."""
        if not self.devices:
            return "no device memory was recorded"
        worst = self.worst
        first = worst.causes[0]
        where = f"{device_name(worst.device)}: "
        if worst.faults:
            return f"{where}{first.cause} ({first.confidence} confidence): {first.evidence}"
        if first.cause == "unknown":
            return where + first.evidence
        others = len(self.devices) - 1
        also = (
            f" (and {others} more alike)" if others and self.verdict in ("healthy", "flat") else ""
        )
        return f"{where}memory is {worst.shape}, {first.cause}{also}: {first.evidence}"

    def to_dict(self) -> dict[str, Any]:
        """What `draftline diagnose --json` prints."""
        return {
            "devices": [
                {
                    "device": device.device,
                    "shape": device.shape,
                    "words": device.words,
                    "phases": [asdict(phase) for phase in device.phases],
                    "causes": [asdict(cause) for cause in device.causes],
                }
                for device in self.devices
            ],
            "verdict": self.verdict,
            "line": self.line,
            "notes": list(self.notes),
        }


def judge(trace: Trace) -> Verdict:
    """The verdict on everything read of one run."""
    return Verdict(tuple(_judge(seen) for seen in gather(trace)), trace.notes)


def _judge(seen: Evidence) -> DeviceVerdict:
    shape = _shape(seen)
    causes = find_causes(seen) or [_without_fault(seen, shape)]
    words = "no device memory" if seen.device == "cpu" else shape.words
    return DeviceVerdict(
        seen.device, shape.kind, words, tuple(seen.phases), tuple(causes), seen.held.kind
    )


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
    found = (allocator_retries, cache_flush, *growth)
    allocator = next((c for rule in found if (c := rule(seen)) is not None), None)
    other = other_process(seen) if allocator is None and lost is None else None
    return [cause for cause in (compiler, allocator, lost, other) if cause is not None]


def _shape(seen: Evidence) -> Shape:
    """Of the device where it was sampled, else of what the allocator holds; where tensors themselves
    grow steadily, of these: a leak fills what the allocator holds before the device shows it."""
    shape = seen.held
    if seen.seen.kind != "unknown" or (seen.samples is not None and shape.kind == "unknown"):
        shape = seen.seen
    if shape.kind in ("flat", "unknown") and seen.held.kind not in ("flat", "unknown"):
        shape = seen.held
    kept = seen.kept_by_pauses("reserved_bytes")
    if (
        shape.kind == "flat"
        and len(kept) >= 3
        and (kept > ALLOCATOR_TOLERANCE_BYTES).mean() >= 0.75
    ):
        words = (
            f"each of the last {len(kept)} pauses left {np.median(kept) / MIB:,.0f} MiB more held"
        )
        return replace(shape, kind="staircase", words=words)
    if seen.floor.kind == "slope" and shape.kind in ("flat", "unknown", "staircase", "slope"):
        words = f"what tensors occupy {seen.floor.words}"
        return replace(seen.floor, words=words)
    if shape.kind == "slope" and seen.floor.kind == "flat":
        words = f"rose again and again ({shape.words}), while what tensors occupy stayed the same"
        return replace(shape, kind="staircase", words=words)
    return shape


def _without_fault(seen: Evidence, shape: Shape) -> Cause:
    if seen.device == "cpu":
        words = "the program used no GPU: there is no device memory to judge."
        return Cause("unknown", "high", words, "nothing to do")
    if seen.snapshots and seen.steps is None and seen.samples is None:
        return _of_snapshot(seen.snapshots[-1])
    if shape.kind == "unknown":
        needed = "record a longer stretch" if seen.samples or seen.steps else "record its memory"
        return Cause("unknown", "low", f"{shape.words}.", f"{needed}; {COUNTERS_NEEDED}")
    has_counters = seen.known("allocator_calls") or seen.known("reserved_bytes")
    if has_counters and seen.count < _FEWEST_STEPS:
        words = f"{counted(seen.count, 'step')} in the steady state, too few to judge"
        return Cause(
            "unknown", "low", f"{words}; memory: {shape.words}.", "record a longer stretch"
        )
    if shape.kind != "flat":
        moves = "the device's memory moves" if seen.samples else "what the allocator holds moves"
        rest = (
            "none of the recorded counters explains it"
            if has_counters
            else f"{_LOOKS_LIKE[shape.kind]} can look like this"
        )
        return Cause(
            "unknown",
            "low",
            f"{moves}: {shape.words}; {rest}.",
            "record a memory snapshot of a few steps" if has_counters else COUNTERS_NEEDED,
        )
    if not has_counters:
        return Cause(
            "unknown",
            "low",
            f"memory is flat ({shape.words}); whether the step is compiled or captured cannot be told from "
            "the device's memory alone (an uncompiled step can look like this too).",
            COUNTERS_NEEDED,
        )
    if seen.pauses:
        marked = any(phase.name in PAUSES for phase in seen.phases)
        return Cause(
            "pause",
            "high" if marked else "medium",
            f"the steps are interrupted by {', '.join(seen.pauses)}"
            f"{', which is normal' if marked else ''}; between them memory stands still ({shape.words}).",
            "nothing to do",
        )
    unseen = (
        "" if seen.samples else "; the device itself was not sampled, so nothing is known of others"
    )
    # One rise is no pattern, and not nothing either.
    sure = "high" if not shape.range_bytes > TOLERANCE_BYTES else "medium"
    return Cause("healthy", sure, f"{shape.words}; {_quiet(seen)}{unseen}.", "nothing to do")


def _of_snapshot(shot: Snapshot) -> Cause:
    """What one moment shows: where the memory lies, and no movement."""
    largest = "; ".join(f"{size / MIB:,.0f} MiB from {frame}" for size, frame in shot.largest[:5])
    return Cause(
        "unknown",
        "low",
        f"at the snapshot the allocator holds {shot.reserved_bytes / MIB:,.0f} MiB in "
        f"{counted(shot.segments, 'segment')}: {shot.allocated_bytes / MIB:,.0f} MiB in use, "
        f"{shot.inactive_bytes / MIB:,.0f} MiB in gaps of split blocks. Largest live blocks: "
        f"{largest or 'not recorded'}. One moment says nothing of movement.",
        COUNTERS_NEEDED,
    )


def _quiet(seen: Evidence) -> str:
    """What the counters said of the steady state."""
    parts = []
    for name, noun, each in (
        ("allocator_calls", "memory request", " a step"),
        ("compiles", "compile", ""),
        ("retries", "retry", ""),
        ("graph_replays", "graph replay", " a step"),
    ):
        grown = seen.grown(name)
        if grown is None:
            continue
        value = grown / max(seen.count, 1) if each else grown
        parts.append(f"{counted(value, noun)}{each}")
    return f"{', '.join(parts)} in {seen.count} steps"


def report_lines(verdict: Verdict) -> list[str]:
    """The verdict for a person, as `draftline diagnose` prints it."""
    lines = []
    for device in verdict.devices:
        name = device_name(device.device)
        lines.append(f"{name}: {device.shape} - {device.words}")
        stretches = [f"{p.name} {p.seconds:.1f} s" for p in device.phases]
        if stretches:
            shown = (
                stretches
                if len(stretches) <= 9
                else [*stretches[:8], f"... {len(stretches) - 8} more"]
            )
            lines.append(f"  phases: {', '.join(shown)}")
        for cause in device.causes:
            lines.append(f"  {cause.cause} ({cause.confidence} confidence): {cause.evidence}")
            if cause.action != "nothing to do":
                lines.append(f"    next: {cause.action}")
    lines += [f"note: {note}" for note in verdict.notes]
    # With one device the line would repeat its cause.
    line = f" - {verdict.line}" if len(verdict.devices) != 1 else ""
    lines.append(f"verdict: {verdict.verdict}{line}")
    return lines
