"""Run directories as a training on a GPU leaves them, written without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

GIB, MIB = 2**30, 2**20
START_S = 1_800_000_000.0
STEPS, STEP_S = 160, 0.25
WARM_AT_S, RUN_AT_S = 4.0, 10.0
END_S = RUN_AT_S + STEPS * STEP_S

Row = dict[str, Any]
# Changes a row of a file in place; None drops the row.
Edit = Callable[[Row], Row | None]


def signal_rows() -> list[Row]:
    """A recording of one GPU: loading, warming, then captured steps in flat memory."""
    rows: list[Row] = [
        {
            "kind": "start",
            "format": 1,
            "time_s": START_S,
            "pid": 77,
            "program": "draftline train my.yaml",
            "expects": ["captured", "compiled"],
            "devices": {},
            "facts": {
                "stance": "default",
                "dynamo_disabled": False,
                "driver": "580.159.04",
                "gpus": [{"index": "0", "name": "NVIDIA H200", "total_bytes": 140 * GIB}],
                "variables": {"OMP_NUM_THREADS": "8"},
                "versions": {"triton": "3.6.0"},
            },
        }
    ]
    for at, name in ((0.0, "load"), (WARM_AT_S, "warm"), (RUN_AT_S, "run"), (END_S, "end")):
        rows.append({"kind": "phase", "time_s": START_S + at, "phase": name})
    for tick in range(int(END_S * 5)):
        at = tick / 5
        held = 2.0 if at < WARM_AT_S else 8.0 if at < RUN_AT_S - 1 else 20.0
        rows.append(
            {
                "kind": "device",
                "time_s": START_S + at,
                "device": "0",
                "used_bytes": int(held * GIB),
                "total_bytes": 140 * GIB,
                "util_pct": 99.0,
                "processes": {"77": int(held * GIB)},
            }
        )
    for step in range(STEPS):
        rows.append(
            {
                "kind": "step",
                "time_s": START_S + RUN_AT_S + (step + 1) * STEP_S,
                "device": "0",
                "step": step,
                "wall_ms": 1000 * STEP_S,
                "tokens": 4096,
                "allocator_calls": 5000,
                "device_allocations": 40,
                "device_frees": 3,
                "retries": 0,
                "ooms": 0,
                "frames": 9,
                "frames_ok": 9,
                "graph_breaks": 0,
                "compiles": 11,
                "compile_s": 30.5,
                "captures": 2,
                "capture_skips": 0,
                "graph_replays": 2 * step,
                "allocated_bytes": 6 * GIB,
                "peak_bytes": 18 * GIB,
                "reserved_bytes": 19 * GIB,
            }
        )
    return sorted(rows, key=lambda row: row["time_s"])


def event_rows() -> list[Row]:
    choice = {"time_s": START_S + 1, "event": "choice", "fallback": False}
    return [
        {
            "time_s": START_S,
            "event": "start",
            "config": "0123456789abcdef",
            "resume": False,
            "versions": {"draftline": "0.1.0", "torch": "2.11.0"},
            "python": "3.11.7",
            "commit": "c0ffee",
            "modified": False,
            "argv": ["draftline", "train", "my.yaml"],
        },
        choice
        | {"what": "target forwards", "wanted": "auto", "got": "captured", "reason": "it can be"},
        choice
        | {
            "what": "compile drafter",
            "wanted": "flash",
            "got": "flex",
            "reason": "no wheel",
            "fallback": True,
        },
        {
            "time_s": START_S + RUN_AT_S,
            "event": "sealed",
            "compiled": [
                {
                    "name": "drafter",
                    "device": "cuda:0",
                    "part": "forward",
                    "outcome": "cache hit",
                    "seconds": 3.25,
                }
            ],
            "warmed": [
                {
                    "name": "drafter-0 step",
                    "device": "cuda:0",
                    "outcome": "captured",
                    "compiles": 5,
                    "seconds": 5.5,
                    "late": False,
                }
            ],
            "seconds": 6.0,
        },
        {"time_s": START_S + END_S, "event": "end", "step": STEPS, "interrupted": False},
    ]


def metric_rows() -> list[Row]:
    return [
        {
            "time_s": START_S + RUN_AT_S + step * STEP_S,
            "step": step,
            "loss": 2 + 40 / step,
            "accept_length_forced": 1 + step / 100,
            "step_ms": 1000 * STEP_S,
            "tokens_per_s": 16384.0,
            "rows_per_s": 8192.0,
            "targets_waited_pct": 40.0,
            "drafters_waited_pct": 3.0,
            "seconds": step * STEP_S,
            "eta_s": 1.0,
        }
        for step in range(4, STEPS + 1, 4)
    ]


CONFIG = """run: {dir: runs/my, seed: 0}
target: {path: some/model, capture: auto}
token_budget: 4096
train: {learning_rate: 0.001, steps: 160}
"""


def write_run(
    folder: Path,
    *,
    signal: Edit | None = None,
    events: Edit | None = None,
    metrics: Edit | None = None,
    config: str = CONFIG,
    without: Iterable[str] = (),
) -> Path:
    """A run directory in flat memory, its rows changed as asked, less the files in `without`."""
    folder.mkdir(parents=True)
    files: Mapping[str, tuple[list[Row], Edit | None]] = {
        "signal.jsonl": (signal_rows(), signal),
        "events.jsonl": (event_rows(), events),
        "metrics.jsonl": (metric_rows(), metrics),
    }
    for name, (rows, edit) in files.items():
        if name not in without:
            edited = rows if edit is None else [r for row in rows if (r := edit(row)) is not None]
            text = "".join(json.dumps(row) + "\n" for row in edited)
            (folder / name).write_text(text, encoding="utf-8")
    if "config.yaml" not in without:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


def recompiling(row: Row) -> Row:
    """Edits a recording: a compile in every tenth step, which takes 64 MiB more each time."""
    if row["kind"] == "step":
        late = row["step"] // 10
        row |= {"compiles": 11 + late, "reserved_bytes": 19 * GIB + late * 64 * MIB}
    if row["kind"] == "device" and row["time_s"] > START_S + RUN_AT_S:
        step = int((row["time_s"] - START_S - RUN_AT_S) / STEP_S)
        row["used_bytes"] += step // 10 * 64 * MIB
    return row
