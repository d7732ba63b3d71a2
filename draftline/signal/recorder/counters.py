"""What PyTorch counts in the current process: allocator, Dynamo, stance. torch is never imported
here and CUDA never initialised: what the program has not loaded is absent, and absent is unknown.

Every private name of torch that the signal reads is in this file, each behind a look-up that may fail:
a release without it leaves a column out and nothing else. Read on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftline.signal.trace import TOTALS

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
_TOTALS = frozenset(TOTALS)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as the program sees it, `cuda:<ordinal>`. `uuid` is without "GPU-" or "MIG-"."""

    ordinal: int
    name: str
    uuid: str | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Compile:
    """One compile that ended. `number` is Dynamo's id, "<frame>/<version>"; `function` and `place`
    (file and line) are "" for a backward and a failure; `reason` is the guard that made it a
    recompile; `failure` why it was given up, `skipped` why its CUDA graph was."""

    number: str
    backward: bool
    function: str
    place: str
    ended_s: float
    seconds: float | None
    reason: str | None
    failure: str | None
    skipped: str | None


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where (function, and file and line) and why Dynamo split a function's graph."""

    function: str
    place: str
    reason: str


def _loaded(path: str) -> Any:
    """The value at "module:dotted.path" if the program has loaded the module, else None."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


def _cuda() -> Any:
    """`torch.cuda` if the program has initialised CUDA, else None."""
    initialised = _loaded("torch.cuda:is_initialized")
    return sys.modules["torch.cuda"] if initialised is not None and initialised() else None


def _dig(stats: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = stats.get(".".join(path), stats)
    for part in path if found is stats else ():
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) else None


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
    # The flat form is this one flattened and sorted, which costs more than asking for it.
    ask = getattr(cuda, "memory_stats_as_nested_dict", None) or cuda.memory_stats
    stats: Mapping[str, Any] = ask(ordinal)
    return stats


def active_devices() -> list[int]:
    """Ordinals of the devices on which the program has ever taken memory through PyTorch."""
    cuda = _cuda()
    if cuda is None:
        return []
    # cudaMallocAsync would make a context on a device to tell that nothing is held there.
    has_context = _loaded("torch._C:_cuda_hasPrimaryContext")
    return [
        ordinal
        for ordinal in range(cuda.device_count())
        if (has_context is None or has_context(ordinal))
        and allocator_values(_stats(cuda, ordinal)).get("allocator_calls")
    ]


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
    """Name, uuid and size of a device of an initialised CUDA, else None."""
    cuda = _cuda()
    if cuda is None:
        return None
    properties = cuda.get_device_properties(ordinal)
    uuid = getattr(properties, "uuid", None)
    return CudaDevice(
        ordinal,
        str(getattr(properties, "name", "")),
        None if uuid is None else str(uuid),
        getattr(properties, "total_memory", None),
    )


def dynamo(*, expected: bool = False) -> dict[str, float]:
    """Dynamo's counters; empty until a frame went through it, unless compiling is `expected`: a
    count of none says something only of a program that means to compile."""
    counters = _loaded("torch._dynamo.utils:counters")
    if not isinstance(counters, Mapping):
        # Without Dynamo nothing can have been compiled.
        return {"frames": 0, "frames_ok": 0} if expected and "torch" in sys.modules else {}
    frames, stats = counters.get("frames") or {}, counters.get("stats") or {}
    well = frames.get("ok", 0)
    # torch leaves what is compiled with fullgraph=True out of its count of frames, and has it in its
    # count of graphs, of which each other frame that went well has one.
    whole = max(0, stats.get("unique_graphs", 0) - well)
    total = frames.get("total", 0) + whole
    if not total and not expected:
        return {}
    return {
        "frames": total,
        "frames_ok": well + whole,
        # list() takes the values in one step: another thread may be compiling.
        "graph_breaks": sum(list((counters.get("graph_break") or {}).values())),
        "capture_skips": (counters.get("inductor") or {}).get("cudagraph_skips", 0),
    }


def facts() -> dict[str, Any]:
    """Whether and how the program compiles: "stance" and "dynamo_disabled", None where unknown."""
    return {
        "stance": _loaded("torch._dynamo.eval_frame:_stance.stance"),
        "dynamo_disabled": _loaded("torch._dynamo.config:disable"),
    }


def eager_flex() -> bool:
    """Whether flex_attention is known to have run uncompiled in this process: PyTorch says so once,
    as a warning that may be filtered, and remembers that it did."""
    shown = _loaded("torch.nn.attention.flex_attention:_WARNINGS_SHOWN")
    return shown is not None and "flex_attention_performance" in shown


def callback_handler() -> Any:
    """Dynamo's compile callbacks (`register_start_callback` and so on), None where not loaded."""
    return _loaded("torch._dynamo.callback:callback_handler")


