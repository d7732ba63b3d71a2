"""The state of a run as a checkpoint holds it, with whatever a test changes."""

from __future__ import annotations

from typing import Any

from draftline.checkpoint.state import RunState
from draftline.config.load import build_config
from draftline.model.drafter.backbone import DrafterShape

CONFIG: dict[str, Any] = {
    "run": {"dir": "somewhere"},
    "target": {"path": "somewhere"},
    "data": {"train": ["data.jsonl"]},
    "train": {"steps": 5},
}
SHAPE = DrafterShape(
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_taps=2,
    block_size=4,
    mask_token_id=7,
)


def run_state(step: int, **changes: Any) -> RunState:
    values: dict[str, Any] = {
        "step": step,
        "config": build_config(CONFIG),
        "shape": SHAPE,
        "taps": (0, 2),
        "num_target_layers": 4,
        "features": "0" * 16,
        "epoch": 1,
        "next_pack": 2,
        "next_number": 3,
        "packs_per_step": 1,
        "total_steps": 5,
        "seconds": 1.5,
        "provenance": {"commit": "abc123"},
    }
    return RunState(**(values | changes))
