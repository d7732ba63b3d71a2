"""What PyTorch counts in the current process: allocator, Dynamo, stance. torch is never imported
here and CUDA never initialised: what the program has not loaded is absent, and absent is unknown.

Every private name of torch that the signal reads is in this file and in `hooks`, each behind a
`getattr`: a release without it leaves a column out and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Name here -> path in the nested form of torch.cuda.memory_stats (and, joined, in its flat form).
# torch documents "allocated.*" for what it calls "allocation.*" in the result, so both are looked up.
_ALLOCATOR: dict[str, tuple[tuple[str, ...], ...]] = {
    "allocator_calls": (("allocation", "all", "allocated"), ("allocated", "all", "allocated")),
    "allocated_bytes": (("allocated_bytes", "all", "current"),),
    "reserved_bytes": (("reserved_bytes", "all", "current"),),
    "inactive_bytes": (("inactive_split_bytes", "all", "current"),),
    "device_allocations": (("num_device_alloc",),),
    "device_frees": (("num_device_free",),),
    "retries": (("num_alloc_retries",),),
    "ooms": (("num_ooms",),),
}
_PEAK = ("allocated_bytes", "all", "peak")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as the program sees it: `cuda:<ordinal>`, with what names it to the driver."""

    ordinal: int
    name: str
    uuid: str | None
    total_bytes: int | None


def _module(name: str) -> Any:
    return sys.modules.get(name)


def _attribute(root: Any, path: str) -> Any:
    """The value at a dotted path, or None where any part of it is missing."""
    for part in path.split("."):
        root = getattr(root, part, None)
        if root is None:
            return None
    return root


def _cuda() -> Any:
    """`torch.cuda` if the program has initialised CUDA, else None."""
    cuda = _attribute(_module("torch"), "cuda")
    initialised = getattr(cuda, "is_initialized", None)
    return cuda if initialised is not None and initialised() else None


def _dig(stats: Any, path: tuple[str, ...]) -> float | None:
    flat = stats.get(".".join(path)) if isinstance(stats, Mapping) else None
    if isinstance(flat, (int, float)):
        return float(flat)
    for part in path:
        if not isinstance(stats, Mapping):
            return None
        stats = stats.get(part)
    return float(stats) if isinstance(stats, (int, float)) else None


def allocator_values(stats: Mapping[str, Any], *, peak: bool = False) -> dict[str, float]:
    """Columns of a step out of `torch.cuda.memory_stats`, nested or flat; what it lacks is absent."""
    values: dict[str, float] = {}
    for name, paths in _ALLOCATOR.items():
        found = next((v for path in paths if (v := _dig(stats, path)) is not None), None)
        if found is not None:
            values[name] = found
    if peak and (most := _dig(stats, _PEAK)) is not None:
        values["peak_bytes"] = most
    return values


def _stats(cuda: Any, ordinal: int) -> Mapping[str, Any]:
    # The nested form is what the flat one is made from; flattening and sorting cost more than asking.
    nested = getattr(cuda, "memory_stats_as_nested_dict", None) or cuda.memory_stats
    stats: Mapping[str, Any] = nested(ordinal)
    return stats


def active_devices() -> list[int]:
    """Ordinals of the devices on which the program has ever taken memory through PyTorch."""
    cuda = _cuda()
    if cuda is None:
        return []
    active = []
    for ordinal in range(cuda.device_count()):
        values = allocator_values(_stats(cuda, ordinal))
        if values.get("device_allocations") or values.get("reserved_bytes"):
            active.append(ordinal)
    return active


def allocator(ordinal: int, *, own_peak: bool = False) -> dict[str, float]:
    """The allocator's columns of `cuda:<ordinal>` now. `own_peak` reads the peak since the last such
    call and resets it; nobody else's peak is touched otherwise."""
    cuda = _cuda()
    if cuda is None:
        return {}
    values = allocator_values(_stats(cuda, ordinal), peak=own_peak)
    if own_peak:
        cuda.reset_peak_memory_stats(ordinal)
    return values


def cuda_device(ordinal: int) -> CudaDevice | None:
    """Name, uuid ("GPU-...") and size of a device of an initialised CUDA, else None."""
    cuda = _cuda()
    if cuda is None:
        return None
    properties = cuda.get_device_properties(ordinal)
    uuid = getattr(properties, "uuid", None)
    return CudaDevice(
        ordinal,
        str(getattr(properties, "name", "")),
        None if uuid is None else f"GPU-{uuid}",
        getattr(properties, "total_memory", None),
    )


def dynamo() -> dict[str, float]:
    """Dynamo's counters, empty unless the program has compiled something (or tried to)."""
    counters = getattr(_module("torch._dynamo.utils"), "counters", None)
    if not isinstance(counters, Mapping):
        return {}
    frames = counters.get("frames") or {}
    if not frames.get("total"):
        return {}
    inductor = counters.get("inductor") or {}
    return {
        "frames": float(frames.get("total", 0)),
        "frames_ok": float(frames.get("ok", 0)),
        # list() takes the values in one step: another thread may be compiling.
        "graph_breaks": float(sum(list((counters.get("graph_break") or {}).values()))),
        "capture_skips": float(inductor.get("cudagraph_skips", 0)),
    }


def facts() -> dict[str, Any]:
    """Whether and how the program compiles: what is known now, None for what is not."""
    dynamo_config = _module("torch._dynamo.config")
    return {
        "torch": getattr(_module("torch"), "__version__", None),
        "stance": _attribute(_module("torch._dynamo.eval_frame"), "_stance.stance"),
        "dynamo_disabled": getattr(dynamo_config, "disable", None),
    }


def eager_flex() -> bool | None:
    """Whether flex_attention has run uncompiled in this process; None where it is not loaded."""
    shown = getattr(_module("torch.nn.attention.flex_attention"), "_WARNINGS_SHOWN", None)
    return None if shown is None else "flex_attention_performance" in shown
