"""A run as a flat table of named facts, so that two of them can be laid side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.report.run_facts import RunFacts, flatten, steady_readings
from draftline.signal.trace import GIB, MIB, device_name

# Sections in which a fact that is not there has a meaning of its own.
ABSENT = {
    "variable": "not set",
    "version": "not installed",
    "config": "no such key",
    "choice": "not taken",
}


def causes_of(run: RunFacts) -> dict[str, dict[str, Any]]:
    """What may have made a run behave as it did, by section and name. A section that the run does not
    tell of is not there."""
    seen = gather(run.trace)
    sections = {
        "compile": _compile(run, seen),
        "capture": _capture(run, seen),
        "shape": _shapes(seen),
        "processes": _processes(seen),
        "environment": _environment(run),
        "version": dict(_mapping(run.environment.get("versions"))),
        "variable": dict(_mapping(run.environment.get("variables"))),
        "config": flatten(run.config),
        "choice": {str(c.get("what")): c.get("got") for c in run.choices},
    }
    if isinstance(run.environment.get("variables"), Mapping):
        # Recorded, even if none was set.
        return {k: v for k, v in sections.items() if v or k == "variable"}
    return {name: facts for name, facts in sections.items() if facts}


def device_labels(a: RunFacts, b: RunFacts) -> list[str]:
    """Names for the devices of both runs in order: on other GPUs of a machine, or on one that numbers
    them anew, runs are compared by order."""
    names = [[device_name(d.device) for d in run.verdict.devices] for run in (a, b)]
    return [
        one if one == other or not other else other if not one else f"{one} | {other}"
        for one, other in zip_longest(*names, fillvalue="")
    ]


def outcome_of(run: RunFacts, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How a run behaved, by "" for the whole of it, the label of each device, and "speed"."""
    facts: dict[str, dict[str, Any]] = {"": {"verdict": run.verdict.verdict}}
    for label, device, seen in zip(labels, run.verdict.devices, gather(run.trace), strict=False):
        facts[label] = {
            "memory is": None if device.shape == "unknown" else device.shape,
            "because": ", ".join(cause.cause for cause in device.causes),
            **_memory(seen),
        }
    facts["speed"] = _speed(run)
    return facts


