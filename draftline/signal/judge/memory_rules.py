"""Rules for what the allocator and the device did: each answers None without its own evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftline.signal.judge.cause import Cause, largest_blocks
from draftline.signal.judge.evidence import Evidence
from draftline.signal.judge.shape import counted, find_shape, floors
from draftline.signal.trace import GIB, MIB

_LEAK_LEAST_BYTES = 4 * MIB
# Fewer steps that took more memory are stages of a bounded plan (a curriculum, say).
_UNBOUNDED_STEPS = 6
# Of the growth that must come with the largest step so far.
_OF_RECORDS = 0.9


def allocator_retries(seen: Evidence) -> Cause | None:
    """Of the whole run after its first step: where allocations fail in the warm-up, the run is near the
    limit too. Running out of memory is the last of them."""
    steady = int(seen.grown("retries") or 0)
    before = int(seen.since_first("retries") or 0) - steady
    out = int(max(seen.since_first("ooms") or 0, len(seen.events("oom", steady=False))))
    if steady + before + out <= 0:
        return None
    when = [f"{steady} in {seen.count} steps"] if steady else []
    when += [f"{before} in the warm-up and pauses"] if before else []
    tried = (
        "allocations failed and were tried again after the cache was given back to the driver "
        f"(each stalls the whole device): {', '.join(when)}. "
    )
    ended = f"{counted(out, 'allocation')} failed for good: out of memory. " if out else ""
    return Cause(
        "allocator_retries",
        "high" if steady or out else "medium",
        f"{tried if when else ''}{ended}{_limit(seen)}".strip(),
        "use less memory (smaller batch or chunk) or free what else is on the device; the step needs "
        "more than is there",
    )


def cache_flush(seen: Evidence) -> Cause | None:
    events = seen.events("cache_flush")
    frees = seen.gained("device_frees")
    times = max(int((frees > 0).sum()), len(events))
    captures = int(seen.grown("captures") or 0)
    if times < (2 if captures or events else 3):
        return None
    if captures >= 2:
        return Cause(
            "cache_flush",
            "high",
            f"CUDA graphs were captured again {captures} times in {seen.count} steps; each capture "
            "empties the allocator's cache first, and the memory is taken again "
            f"afterwards{_kept(seen, captures)}.",
            "capture once before the loop, with inputs copied into fixed buffers, and replay that graph",
        )
    sure = seen.known("retries")
    return Cause(
        "cache_flush",
        "high" if sure else "medium",
        f"memory was given back to the driver at {times} of {seen.count} steps"
        f"{' without a failed allocation' if sure else ''}, and taken again afterwards.",
        "remove torch.cuda.empty_cache() (or gc with it) from the loop; if it is not called, look for "
        "garbage_collection_threshold in PYTORCH_ALLOC_CONF or graphs that are dropped"
        + ("" if sure else ", and record retries: failed allocations empty the cache too"),
    )


def _kept(seen: Evidence, captures: int) -> str:
    kept = seen.floor.net_bytes / captures
    return f", {kept / MIB:,.0f} MiB of it for good at each capture" if kept > MIB else ""


def leak(seen: Evidence) -> Cause | None:
    floor = seen.floor
    rising = (floor.kind == "slope" and floor.often) or (
        floor.kind == "staircase" and floor.rises >= 5
    )
    if not rising or floor.net_bytes < _LEAK_LEAST_BYTES:
        return _leak_of_pauses(seen) or _leak_in_snapshot(seen)
    # Where the allocator grows far more, or all of it comes with captures (each keeps workspaces), the
    # growing floor is the smaller part of another thing.
    if floor.net_bytes < 0.25 * seen.held.net_bytes or _comes_with_captures(seen):
        return None
    steps = seen.steps_between("allocated_bytes")
    a_step = floor.net_bytes / max(steps, 1.0)
    return Cause(
        "leak",
        "high" if floor.kind == "slope" else "medium",
        f"what tensors occupy between two steps grows by {a_step / MIB:.2f} MiB per step "
        f"({floor.net_bytes / MIB:,.0f} MiB in {steps:,.0f} steps){_until_full(seen, a_step)}.",
        _FIND_KEPT,
    )


_FIND_KEPT = (
    "look for tensors kept across steps (losses appended without .item() or .detach(), growing caches, "
    "hooks); torch.cuda.memory._record_memory_history() and a snapshot name their stacks"
)


def _comes_with_captures(seen: Evidence) -> bool:
    """Whether the floor grows only at the steps that capture a graph."""
    growth, captures = seen.level_growth("allocated_bytes"), seen.gained("captures")
    if len(growth) != len(captures) or not (captures > 0).any():
        return False
    return float(growth[captures == 0].sum()) <= 0.2 * float(growth.sum())


def _leak_of_pauses(seen: Evidence) -> Cause | None:
    kept = seen.kept_by_pauses("allocated_bytes")
    if kept is None:
        return None
    pauses, more = kept
    return Cause(
        "leak",
        "high",
        f"after each of the last {pauses} pauses tensors occupy {more / MIB:,.0f} MiB more "
        "than before it.",
        "look for what an evaluation or a checkpoint keeps: outputs gathered on the device, caches of "
        "generation, a copy of the weights",
    )


def _leak_in_snapshot(seen: Evidence) -> Cause | None:
    """A floor that rises over many falls; a history of one load or one forward pass has none."""
    for shot in seen.snapshots:
        if len(shot.history) < 8:
            continue
        times, level = shot.history[:, 0], shot.history[:, 1]
        lows = floors(level, 0.05 * float(np.ptp(level)))
        if len(lows) < 8:
            continue
        whole = [(float(times[0]), float(times[-1]))]
        floor = find_shape(times[lows], level[lows], whole)
        if floor.kind == "slope" and floor.often:
            return Cause(
                "leak",
                "medium",
                f"in the snapshot's history what stays allocated after {len(lows)} falls {floor.words}. "
                f"{largest_blocks(shot)}",
                "see whether those blocks should outlive a step; counters of each step would confirm it",
            )
    return None


def unbounded_shapes(seen: Evidence) -> Cause | None:
    """What the allocator took more lies in whole free blocks: only larger requests need new ones."""
    grown = _grown_parts(seen)
    if grown is None or grown.whole < 0.5 * grown.held:
        return None
    times = int((seen.gained("device_allocations") > 0).sum())
    if times < _UNBOUNDED_STEPS:
        return None
    varies = _variation(seen)
    return Cause(
        "unbounded_shapes",
        "high",
        f"steps ask for ever larger tensors{varies}: at {times} of {seen.count} steps the allocator "
        f"had to take more from the device, about {grown.held / MIB:,.0f} MiB, and "
        f"{grown.whole / MIB:,.0f} MiB of it lie free in whole blocks between steps.",
        "bound the shapes (fixed batches of tokens, or buckets that are all run before the loop), so "
        "that the largest is seen first",
    )


def largest_so_far(seen: Evidence) -> Cause | None:
    """Each time the allocator took more, the step was the largest so far, and steps do not become larger
    in time: records become rare by themselves, and memory levels off."""
    if seen.held.kind not in ("staircase", "slope") or seen.steps is None:
        return None
    held, peak = seen.steps.known("reserved_bytes"), seen.steps.known("peak_bytes")
    if held is None or peak is None:
        return None
    record = np.r_[False, peak[1:] > np.fmax.accumulate(peak)[:-1]]
    rises = np.diff(held, prepend=np.nan)
    rose = seen.inside & (rises > 0)
    growth = float(rises[rose].sum())
    if growth <= 0 or float(rises[rose & record].sum()) < _OF_RECORDS * growth:
        return None
    before = np.r_[np.nan, np.fmax.accumulate(peak)[:-1]]
    larger = float((peak - before)[rose & record].sum())
    steady = peak[seen.inside]
    half = len(steady) // 2
    # A record that is one of equals: as likely in any part. Ever larger steps move the middle as well.
    drift = abs(float(np.median(steady[half:]) - np.median(steady[:half])))
    if larger < 0.5 * growth or drift > 0.25 * float(np.std(steady)) or rose.sum() > half / 4:
        return None
    at = seen.steps.number[np.flatnonzero(rose)[-1]]
    return Cause(
        "largest_so_far",
        "high" if rose.sum() >= 3 else "medium",
        f"each of the {int(rose.sum())} rises, {growth / MIB:,.0f} MiB together, is a new largest step (up "
        f"to {np.nanmax(peak) / MIB:,.0f} MiB at the peak, the last at step {at:,.0f}), and steps do not "
        "grow in time: it levels off when the largest was seen.",
        "run the largest batch first, once, before the loop: memory stands still from then on",
    )


def fragmentation(seen: Evidence) -> Cause | None:
    """What the allocator took more lies in split blocks."""
    grown = _grown_parts(seen)
    if grown is None or grown.split < 0.5 * grown.held:
        return None
    return Cause(
        "fragmentation",
        "high",
        f"the allocator holds {grown.held / MIB:,.0f} MiB more while tensors occupy "
        f"{grown.used / MIB:,.0f} MiB more: {grown.split / MIB:,.0f} MiB lie in the gaps of split blocks, "
        f"too small for what the steps ask for{_now(seen)}.",
        "keep long-lived tensors out of the loop (allocate them first), and set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.10)",
    )


def _now(seen: Evidence) -> str:
    """How the allocator's memory lies at the end."""
    held, used, gaps = (
        seen.level(f"{name}_bytes") for name in ("reserved", "allocated", "inactive")
    )
    if not len(held) or not len(used) or not len(gaps):
        return ""
    return (
        f"; of {held[-1] / GIB:.1f} GiB reserved {used[-1] / GIB:.1f} are in use between steps and "
        f"{gaps[-1] / GIB:.1f} lie in gaps"
    )


