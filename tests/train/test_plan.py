"""The plan's numbers, and its refusals before anything is allocated."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import build_target

from draftline.config import Config
from draftline.config_file import build_config
from draftline.data.packing import Pack, PackPlan
from draftline.errors import ConfigError
from draftline.model.drafter import DrafterShape
from draftline.train.plan import plan_run

PACKS = PackPlan((Pack((0, 1), 90), Pack((2,), 70)), 100, 4, 80.0, "tokens")


def config(tmp_path: Path, *overrides: str) -> Config:
    tree = {
        "run": {"dir": str(tmp_path / "deep" / "run")},
        "target": {"path": "x"},
        "token_budget": 100,
        "max_anchors": 8,
        "block_size": 4,
        "data": {"train": ["x"], "max_length": 100},
        "train": {"epochs": 2.5},
    }
    return build_config(tree, list(overrides))


def inputs(target: Any) -> Any:
    shape = DrafterShape(target.hidden_size, 32, 1, 4, 2, 8, len(target.taps), 4, 3)
    return SimpleNamespace(
        target=target, shape=shape, token_ids=None, tokens=160, device=target.device
    )


def test_steps_come_from_epochs_and_bytes_from_shapes(tmp_path: Path) -> None:
    target = build_target()
    made = inputs(target)
    plan = plan_run(config(tmp_path), made, PACKS)
    assert (plan.steps, plan.packs, plan.rows) == (5, 2, 32)
    assert plan.epochs == 2.5
    assert plan.parameters == made.shape.num_parameters
    assert plan.cache_bytes == 0
    assert plan.checkpoint_bytes == 12 * plan.parameters
    cached = plan_run(config(tmp_path, "features.source=memory"), made, PACKS)
    assert cached.cache_bytes == 160 * len(target.taps) * target.hidden_size * 4
    averaged = plan_run(config(tmp_path, "train.ema=0.9"), made, PACKS)
    assert averaged.drafter_bytes == plan.drafter_bytes + 4 * plan.parameters
    text = "\n".join(plan.lines())
    assert "5 steps, 2.50 epochs of 2 packs, fill 80.0 %" in text


def test_a_disk_too_small_for_the_checkpoints_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"checkpoints need .* free"):
        plan_run(config(tmp_path), inputs(build_target()), PACKS)