def _speed(run: RunFacts) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    metrics = run.metrics
    for what, column in (
        ("ms per step", "step_ms"),
        ("rows per second", "rows_per_s"),
        ("tokens per second", "tokens_per_s"),
        ("targets waited, %", "targets_waited_pct"),
        ("drafters waited, %", "drafters_waited_pct"),
    ):
        value = metrics.usual(column) if metrics is not None else None
        if value is not None:
            facts[what] = value
    if "ms per step" not in facts and run.trace.steps:
        wall_ms = run.trace.steps[0].wall_ms
        late = wall_ms[len(wall_ms) // 2 :]
        if np.isfinite(late).any():
            facts["ms per step"] = float(np.nanmedian(late))
    return facts


def _memory(seen: Evidence) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for what, column in steady_readings(seen).items():
        facts[f"{what} GiB, highest"] = float(column.max()) / GIB
        facts[f"{what} MiB, highest - lowest"] = float(np.ptp(column)) / MIB
    for what, name in (
        ("allocator calls per step", "allocator_calls"),
        ("device allocations per step", "device_allocations"),
    ):
        if (each := _per_step(seen, name)) is not None:
            facts[what] = each
    if (retries := seen.total("retries")) is not None:
        facts["allocator retries"] = retries
    return facts


def _compile(run: RunFacts, seen: list[Evidence]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    environment = run.environment
    # A process that records its own steps would have told of these.
    program = run.trace.program
    recorded = program is not None and program.pid is not None and bool(run.trace.steps)
    if recorded and program is not None:
        facts["the program expects"] = ", ".join(sorted(program.expects)) or "nothing"
    for what, key in (("stance", "stance"), ("switched off", "dynamo_disabled")):
        if environment.get(key) is not None:
            facts[what] = environment[key]
    frames, good = _most(seen, "frames"), _most(seen, "frames_ok")
    if frames is not None and good is not None:
        facts["frames left uncompiled"] = frames - good
    for what, name, kind in (
        ("graph breaks", "graph_breaks", "graph_break"),
        ("recompiles", "recompiles", "recompile"),
        ("functions at the recompile limit", "recompile_limits", "recompile_limit"),
    ):
        told = _most(seen, name)
        events = sum(event.kind == kind for event in run.trace.events)
        if told is not None or events or recorded:
            facts[what] = max(told or 0.0, float(events))
    warned = any(event.kind == "eager_flex" for event in run.trace.events)
    if warned or recorded:
        facts["flex_attention ran uncompiled"] = warned
    late = [grown for part in seen if (grown := part.grown("compiles")) is not None]
    if late:
        facts["compiles in the steady state"] = max(late)
    sealed = run.sealed
    if sealed is not None and "warmed" in sealed:
        compiled, warmed = _rows(sealed, "compiled"), _rows(sealed, "warmed")
        facts |= {
            "graphs compiled": len(compiled),
            "graphs from the cache": sum("cache" in str(g.get("outcome")) for g in compiled),
            "parts warmed": len(warmed),
            "parts warmed late": sum(bool(row.get("late")) for row in warmed),
            "seconds": sealed.get("seconds"),
        }
        facts |= {f"outcome of {row.get('name')}": row.get("outcome") for row in warmed}
    return facts


def _capture(run: RunFacts, seen: list[Evidence]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if run.sealed is not None:
        outcomes = [row.get("outcome") for row in _rows(run.sealed, "warmed")]
        facts["parts captured"] = outcomes.count("captured")
    for what, name in (("graphs captured", "captures"), ("captures refused", "capture_skips")):
        if (told := _most(seen, name)) is not None:
            facts[what] = told
    replays = [each for part in seen if (each := _per_step(part, "graph_replays")) is not None]
    if replays:
        facts["replays per step"] = round(max(replays), 1)
    return facts


def _shapes(seen: list[Evidence]) -> dict[str, Any]:
    tokens = next((part.level("tokens") for part in seen if part.known("tokens")), np.empty(0))
    sizes = np.unique(tokens)
    if not len(sizes):
        return {}
    said = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f}, {len(sizes)} different numbers"
    return {"tokens of a step": said if len(sizes) > 1 else f"always {sizes[0]:,.0f}"}


def _processes(seen: list[Evidence]) -> dict[str, Any]:
    told = [part.samples.by_process for part in seen if part.samples is not None]
    own = seen[0].program.pid if seen else None
    if own is None or not any(told):
        return {}
    others = {pid for pids in told for pid in pids if pid != own}
    return {"others on the devices": len(others)}


def _environment(run: RunFacts) -> dict[str, Any]:
    told = run.environment
    named = {
        "driver": "driver",
        "CUDA of PyTorch": "cuda",
        "CUDA of the driver": "driver_cuda",
        "python": "python",
        "platform": "platform",
        "kernel": "kernel",
        "commit": "commit",
        "sources modified": "modified",
        "CPUs": "cpus",
        "CPU limit": "cpu_limit",
        "container": "container",
    }
    facts = {what: told[key] for what, key in named.items() if told.get(key) is not None}
    if "commit" in facts:
        facts["commit"] = str(facts["commit"])[:12]
    for what, key in (("memory", "memory_bytes"), ("memory limit", "memory_limit_bytes")):
        if isinstance(told.get(key), (int, float)):
            facts[what] = f"{told[key] / GIB:.1f} GiB"
    gpus = told.get("gpus")
    if isinstance(gpus, list) and gpus:
        names = [str(_mapping(gpu).get("name") or "unnamed") for gpu in gpus]
    else:
        names = [str(e.get("what")) for e in run.last_start() if e.get("event") == "device"]
    if names:
        facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return facts


def _per_step(seen: Evidence, name: str) -> float | None:
    """What a total grew by per step of the steady state, None where it is unknown."""
    grown = seen.grown(name)
    return None if grown is None or not seen.count else grown / seen.count


def _most(seen: list[Evidence], name: str) -> float | None:
    """The highest last reading over devices: the compiler's totals are the process's."""
    told = [total for part in seen if (total := part.total(name)) is not None]
    return max(told) if told else None


def _rows(event: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = event.get(key)
    return [_mapping(row) for row in rows] if isinstance(rows, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
