"""Trains the same drafter on the CPU (float32, dense) and on CUDA (compiled flex_attention) with the
same packs and anchors, and prints the losses side by side.

    python bench/parity.py CONFIG [--steps 20] [overrides ...]

Three columns: CPU float32, CUDA float32, CUDA bfloat16; every column makes its own updates.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

import torch
from machine import describe

from draftline.choices import Choices
from draftline.config.load import load_config
from draftline.data.packing import build_pack
from draftline.model.drafter.anchors import Anchors
from draftline.runtime.compile.gate import CompileGate
from draftline.train.assemble import step_spec
from draftline.train.plan.inputs import epoch_packs, open_target, prepare
from draftline.train.plan.start import feature_worker, first_drafter
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep, compile_kernels


def losses(
    config_path: Path, overrides: list[str], device: str, dtype: str, steps: int
) -> list[float]:
    extra = [f"run.device={device}", f"target.dtype={dtype}"]
    config = load_config(config_path, [*overrides, *extra])
    choices = Choices()
    inputs = prepare(config, choices)
    target = open_target(config, choices)
    worker = feature_worker(config, inputs, target, None, target.device, choices)
    drafter = first_drafter(config, inputs, target, worker, choices)
    # Noise would be another on every device.
    spec = replace(step_spec(config, total_steps=steps, packs_per_step=1, machines=1), noise=0.0)
    packs = epoch_packs(config, inputs.samples, 0).packs
    with CompileGate(choices) as gate:
        step = TrainStep(
            drafter,
            compile_kernels(gate, target.ends(target.device), inputs.token_ids, spec),
            spec,
            working_dtype=target.dtype,
            width=worker.width,
        )
        gate.warm("target", target.device, worker.warm)
        gate.warm("step", target.device, step.compile)
        gate.seal()
        drawn = torch.Generator().manual_seed(7)
        seen = []
        for index in range(steps):
            pack = packs[index % len(packs)]
            arrays = build_pack(inputs.samples, pack, config.token_budget, config.block_size)
            worker.run(inputs.samples, pack)
            tensors = PackTensors.build(arrays, worker.row)
            result = step.loss(tensors, _anchors(tensors, config.anchors, drawn))
            optimizer = step.optimizer
            optimizer.add(torch.autograd.grad(result.loss, optimizer.parameters))
            optimizer.update()
            seen.append(float(result.loss.detach()))
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
