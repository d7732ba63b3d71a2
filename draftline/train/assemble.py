"""The parts of a run on their devices: targets, what drafters borrow, feature workers, steps."""

from __future__ import annotations

import copy
import gc
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.model.drafter.losses import LossSpec
from draftline.model.drafter.vocabulary import check_mask_row
from draftline.model.target.target import Target
from draftline.progress import doing
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.devices import keep_float32_exact
from draftline.runtime.graphs import GraphPool
from draftline.train.features.cache import FeatureCache, FeatureWorker
from draftline.train.plan.inputs import Inputs, feature_key, open_target
from draftline.train.plan.placement import Placement
from draftline.train.plan.plan import Plan
from draftline.train.plan.start import feature_worker, first_drafter, measured_packs
from draftline.train.step.heldout import HeldOut
from draftline.train.step.optim import OptimizerSpec
from draftline.train.step.step import StepSpec, TrainStep, compile_kernels

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """One feature worker per target worker, one step per drafter; `key` is the features' identity;
    `heldout` measures the first drafter, None where nothing is held out or another machine does."""

    features: list[FeatureWorker]
    steps: list[TrainStep]
    key: str
    heldout: HeldOut | None


def step_spec(config: Config, *, total_steps: int, packs_per_step: int, machines: int) -> StepSpec:
    """What all drafters of a run have in common."""
    train = config.train
    return StepSpec(
        loss=LossSpec(
            kind=config.loss.kind,
            gamma=config.gamma,
            alpha=config.loss.alpha,
            soft_labels=config.loss.soft_labels,
            chunk_rows=config.loss.chunk_rows,
        ),
        optimizer=OptimizerSpec(
            peak=train.learning_rate,
            total_steps=total_steps,
            warmup_ratio=train.warmup_ratio,
            min_ratio=train.min_lr_ratio,
            betas=train.betas,
            weight_decay=train.weight_decay,
            clip=train.clip,
            ema=train.ema,
            share=1 / packs_per_step,
        ),
        max_anchors=config.anchors,
        token_budget=config.token_budget,
        noise=config.features.noise,
        seed=config.run.seed,
        gather=packs_per_step > 1 or machines > 1,
    )


def assemble(
    config: Config,
    inputs: Inputs,
    plan: Plan,
    choices: Choices,
    gate: CompileGate,
    run_dir: Path,
    *,
    target: Target | None,
    machines: int,
    measures: bool,
) -> Parts:
    """Loads the targets and allocates what a run computes with, as planned.

    `target` is the first one when the caller has it; `measures` says that this machine measures on
    held-out conversations. The feature cache is filled here, after which
    its target is let go.
    """
    placement = plan.placement
    keep_float32_exact(placement.devices)
    if target is None or target.devices != placement.targets[0]:
        target = open_target(config, choices, placement.targets[0])
    check_mask_row(target.embedding, inputs.shape.mask_token_id)
    key = feature_key(config, inputs.samples, target)
    devices = list(dict.fromkeys(placement.drafters))
    ends = {device: target.ends(device) for device in devices}
    measured = measured_packs(config, inputs, target, choices) if measures else []
    cache = None
    if config.features.source != "online":
        cache = _filled(config, inputs, target, choices, run_dir, key)
    targets = _replicas(config, target, placement, choices) if cache is None else []
    features: list[FeatureWorker] = [
        feature_worker(config, inputs, targets[i] if targets else None, cache, span[0], choices)
        for i, span in enumerate(placement.targets)
    ]
    with doing("initializing the drafter"):
        drafter = first_drafter(config, inputs, target, features[0], choices)
    if cache is not None:
        # Its hooks refer to it, so it would wait for the collector while the drafters are made.
        del target
        gc.collect()
    if placement.drafters[0].type == "cuda":
        # What measuring took on this thread's stream is of no use to the workers.
        torch.cuda.empty_cache()
    spec = step_spec(
        config,
        total_steps=plan.steps,
        packs_per_step=plan.packs_per_step,
        machines=machines,
    )
    kernels = {d: compile_kernels(gate, ends[d], inputs.token_ids, spec) for d in devices}
    pools = {device: GraphPool(device) for device in devices}
    steps = [
        TrainStep(
            copy.deepcopy(drafter).to(device),
            kernels[device],
            spec,
            working_dtype=inputs.facts.dtype,
            width=int(features[0].row.shape[1]),
            pool=pools[device],
        )
        for device in placement.drafters
    ]
    heldout = None
    if measured:
        heldout = HeldOut(steps[0], measured, config.anchors, pool=pools[steps[0].device])
    return Parts(features, steps, key, heldout)


def _replicas(
    config: Config, target: Target, placement: Placement, choices: Choices
) -> list[Target]:
    """One target per worker; those on one device share weights, one that spans several is loaded."""
    found = [target]
    for devices in placement.targets[1:]:
        if len(devices) == 1 and len(target.devices) == 1:
            same = next((t for t in found if t.devices == devices), target)
            found.append(same.replica(devices[0]))
        else:
            found.append(open_target(config, choices, devices))
    return found


def _filled(
    config: Config, inputs: Inputs, target: Target, choices: Choices, run_dir: Path, key: str
) -> FeatureCache:
    folder = None
    if config.features.source == "disk":
        folder = Path(config.features.dir or run_dir / "features")
    cache = FeatureCache(inputs.facts, inputs.samples, last_hidden=config.loss.soft_labels > 0)
    began = time.perf_counter()

    def worker() -> FeatureWorker:
        return feature_worker(config, inputs, target, None, target.device, choices)

    with doing("features") as job:
        cache.fill(worker, folder, key, partial(job.reached, unit="tokens"), choices)
    log.info("features: ready in %.0f s", time.perf_counter() - began)
    return cache
