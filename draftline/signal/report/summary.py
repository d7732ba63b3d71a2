"""The top of a report: what run it was, what the verdict is, and its main figures."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from draftline.signal.judge.cause import Cause
from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.phases import Phase
from draftline.signal.report.curves import extent
from draftline.signal.report.run_facts import RunFacts
from draftline.signal.trace import GIB, device_name
from draftline.signal.words import cause_title, duration

# Colour, sign and words of verdicts that name no fault.
_STATES = {
    "healthy": ("ok", "✓", "Healthy: memory is flat"),
    "flat": ("ok", "✓", "Memory is flat; whether the step is compiled was not recorded"),
    "idle": ("dim", "?", "No program used the GPU while it was recorded"),
    "not_flat": ("warn", "!", "Memory is not flat, and no cause can be named"),
    "unknown": ("dim", "?", "It cannot be told whether memory is flat"),
}


def moment(time_s: float, run: RunFacts) -> str:
    """A moment in UTC; as it was written where only a driver's program did, which names no zone."""
    zoned = run.metrics is not None or run.trace.steps or run.trace.program is not None
    try:
        return time.strftime(f"%Y-%m-%d %H:%M:%S{' UTC' * bool(zoned)}", time.gmtime(time_s))
    except (OverflowError, OSError, ValueError):
        return "an unknown moment"


def command_of(run: RunFacts) -> str:
    """The command line, or the program's name; empty where neither is known."""
    argv = run.start.get("argv")
    if isinstance(argv, list):
        return " ".join(map(str, argv))
    return run.trace.program.name if run.trace.program is not None else ""


def facts_of(run: RunFacts) -> list[str]:
    """Time, length and version of torch."""
    facts = []
    known = extent(run)
    if known is not None:
        first, last, dated = known
        facts += [moment(first, run)] if dated else []
        facts.append(f"{duration(last - first)} recorded")
    if run.metrics is not None:
        facts.append(f"{run.metrics.step[-1]:,.0f} steps")
    versions = run.environment.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else run.environment.get("torch")
    return [*facts, f"torch {torch}"] if torch else facts


def headline(run: RunFacts) -> tuple[str, str, str]:
    """The verdict as a colour's name, a sign and words."""
    verdict = run.verdict
    # A program on the CPU has no memory to judge; its compiles may be at fault all the same.
    if verdict.verdict == "fault":
        found = ", ".join(cause_title(c.cause) for c in verdict.worst.faults)
        return "bad", "✕", f"Fault: {found}"
    if all(device.device == "cpu" for device in verdict.devices):
        why = "none was recorded" if not verdict.devices else "the run used no GPU"
        return "dim", "-", f"No GPU memory to judge: {why}"
    return _STATES[verdict.verdict]


def devices_of(run: RunFacts) -> Iterator[tuple[str, dict[str, str], list[tuple[Cause, str]]]]:
    """Name, facts and causes (each with its title) of every device; of the CPU of a run without a GPU only
    where it has a fault."""
    for verdict, seen in zip(run.verdict.devices, gather(run.trace), strict=True):
        on_cpu = verdict.device == "cpu"
        if on_cpu and not verdict.faults:
            continue
        facts = {
            "Memory": verdict.words if on_cpu else f"{verdict.memory}: {verdict.words}",
            "Highest": _highest(seen),
            "Phases": _phases_in_words(verdict.phases),
        }
        causes = [(cause, cause_title(cause.cause)) for cause in verdict.causes]
        yield device_name(verdict.device), facts, causes


def _highest(seen: Evidence) -> str:
    parts = []
    samples = seen.samples
    if samples is not None and np.isfinite(samples.used_bytes).any():
        of = f" of {samples.total_bytes / GIB:.1f}" if samples.total_bytes else ""
        parts.append(f"{np.nanmax(samples.used_bytes) / GIB:.2f}{of} GiB on the device")
    reserved = seen.steps.known("reserved_bytes") if seen.steps is not None else None
    if reserved is not None:
        parts.append(f"{np.nanmax(reserved) / GIB:.2f} GiB held by PyTorch")
    return ", ".join(parts)


def _phases_in_words(phases: tuple[Phase, ...]) -> str:
    """Each phase with its number and length, in the order of their first appearance."""
    seconds = defaultdict(list)
    for phase in phases:
        seconds[phase.name].append(phase.seconds)
    said = [
        f"{f'{len(each)} x ' * (len(each) > 1)}{name} ({duration(sum(each))})"
        for name, each in seconds.items()
    ]
    worked_out = phases and not any(phase.marked for phase in phases)
    return ", ".join(said) + ("; worked out from the curves" if worked_out else "")


def tiles_of(run: RunFacts) -> list[tuple[str, str]]:
    """The main figures, those that are known, each with what it is."""
    metrics = run.metrics
    if metrics is None:
        wall_ms = run.trace.steps[0].wall_ms if run.trace.steps else np.empty(0)
        if not np.isfinite(wall_ms).any():
            return []
        took = f"{np.nanmedian(wall_ms):,.1f}"
        return [(took, "ms per step, usually"), (f"{len(wall_ms):,}", "steps recorded")]
    tiles = [
        (format(usual, form), words)
        for name, words, form in (
            ("step_ms", "ms per step, usually", ",.1f"),
            ("rows_per_s", "rows per second", ",.0f"),
            ("tokens_per_s", "tokens per second", ",.0f"),
        )
        if (usual := metrics.usual(name)) is not None
    ]
    for name, words in (
        ("loss", "loss, last"),
        ("accept_length_forced", "acceptance length, last"),
    ):
        if (column := metrics.known(name)) is not None:
            tiles.append((f"{column[np.isfinite(column)][-1]:,.3f}", words))
    return tiles
