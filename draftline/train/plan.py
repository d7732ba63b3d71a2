"""What a run will need, computed before anything large is allocated."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from draftline.config import Config
from draftline.data.packing import PackPlan
from draftline.errors import ConfigError, DeviceError
from draftline.train.features import feature_size
from draftline.train.inputs import Inputs

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes and counts; `lines()` is what a person reads before the run starts."""

    steps: int
    epochs: float
    packs: int
    fill_pct: float
    limited_by: str
    rows: int
    parameters: int
    target_bytes: int
    drafter_bytes: int
    step_bytes: int
    cache_bytes: int
    checkpoint_bytes: int
    disk_bytes: int

    def lines(self) -> list[str]:
        return [
            f"plan: {self.steps} steps, {self.epochs:.2f} epochs of {self.packs} packs, "
            f"fill {self.fill_pct:.1f} % (limited by {self.limited_by})",
            f"plan: {self.rows} rows a step, drafter of {self.parameters / 1e6:.1f} M parameters",
            f"plan: target {self.target_bytes / _GIB:.2f} GiB, drafter and optimizer "
            f"{self.drafter_bytes / _GIB:.2f} GiB, step at least {self.step_bytes / _GIB:.2f} GiB, "
            f"feature cache {self.cache_bytes / _GIB:.2f} GiB",
            f"plan: checkpoints of {self.checkpoint_bytes / _GIB:.2f} GiB, at most "
            f"{self.disk_bytes / _GIB:.2f} GiB of disk",
        ]


def plan_run(config: Config, inputs: Inputs, packs: PackPlan) -> Plan:
    """The plan of a run; raises ConfigError or DeviceError when it cannot fit, with the numbers."""
    steps = config.train.steps
    if steps is None:
        assert config.train.epochs is not None, "the configuration demands one of the two"
        steps = max(1, round(config.train.epochs * len(packs.packs)))
    target, shape = inputs.target, inputs.shape
    element = target.embedding.element_size()
    parameters = shape.num_parameters
    masters = 0 if target.dtype == torch.float32 else 4
    average = 4 if config.train.ema is not None else 0
    drafter_bytes = parameters * (2 * element + masters * 2 + 8 + average)
    soft = config.loss.soft_labels > 0
    pack = feature_size(target, config.token_budget, last_hidden=soft)
    vocabulary = len(inputs.token_ids) if inputs.token_ids is not None else target.vocab_size
    rows = config.max_anchors * config.block_size
    logits = 3 * 4 * min(config.loss.chunk_rows, rows) * vocabulary
    # What a layer must keep for its backward: inputs, projections, MLP halves.
    kept = 6 * shape.hidden_size + 3 * shape.intermediate_size
    activations = rows * shape.num_layers * kept * element
    if inputs.device.type == "cpu":
        activations += rows * (config.token_budget + rows)
    cache = (
        feature_size(target, inputs.tokens, last_hidden=soft).bytes
        if config.features.source != "online"
        else 0
    )
    checkpoint = parameters * (12 + 2 * average)
    plan = Plan(
        steps=steps,
        epochs=steps / len(packs.packs),
        packs=len(packs.packs),
        fill_pct=packs.fill_pct,
        limited_by=packs.limited_by,
        rows=rows,
        parameters=parameters,
        target_bytes=sum(p.numel() * p.element_size() for p in target.parameters()),
        drafter_bytes=drafter_bytes,
        step_bytes=pack.bytes + logits + activations,
        cache_bytes=cache,
        checkpoint_bytes=checkpoint,
        # The new one is complete before the oldest goes.
        disk_bytes=checkpoint * (config.train.keep_checkpoints + 1),
    )
    _check(plan, inputs.device, Path(config.run.dir))
    return plan


def _check(plan: Plan, device: torch.device, directory: Path) -> None:
    there = directory
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if plan.disk_bytes > free:
        raise ConfigError(
            f"checkpoints need {plan.disk_bytes / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are free "
            f"at {there}; choose another run.dir or lower train.keep_checkpoints"
        )
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        needed = plan.drafter_bytes + plan.step_bytes
        if needed > free:
            raise DeviceError(
                f"{device} has {free / _GIB:.1f} GiB left beside the target and the run needs at "
                f"least {needed / _GIB:.1f} GiB; lower max_anchors, token_budget or loss.chunk_rows"
            )
