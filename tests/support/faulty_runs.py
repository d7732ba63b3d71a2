"""A made-up run for each fault, and healthy ones; each may be had with phase marks and without."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.traces import (
    CAPTURED,
    EAGER,
    FLOOR_MIB,
    INACTIVE_MIB,
    RESERVED_MIB,
    Trace,
    run,
    saw,
    stairs,
)

MARKS = ((-1, "load"), (0, "warm"), (4, "run"))
STEPS = 200
LIMIT = "TORCH_LOGS says: size of x changed from 3 to 4"
_AT = np.arange(STEPS)
_EACH_12 = list(range(16, STEPS, 12))
_EACH_STEP = list(range(STEPS))
_GROWTH = list(range(12, STEPS, 13))
_FLUSHED = np.where(_AT % 10 == 9, 620.0, RESERVED_MIB)

# By name: the first cause, the numbers that its sentence names, and the run.
FAULTS: dict[str, tuple[str, str, Callable[..., Trace]]] = {}
HEALTHY: dict[str, Callable[..., Trace]] = {}


def fault(name: str, cause: str, numbers: str, **options: object) -> None:
    def build(**more: object) -> Trace:
        return run(STEPS, **{**options, **more})  # type: ignore[arg-type]

    FAULTS[name] = (cause, numbers, build)


def healthy(name: str, **options: object) -> None:
    def build(**more: object) -> Trace:
        return run(STEPS, **{**options, **more})  # type: ignore[arg-type]

    HEALTHY[name] = build


fault("expects to be compiled", "not_compiled", "900", **EAGER, expects=["compiled"])
fault(
    "force_eager",
    "not_compiled",
    "64",
    expects=["compiled"],
    facts={"stance": "force_eager"},
)
fault("compile disabled", "not_compiled", "900", **EAGER, facts={"dynamo_disabled": True})
fault(
    "eager flex",
    "eager_flex",
    "2.67 342",
    **EAGER,
    peak=FLOOR_MIB + 2736,
    events=[(0, "eager_flex", "flex_attention called without torch.compile")],
)
fault(
    "graph breaks",
    "graph_breaks",
    "2",
    graph_breaks=[0, 0],
    frames=[0] * 5,
    frames_ok=[0] * 4,
    compiles=[0] * 4,
)
fault(
    "recompiling",
    "recompiling",
    "16 192",
    compiles=[0, *_EACH_12],
    frames=[0, *_EACH_12],
    recompiles=_EACH_12,
    events=[(step, "recompile", "scale == 3") for step in _EACH_12],
    step_s={-1: 0.04} | dict.fromkeys(_EACH_12, 0.8),
)
fault(
    "limit",
    "recompile_limit",
    "1",
    compiles=[0, 20, 40, 60],
    frames=[0, 20, 40, 60, 80],
    frames_ok=[0, 20, 40, 60],
    recompiles=[20, 40, 60],
    recompile_limits=[80],
    events=[(80, "recompile_limit", LIMIT)],
)
fault(
    "storm",
    "compile_storm",
    "192 92",
    compiles=_EACH_STEP,
    frames=_EACH_STEP,
    compile_s=1.1,
    step_s=1.2,
    period_s=1.0,
)
fault("refused capture", "no_graph_capture", "1 64", capture_skips=[1])
fault(
    "missing replays",
    "no_graph_capture",
    "0 192",
    expects=["captured"],
    graph_replays=[],
    captures=[2],
)
fault(
    "retries",
    "allocator_retries",
    "20 192 137.6 140.4",
    retries=list(range(9, STEPS, 10)),
    reserved=_FLUSHED,
    beside_mib=139_000,
)
fault("flushes", "cache_flush", "20 192", reserved=_FLUSHED)
fault(
    "recapture",
    "cache_flush",
    "6 192",
    captures=[2, *range(30, STEPS, 30)],
    graph_replays=1,
    reserved=np.where(np.isin(_AT, range(30, STEPS, 30)), 900.0, RESERVED_MIB),
)
fault(
    "leak",
    "leak",
    "955 191",
    allocated=FLOOR_MIB + 5.0 * _AT,
    reserved=RESERVED_MIB + 20.0 * (_AT // 4),
)
fault(
    "fragments",
    "fragmentation",
    "1,024 16 960",
    reserved=stairs(STEPS, [28, 42, 66, 71, 103, 120, 154, 167], 2000.0, 128),
    allocated=stairs(STEPS, [90], FLOOR_MIB, 16),
    inactive=stairs(STEPS, [28, 42, 66, 71, 103, 120, 154, 167], INACTIVE_MIB, 120),
)
fault(
    "ever larger",
    "unbounded_shapes",
    "1,008 1,199 2,080",
    reserved=stairs(STEPS, _GROWTH, 2000.0, np.arange(len(_GROWTH)) % 5 * 60 + 40.0),
    tokens=1000.0 + _AT,
)
fault(
    "neighbour by process",
    "other_process",
    "5,000 9,000",
    others=lambda t: 9000.0 if t % 2 < 1 else 5000.0,
    by_process=True,
    step_s=0.06,
)
fault(
    "neighbour",
    "other_process",
    "4,000",
    others=lambda t: 9000.0 if t % 2 < 1 else 5000.0,
    step_s=0.06,
)

healthy("compiled")
healthy("captured", **CAPTURED, expects=["compiled", "captured"])
healthy("eager without Dynamo", **(dict.fromkeys(EAGER) | {"allocator_calls": 900, "retries": []}))
healthy("two models on the device", others=lambda t: 9000.0, by_process=True)
healthy("a floor that swings", allocated=saw(STEPS, 4, FLOOR_MIB, FLOOR_MIB + 300), reserved=2500.0)
healthy("peaks that differ", peak=FLOOR_MIB + 100 + _AT % 7 * 90.0, tokens=4000 + _AT % 7 * 900.0)
healthy("near the limit", beside_mib=140_000)
