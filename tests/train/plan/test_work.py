"""The arithmetic that placement and estimates rest on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftline.config.load import build_config
from draftline.model.drafter.backbone import DrafterShape
from draftline.model.target.facts import read_facts
from draftline.model.target.target import load_target
from draftline.train.plan.work import pack_work, step_flops

SHAPE = DrafterShape(32, 48, 2, 4, 2, 8, 2, 4, 3)


def test_a_targets_work_is_what_torch_counts(target_dir: Callable[[str], Path]) -> None:
    path = str(target_dir("llama"))
    facts = read_facts(path, taps=(1, 3))
    target = load_target(path, device=torch.device("cpu"), taps=(1, 3))
    base = {"target": {"path": "x"}, "data": {"train": ["x"], "max_length": 8}, "max_anchors": 2}
    tree = base | {"train": {"steps": 1}, "token_budget": 8, "block_size": 4}
    for soft in (False, True):
        config = build_config(tree, [f"loss.soft_labels={int(soft)}"])
        with FlopCounterMode(display=False) as counter:
            target.features(torch.zeros(1, 8, dtype=torch.int64), last_hidden=soft)
        attention = sum(
            flops
            for operation, flops in counter.get_flop_counts()["Global"].items()
            if "attention" in str(operation) or "bmm" in str(operation)
        )
        counted = counter.get_total_flops() - attention
        # Norm weights count as if they were matrices.
        assert pack_work(config, facts, SHAPE).target == pytest.approx(counted, rel=0.02)


def test_a_steps_work_grows_with_rows_context_and_vocabulary() -> None:
    base = step_flops(SHAPE, 100, 64, 8)
    head = 4.0 * 100 * 32 * 8 * 3
    rows = 6.0 * (SHAPE.num_parameters - 2 * 32 * 32) * 32
    context = 6.0 * (2 * 32 * 32 + 2 * 2 * 32 * 2 * 8) * 64
    assert base == head + rows + context
    assert step_flops(SHAPE, 100, 64, 8, soft=True) == base + head / 2
    assert step_flops(SHAPE, 100, 64, 16) == base + head + rows