def compiles_after(last: Any) -> tuple[list[Compile], Any] | None:
    """Compiles that ended after the one `last` stands for (None: since the start), oldest first, and
    what the last of them is known by. None where this torch keeps no such list.

    torch keeps 64, so who asks more rarely than that misses some.
    """
    kept = _loaded("torch._dynamo.utils:get_compilation_metrics")
    if kept is None:
        return None
    entries: list[Any] = kept()
    places = [place for place, entry in enumerate(entries) if entry is last]
    new = entries[places[-1] + 1 :] if places else entries
    found = [_compile(entry) for entry in new if getattr(entry, "is_runtime", None) is not True]
    return found, (entries[-1] if entries else last)


def _compile(entry: Any) -> Compile:
    ended_us = getattr(entry, "end_time_us", None) or getattr(entry, "start_time_us", None) or 0
    took_us = getattr(entry, "duration_us", None)
    kind, why = (getattr(entry, name, None) for name in ("fail_type", "fail_reason"))
    function, file = (getattr(entry, name, None) or "" for name in ("co_name", "co_filename"))
    line = getattr(entry, "co_firstlineno", None)
    return Compile(
        str(getattr(entry, "compile_id", None) or "?"),
        getattr(entry, "is_forward", True) is not True and not function and kind is None,
        function,
        f"{file}:{line}" if file and line else "",
        ended_us / 1e6,
        None if took_us is None else took_us / 1e6,
        getattr(entry, "recompile_reason", None),
        None if kind is None else str(why or kind),
        getattr(entry, "cudagraph_skip_reason", None),
    )


def graph_breaks_after(count: int) -> tuple[list[GraphBreak], int]:
    """Graph breaks that Dynamo noted after the first `count`, and the new count; a reset of Dynamo
    begins anew."""
    noted = _loaded("torch._dynamo.utils:graph_break_reasons")
    if not isinstance(noted, list):
        return [], 0
    new = noted[count:] if len(noted) >= count else list(noted)
    breaks = [_graph_break(entry) for entry in new if getattr(entry, "graph_break", True)]
    return breaks, len(noted)


def _graph_break(entry: Any) -> GraphBreak:
    stack = list(getattr(entry, "user_stack", None) or ())
    where = stack[-1] if stack else None
    reason = str(getattr(entry, "reason", ""))
    if where is None:
        return GraphBreak("", "", reason)
    return GraphBreak(where.name, f"{where.filename}:{where.lineno}", reason)


class Rising:
    """Makes totals go on where the program resets a counter: what was counted before is kept."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}

    def take(self, values: dict[str, float]) -> None:
        """Replaces each total in `values` by what was counted since the recording began to look."""
        for name in _TOTALS.intersection(values):
            value = values[name]
            if value < self._last.get(name, 0):
                self._base[name] = self._base.get(name, 0) + self._last[name]
            self._last[name] = value
            if name in self._base:
                values[name] = value + self._base[name]
