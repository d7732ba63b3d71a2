"""The top of a report: what run it was, what the verdict is, and its main figures."""

from __future__ import annotations

import html
import time
from itertools import groupby

import numpy as np

from draftline.signal.duration import duration
from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.phases import Phase
from draftline.signal.judge.verdict import DeviceVerdict
from draftline.signal.report.report_curves import extent
from draftline.signal.report.run_facts import RunFacts
from draftline.signal.trace import GIB, device_name, one_line

_MOST_LETTERS = 2000  # of one text of the page
_CAUSE_WORDS = {
    "healthy": "nothing is wrong",
    "not_compiled": "the step is not compiled",
    "eager_flex": "flex_attention runs uncompiled",
    "graph_breaks": "the compiled graph breaks",
    "recompiling": "it compiles again while it runs",
    "recompile_limit": "the recompile limit was reached",
    "compile_storm": "it compiles nearly all the time",
    "no_graph_capture": "steps are not captured as graphs",
    "allocator_retries": "allocations fail and are tried again",
    "cache_flush": "the memory cache is emptied in the loop",
    "leak": "memory leaks",
    "fragmentation": "memory is fragmented",
    "unbounded_shapes": "sizes keep growing",
    "other_process": "another program moves the memory",
    "pause": "pauses, which are normal",
    "unknown": "the cause cannot be told",
}


def text(value: object) -> str:
    """Anything of the run as text of the page."""
    return html.escape(one_line(str(value), _MOST_LETTERS))


def moment(time_s: float, run: RunFacts) -> str:
    """A moment in UTC; as it was written where only a driver's program did, which names no zone."""
    zoned = run.metrics is not None or run.trace.steps or run.trace.program is not None
    try:
        return time.strftime(f"%Y-%m-%d %H:%M:%S{' UTC' * bool(zoned)}", time.gmtime(time_s))
    except (OverflowError, OSError, ValueError):
        return "an unknown moment"


def header(run: RunFacts) -> str:
    """Name, time, length and versions."""
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
    facts += [f"torch {torch}"] if torch else []
    argv = run.start.get("argv")
    name = run.trace.program.name if run.trace.program is not None else ""
    name = " ".join(map(str, argv)) if isinstance(argv, list) else name
    command = f'<p class="meta"><code>{text(name)}</code></p>' if name else ""
    return (
        f'<p class="kicker">draftline report</p><h1>{text(run.name)}</h1>{command}'
        f'<p class="meta">{text(" · ".join(facts))}</p>'
    )


def verdict_card(run: RunFacts) -> str:
    """The verdict in a colour, a sign and words; then each device; then the main figures."""
    tone, sign, words = _state(run)
    failure = run.failure
    failed = f"<p><strong>The run failed:</strong> {text(failure)}</p>" if failure else ""
    devices = "".join(
        _device(verdict, seen)
        for verdict, seen in zip(run.verdict.devices, gather(run.trace), strict=True)
        if verdict.faults or not _is_host(verdict)
    )
    return (
        f'<section id="verdict" class="verdict {tone}"><h2><span aria-hidden="true">{sign}</span>'
        f"<span>{text(words)}</span></h2>{failed}{devices}</section>{_tiles(run)}"
    )


def _is_host(device: DeviceVerdict) -> bool:
    """Whether the "device" is the CPU of a run without a GPU."""
    return device.device == "cpu"


def _state(run: RunFacts) -> tuple[str, str, str]:
    verdict = run.verdict
    # A program on the CPU has no memory to judge; its compiles may be at fault all the same.
    if verdict.verdict == "fault":
        found = ", ".join(_CAUSE_WORDS.get(c.cause, c.cause) for c in verdict.worst.faults)
        return "bad", "✕", f"Fault: {found}"
    if all(map(_is_host, verdict.devices)):
        why = "none was recorded" if not verdict.devices else "the run used no GPU"
        return "dim", "-", f"No GPU memory to judge: {why}"
    return {
        "healthy": ("ok", "✓", "Healthy: memory is flat"),
        "flat": ("ok", "✓", "Memory is flat; whether the step is compiled was not recorded"),
        "idle": ("dim", "?", "No program used the GPU while it was recorded"),
        "not_flat": ("warn", "!", "Memory is not flat, and no cause can be named"),
    }.get(verdict.verdict, ("dim", "?", "It cannot be told whether memory is flat"))


def _device(verdict: DeviceVerdict, seen: Evidence) -> str:
    memory = verdict.words if _is_host(verdict) else f"{verdict.memory}: {verdict.words}"
    rows = [("Memory", memory)]
    level = _highest(seen)
    if level:
        rows.append(("Highest", level))
    if verdict.phases:
        rows.append(("Phases", _phases_in_words(verdict.phases)))
    items = "".join(f"<dt>{what}</dt><dd>{text(said)}</dd>" for what, said in rows)
    for cause in verdict.causes:
        words = _CAUSE_WORDS.get(cause.cause, cause.cause)
        items += (
            f"<dt>Finding</dt><dd><strong>{text(words)}</strong> <code>{text(cause.cause)}</code>, "
            f"{text(cause.confidence)} confidence</dd>"
            f"<dt>Evidence</dt><dd>{text(cause.evidence)}</dd>"
        )
        if cause.action != "nothing to do":
            items += f"<dt>Do next</dt><dd>{text(cause.action)}</dd>"
    name = text(device_name(verdict.device))
    return f'<div class="device"><h3>{name}</h3><dl>{items}</dl></div>'


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
    ordered = sorted(phases, key=lambda p: p.name)
    groups = {name: list(group) for name, group in groupby(ordered, key=lambda p: p.name)}
    said = []
    for name in dict.fromkeys(phase.name for phase in phases):
        group = groups[name]
        times = f"{len(group)} x " if len(group) > 1 else ""
        said.append(f"{times}{name} ({duration(sum(p.seconds for p in group))})")
    marked = any(phase.marked for phase in phases)
    return ", ".join(said) + ("" if marked else "; worked out from the curves")


def phase_legend(run: RunFacts) -> str:
    """What the bands behind the memory curves mean."""
    names = dict.fromkeys(phase.name for device in run.verdict.devices for phase in device.phases)
    known = ("load", "warm", "run", "evaluate", "checkpoint")
    items = "".join(
        f'<li><i style="background:var(--band-{name if name in known else "other"})"></i>'
        f"{text(name[:24])}</li>"
        for name in names
    )
    return f'<ul class="phases"><li>Bands:</li>{items}</ul>' if items else ""


def _tiles(run: RunFacts) -> str:
    """The main figures, those that are known."""
    tiles: list[tuple[str, str]] = []
    metrics = run.metrics
    if metrics is not None:
        for name, label, form in (
            ("step_ms", "ms a step, usually", ",.1f"),
            ("rows_per_s", "rows a second", ",.0f"),
            ("tokens_per_s", "tokens a second", ",.0f"),
        ):
            if (usual := metrics.usual(name)) is not None:
                tiles.append((format(usual, form), label))
        for name, label in (
            ("loss", "loss, last"),
            ("accept_length_forced", "accept length, last"),
        ):
            if (column := metrics.known(name)) is not None:
                tiles.append((f"{column[np.isfinite(column)][-1]:,.3f}", label))
    elif run.trace.steps:
        wall_ms = run.trace.steps[0].wall_ms
        if np.isfinite(wall_ms).any():
            tiles.append((f"{np.nanmedian(wall_ms):,.1f}", "ms a step, usually"))
            tiles.append((f"{len(wall_ms):,}", "steps recorded"))
    inner = "".join(
        f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles
    )
    return f'<div class="tiles">{inner}</div>' if inner else ""
