"""Trains the same drafter on the CPU (float32, dense) and on CUDA (compiled flex_attention) with the
same packs and anchors, and prints the losses side by side.

    python bench/parity.py CONFIG [--steps 20] [overrides ...]

Three columns: CPU float32, CUDA float32, CUDA bfloat16; every column makes its own updates.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from machine import describe

from draftline.choices import Choices
from draftline.config_file import load_config
from draftline.data.packing import build_pack, plan_packs
from draftline.model.anchors import Anchors
from draftline.model.init import init_drafter, measure_feature_scale
from draftline.model.losses import LossSpec
from draftline.runtime.compiled import CompileGate
from draftline.train.features import FeatureSource
from draftline.train.inputs import prepare
from draftline.train.optim import MasterAdamW
from draftline.train.step import PackTensors, TrainStep


def losses(
    config_path: Path, overrides: list[str], device: str, dtype: str, steps: int
) -> list[float]:
    extra = [f"run.device={device}", f"target.dtype={dtype}"]
    config = load_config(config_path, [*overrides, *extra])
    choices = Choices()
    inputs = prepare(config, choices)
    drafter = init_drafter(
        inputs.shape, inputs.target, init=config.drafter.init, seed=config.run.seed, choices=choices
    )
    source = FeatureSource(
        inputs.target,
        last_hidden=config.loss.soft_labels > 0,
        batch_tokens=config.token_budget,
        most=config.max_batch_size,
    )
    drafter.feature_scale.copy_(measure_feature_scale(source.measure(inputs.samples[:16])))
    train = config.train
    optimizer = MasterAdamW(
        drafter,
        peak=train.learning_rate,
        total_steps=steps,
        warmup_ratio=train.warmup_ratio,
        min_ratio=train.min_lr_ratio,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip=train.clip,
        ema=None,
        working_dtype=inputs.target.dtype,
    )
    packs = plan_packs(
        [len(s.input_ids) for s in inputs.samples],
        token_budget=config.token_budget,
        max_batch_size=config.max_batch_size,
        seed=0,
        epoch=0,
    ).packs
    with CompileGate(inputs.device, choices) as gate:
        step = TrainStep(
            drafter,
            optimizer,
            inputs.target,
            gate,
            loss=LossSpec(
                config.loss.kind,
                config.gamma,
                config.loss.alpha,
                config.loss.soft_labels,
                config.loss.chunk_rows,
            ),
            max_anchors=config.max_anchors,
            token_ids=inputs.token_ids,
            noise=0.0,
            generator=torch.Generator(inputs.device).manual_seed(0),
        )
        drawn = torch.Generator().manual_seed(7)
        seen = []
        for index in range(steps):
            pack = packs[index % len(packs)]
            arrays = build_pack(inputs.samples, pack, config.token_budget, config.block_size)
            features, last = source.pack(inputs.samples, pack, config.token_budget)
            tensors = PackTensors(
                **PackTensors.move(arrays, inputs.device), features=features, last_hidden=last
            )
            anchors = _anchors(tensors, config.max_anchors, drawn)
            result = step.loss(tensors, anchors)
            result.loss.backward()
            optimizer.update()
            seen.append(float(result.loss))
            if index == 0:
                gate.seal()
        gate.check()
    return seen


def _anchors(pack: PackTensors, count: int, generator: torch.Generator) -> Anchors:
    """The same anchors on every device: drawn on the CPU."""
    candidates = pack.anchor_mask.cpu().nonzero()[:, 0]
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]].sort().values
    keep = torch.arange(count) < len(chosen)
    position = torch.zeros(count, dtype=torch.long)
    position[: len(chosen)] = chosen
    device = pack.start.device
    return Anchors(
        position.to(device), pack.start.cpu()[position].long().to(device), keep.to(device)
    )


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="JSON file for the results")
    arguments = parser.parse_args()
    columns = {
        f"{device} {dtype}": losses(
            arguments.config, arguments.overrides, device, dtype, arguments.steps
        )
        for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"))
    }
    print("step  " + "  ".join(f"{name:>14}" for name in columns))
    for index, row in enumerate(zip(*columns.values(), strict=True)):
        print(f"{index:4}  " + "  ".join(f"{value:14.6f}" for value in row))
    base = columns["cpu float32"]
    worst = {
        name: max(abs(a - b) / abs(b) for a, b in zip(values, base, strict=True))
        for name, values in columns.items()
    }
    print("largest relative difference to cpu float32: " + json.dumps(worst))
    if arguments.out:
        facts = describe(torch.device("cuda", 0))
        Path(arguments.out).write_text(
            json.dumps({"losses": columns, "worst_relative": worst, **facts}, indent=1)
        )


if __name__ == "__main__":
    main()
