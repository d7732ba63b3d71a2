"""What a run starts from: its feature workers and its first drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.data.batches import BatchTable, check_table, derive_table
from draftline.data.packing import Pack, PackArrays, plan_packs
from draftline.data.store import Sample, token_lengths
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.init import init_drafter, measure_feature_scale
from draftline.model.target.target import Target
from draftline.train.features.cache import CachedFeatures, FeatureCache, FeatureWorker, measure
from draftline.train.features.forwards import TargetForwards
from draftline.train.plan.inputs import Inputs
from draftline.train.step.heldout import compute_packs
from draftline.train.step.pack_tensors import PackTensors

# Conversations on which the feature scale is measured.
_SCALE_SAMPLES = 32


def batch_table(config: Config, samples: Sequence[Sample]) -> BatchTable:
    """The shapes of the target's forwards: the user's, or those that fit the samples."""
    lengths = token_lengths(samples)
    if config.target.batches is not None:
        return check_table(config.target.batches, max(lengths), config.token_budget)
    return derive_table(
        lengths,
        batch_tokens=config.token_budget,
        most_rows=config.max_batch_size,
        pack_members_hint=config.max_batch_size,
    )


def feature_worker(
    config: Config,
    inputs: Inputs,
    target: Target | None,
    cache: FeatureCache | None,
    device: torch.device,
    choices: Choices,
) -> TargetForwards | CachedFeatures:
    """One worker's features on `device`: out of `cache` where there is one, else from `target`."""
    if cache is not None:
        return CachedFeatures(cache, device, token_budget=config.token_budget)
    assert target is not None, "without a cache a worker needs a target"
    assert target.device == device, f"the target is on {target.device}, the worker on {device}"
    return TargetForwards(
        target,
        batch_table(config, inputs.samples),
        last_hidden=config.loss.soft_labels > 0,
        token_budget=config.token_budget,
        capture=config.target.capture,
        choices=choices,
    )


def heldout_packs(config: Config, samples: Sequence[Sample]) -> tuple[Pack, ...]:
    """The packs of held-out samples, the same whatever a run's seed and shares are."""
    if not samples:
        return ()
    plan = plan_packs(
        token_lengths(samples),
        token_budget=config.token_budget,
        max_batch_size=config.max_batch_size,
        seed=0,
        epoch=0,
    )
    return plan.packs


def measured_packs(
    config: Config, inputs: Inputs, target: Target, choices: Choices
) -> list[tuple[PackArrays, PackTensors]]:
    """The held-out packs with their features, on the host; a worker of their own computes them."""
    packs = heldout_packs(config, inputs.heldout)
    if not packs:
        return []
    held = replace(inputs, samples=inputs.heldout)
    worker = feature_worker(config, held, target, None, target.device, choices)
    return compute_packs(worker, held.samples, packs, config.block_size)


def first_drafter(
    config: Config, inputs: Inputs, target: Target, worker: FeatureWorker, choices: Choices
) -> Drafter:
    """The drafter that a run of `config` starts from: float32 on the target's device, its feature
    scale measured on what `worker` gives."""
    drafter = init_drafter(
        inputs.shape,
        target,
        init=config.drafter.init,
        seed=config.run.seed,
        choices=choices,
        token_ids=inputs.token_ids,
    )
    if config.drafter.feature_scale:
        every = max(1, len(inputs.samples) // _SCALE_SAMPLES)
        members = range(0, len(inputs.samples), every)[:_SCALE_SAMPLES]
        width = len(target.taps) * target.hidden_size
        features = measure(worker, inputs.samples, members, width)
        drafter.feature_scale.copy_(measure_feature_scale(features))
    return drafter