def other_process(seen: Evidence) -> Cause | None:
    if seen.others is None:
        return None
    shape, pid = seen.others
    if pid is not None:
        return Cause(
            "other_process",
            "high",
            f"process {pid} on the same device moves between {shape.low_bytes / MIB:,.0f} and "
            f"{shape.high_bytes / MIB:,.0f} MiB, while this program's allocator is {seen.held.kind}.",
            f"give the run a device of its own; `ps -p {pid}` names the process",
        )
    if seen.pauses:
        return None
    return Cause(
        "other_process",
        "medium",
        f"the device's memory moves ({shape.words}) while this program's allocator holds exactly the same: "
        "something outside PyTorch, another process or a library of this one.",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv names the processes",
    )


@dataclass(frozen=True, slots=True)
class _Grown:
    """Bytes by which the allocator grew in the steady state, and where they lie: used by tensors, in
    gaps of split blocks, in whole free blocks."""

    held: float
    used: float
    split: float

    @property
    def whole(self) -> float:
        return self.held - self.used - self.split


def _grown_parts(seen: Evidence) -> _Grown | None:
    """The growth of what the allocator holds; None where it did not climb, or where tensors fill it."""
    gained = seen.gained("device_allocations")
    if seen.held.kind not in ("staircase", "slope") or (gained > 0).sum() < 3:
        return None
    parts = [seen.level(f"{name}_bytes") for name in ("reserved", "allocated", "inactive")]
    if any(len(part) < 8 for part in parts):
        return None
    ends = [float(np.median(p[-len(p) // 8 :]) - np.median(p[: len(p) // 8])) for p in parts]
    grown = _Grown(*ends)
    return grown if grown.held > 0 and grown.used < 0.5 * grown.held else None


def _variation(seen: Evidence) -> str:
    """How much steps differ, in words; empty where that is not recorded."""
    for name, scale, unit in (("tokens", 1, "tokens"), ("peak_bytes", MIB, "MiB at the peak")):
        level = seen.level(name)
        if len(level) >= 8 and float(np.ptp(level)) > 0.05 * float(np.median(level)):
            return f" ({level.min() / scale:,.0f} to {level.max() / scale:,.0f} {unit})"
    return ""


def _limit(seen: Evidence) -> str:
    samples = seen.samples
    if samples is None or samples.total_bytes is None or seen.seen.kind == "unknown":
        return ""
    high, total = seen.seen.high_bytes, samples.total_bytes
    words = f"The device showed {high / GIB:.1f} of {total / GIB:.1f} GiB"
    if high < 0.9 * total:
        words += ": the limit is the process's own (set_per_process_memory_fraction), or was met between "
        words += "two samples"
    return words + "."


def _until_full(seen: Evidence, a_step: float) -> str:
    samples = seen.samples
    if samples is None or samples.total_bytes is None:
        return ""
    steady = [samples.time_s <= seen.windows[-1][1]] if seen.windows else []
    used = samples.used_bytes[np.logical_and.reduce([np.isfinite(samples.used_bytes), *steady])]
    if not len(used):
        return ""
    left = max(0.0, samples.total_bytes - float(used[-1])) / a_step
    seconds = left * seen.seconds / max(seen.count, 1)
    return f"; out of memory in about {left:,.0f} steps ({seconds / 60:,.0f} min)"
