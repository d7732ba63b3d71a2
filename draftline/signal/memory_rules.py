"""Rules for what the allocator and the device did: each answers None without its own evidence."""

from __future__ import annotations

import numpy as np

from draftline.signal.cause import Cause
from draftline.signal.evidence import Evidence
from draftline.signal.shape import MIB, find_shape

_LEAK_LEAST_BYTES = 4 * MIB


def allocator_retries(seen: Evidence) -> Cause | None:
    retries = seen.grown("retries") or 0
    if not retries:
        return None
    return Cause(
        "allocator_retries",
        "high",
        f"{int(retries)} allocations failed in {seen.count} steps and were tried again after the whole "
        f"cache was given back to the driver (a device-wide stall each). {_limit(seen)}".strip(),
        "use less memory (smaller batch or chunk) or free what else is on the device; the step needs "
        "more than is there",
    )


def cache_flush(seen: Evidence) -> Cause | None:
    events = seen.events("cache_flush")
    frees = seen.gained("device_frees")
    times = int((frees > 0).sum())
    if len(events) < 2 and times < 3:
        return None
    return Cause(
        "cache_flush",
        "high",
        f"memory was given back to the driver at {max(times, len(events))} of {seen.count} steps without "
        "a failed allocation, and taken again afterwards.",
        "remove torch.cuda.empty_cache() (or gc with it) from the loop; if it is not called, look for "
        "garbage_collection_threshold in PYTORCH_CUDA_ALLOC_CONF or graphs that are dropped",
    )


def leak(seen: Evidence) -> Cause | None:
    floor = seen.floor
    level = seen.level("allocated_bytes")
    rising = floor.kind == "slope" or (floor.kind == "staircase" and floor.rises >= 4)
    if not rising or len(level) < 8 or floor.net_bytes < _LEAK_LEAST_BYTES:
        return _leak_in_snapshot(seen)
    a_step = floor.net_bytes / max(seen.count, 1)
    return Cause(
        "leak",
        "high" if floor.kind == "slope" else "medium",
        f"what tensors occupy between two steps grows by {a_step / MIB:.2f} MiB a step "
        f"({floor.net_bytes / MIB:,.0f} MiB in {seen.count} steps){_until_full(seen, a_step)}.",
        "look for tensors kept across steps (losses appended without .item() or .detach(), growing "
        "caches, hooks); torch.cuda.memory._record_memory_history() and a snapshot name their stacks",
    )


def _leak_in_snapshot(seen: Evidence) -> Cause | None:
    for shot in seen.snapshots:
        if len(shot.history) < 8:
            continue
        times, level = shot.history[:, 0], shot.history[:, 1]
        floor = find_shape(times, level, [(float(times[0]), float(times[-1]))])
        if floor.kind == "slope":
            kept = "; ".join(
                f"{size / MIB:,.0f} MiB from {frame}" for size, frame in shot.largest[:3]
            )
            return Cause(
                "leak",
                "medium",
                f"in the snapshot's history the allocated memory {floor.words}. Largest live blocks: "
                f"{kept or 'not recorded'}.",
                "see whether those blocks should outlive a step; counters of each step would confirm it",
            )
    return None


def unbounded_shapes(seen: Evidence) -> Cause | None:
    if not _climbs(seen) or not _varies(seen):
        return None
    gained = seen.gained("device_allocations")
    times = int((gained > 0).sum())
    return Cause(
        "unbounded_shapes",
        "high" if times >= 3 else "medium",
        f"steps differ in size ({_variation(seen)}), and at {times or 'some'} of {seen.count} of them the "
        f"allocator had to take more from the device: {seen.held.words}.",
        "bound the shapes (fixed batches of tokens, or buckets that are all run before the loop), so "
        "that the largest is seen first",
    )


def fragmentation(seen: Evidence) -> Cause | None:
    if not _climbs(seen) or _varies(seen):
        return None
    idle = seen.level("inactive_bytes")
    if len(idle) < 8:
        return None
    idle_grew = float(np.median(idle[-len(idle) // 4 :]) - np.median(idle[: len(idle) // 4]))
    if idle_grew < 0.25 * seen.held.net_bytes:
        return None
    return Cause(
        "fragmentation",
        "high",
        f"the allocator holds {seen.held.net_bytes / MIB:,.0f} MiB more while tensors occupy the same: "
        f"{idle_grew / MIB:,.0f} MiB of it lie in split blocks that no request fits.",
        "keep long-lived tensors out of the loop (allocate them first), and set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def other_process(seen: Evidence) -> Cause | None:
    if seen.others is None:
        return None
    shape, how = seen.others
    if shape.kind in ("flat", "unknown") and not shape.cycles:
        return None
    if how == "processes":
        return Cause(
            "other_process",
            "high",
            f"another process on the device moves its memory ({shape.words}) while this one's is "
            f"{seen.held.kind}.",
            "give the run a device of its own; nvidia-smi --query-compute-apps=pid,used_memory "
            "--format=csv names the process",
        )
    if seen.pauses:
        return None
    return Cause(
        "other_process",
        "medium",
        f"the device's memory moves ({shape.words}) while PyTorch's allocator of this program holds "
        "exactly the same: something outside it, another process or a library of this one.",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv names the processes",
    )


def _climbs(seen: Evidence) -> bool:
    """Whether the allocator took more and more from the device while tensors stayed the same."""
    gained = seen.gained("device_allocations")
    more = int((gained > 0).sum()) >= 3 if len(gained) else True
    return more and seen.held.kind in ("staircase", "slope") and seen.floor.kind == "flat"


def _varies(seen: Evidence) -> bool:
    for name in ("tokens", "peak_bytes"):
        level = seen.level(name)
        if len(level) >= 8 and float(np.ptp(level)) > 0.05 * max(float(np.median(level)), 1.0):
            return True
    return False


def _variation(seen: Evidence) -> str:
    level = seen.level("tokens")
    if len(level) and np.ptp(level) > 0:
        return f"{level.min():,.0f} to {level.max():,.0f} tokens"
    level = seen.level("peak_bytes")
    return f"peaks of {level.min() / MIB:,.0f} to {level.max() / MIB:,.0f} MiB"


def _limit(seen: Evidence) -> str:
    samples = seen.samples
    if samples is None or samples.total_bytes is None or seen.seen.kind == "unknown":
        return ""
    return f"The device showed {seen.seen.high_bytes / 2**30:.1f} of {samples.total_bytes / 2**30:.1f} GiB."


def _until_full(seen: Evidence, a_step: float) -> str:
    samples = seen.samples
    if samples is None or samples.total_bytes is None:
        return ""
    used = samples.used_bytes[np.isfinite(samples.used_bytes)]
    left = (samples.total_bytes - float(used[-1])) / a_step
    seconds = left * seen.seconds / max(seen.count, 1)
    return f"; out of memory in about {left:,.0f} steps ({seconds / 60:,.0f} min)"
