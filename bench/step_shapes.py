"""Times the whole training step at the reference shapes, with random weights and features.

    python bench/step_shapes.py [--shape q8 paper seed] [--steps 10]

Each shape runs in a process of its own. The step is everything the trainer does: anchor sampling,
block mask, forward, chunked loss, backward, clipping, AdamW on float32 masters, metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import torch
from machine import describe
from torch import nn

from draftline.choices import Choices
from draftline.model.drafter import Drafter, DrafterShape
from draftline.model.head import Head
from draftline.model.losses import LossSpec
from draftline.runtime.compiled import CompileGate
from draftline.train.optim import MasterAdamW
from draftline.train.step import PackTensors, TrainStep

# hidden, intermediate, vocab, context, conversation, anchors, block; what it stands for
SHAPES = {
    "q8": (4096, 12288, 151936, 16384, 2048, 512, 16, "Qwen3-8B drafter, 8 x 2048, 512 x 16"),
    "paper": (4096, 12288, 151936, 12288, 3072, 2048, 16, "Qwen3-8B drafter, 4 x 3072, 2048 x 16"),
    "seed": (5120, 17408, 248320, 49152, 2048, 1024, 32, "27B-class drafter, 49152, 1024 x 32"),
}
# Matrix work of a step at the measured bf16 ceiling of an H200.
CEILING_TFLOPS = 790.0


def flops(shape: DrafterShape, vocab: int, context: int, anchors: int) -> float:
    """Floating-point operations of the matrix products of one step: 6 a weight and row, and two
    products (logits, their gradient) with the frozen head over the supervised slots."""
    rows = anchors * shape.block_size
    fc = shape.num_taps * shape.hidden_size**2
    kv = shape.num_layers * 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    layers = shape.num_parameters - fc
    head = 4.0 * vocab * shape.hidden_size * anchors * (shape.block_size - 1)
    return 6.0 * layers * rows + 6.0 * (fc + kv) * context + head


def measure(name: str, steps: int) -> dict[str, object]:
    hidden, inner, vocab, context, length, anchors, block, title = SHAPES[name]
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    shape = DrafterShape(hidden, inner, 5, 32, 8, 128, 5, block, mask_token_id=1)
    embedding = (torch.randn(vocab, hidden, device=device) * 0.02).bfloat16()
    weight = (torch.randn(vocab, hidden, device=device) * 0.02).bfloat16()
    target = SimpleNamespace(
        device=device,
        head=Head(weight),
        vocab_size=vocab,
        embed=lambda ids: nn.functional.embedding(ids, embedding),
    )
    with torch.device(device):
        drafter = Drafter(shape)
    optimizer = MasterAdamW(
        drafter,
        peak=1e-4,
        total_steps=1000,
        warmup_ratio=0.04,
        min_ratio=0.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        clip=1.0,
        ema=None,
        working_dtype=torch.bfloat16,
    )
    position = torch.arange(context, device=device) % length
    packs = []
    for _ in range(2):
        ids = torch.randint(2, vocab, (context,), device=device)
        packs.append(
            PackTensors(
                input_ids=ids,
                loss_mask=torch.ones_like(ids, dtype=torch.bool),
                anchor_mask=position < length - block,
                conversation=torch.arange(context, device=device) // length,
                position=position,
                start=torch.arange(context, device=device) // length * length,
                features=torch.randn(context, 5 * hidden, device=device).bfloat16(),
                last_hidden=None,
            )
        )
    generator = torch.Generator(device).manual_seed(1)
    spec = LossSpec("decay", 10.0 if block == 32 else 7.0, 0.5, 0.0, chunk_rows=4096)
    began = time.perf_counter()
    with CompileGate(device, Choices()) as gate:
        step = TrainStep(
            drafter,
            optimizer,
            target,
            gate,
            loss=spec,
            max_anchors=anchors,
            token_ids=None,
            noise=0.0,
            generator=generator,
        )
        step.warm(packs[0])
        torch.cuda.synchronize()
        warm_s = time.perf_counter() - began
        gate.seal()
        for pack in packs:
            step(pack)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for index in range(steps):
            step(packs[index % 2])
            events[index + 1].record()
        torch.cuda.synchronize()
        gate.check()
    after = torch.cuda.memory_stats()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    step_ms = statistics.median(times)
    rows = anchors * block
    work = flops(shape, vocab, context, anchors)
    return {
        "shape": name,
        "title": title,
        "step_ms": round(step_ms, 1),
        "step_ms_min": round(min(times), 1),
        "step_ms_max": round(max(times), 1),
        "rows_per_s": round(1000 * rows / step_ms),
        "context_tokens_per_s": round(1000 * context / step_ms),
        "tflops": round(work / step_ms / 1e9, 1),
        "floor_ms": round(work / CEILING_TFLOPS / 1e9, 1),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "reserved_gib": round(after["reserved_bytes.all.current"] / 2**30, 1),
        "allocator_calls_per_step": (
            after["allocation.all.allocated"] - before["allocation.all.allocated"]
        )
        / steps,
        "reserved_change_bytes": after["reserved_bytes.all.current"]
        - before["reserved_bytes.all.current"],
        "warm_s": round(warm_s, 1),
        "parameters": sum(m.numel() for m in optimizer.masters),
        **describe(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT " + json.dumps(measure(arguments.shape[0], arguments.steps)))
        return
    results = []
    for name in arguments.shape:
        command = [sys.executable, __file__, "--child", "--shape", name, "--steps"]
        done = subprocess.run([*command, str(arguments.steps)], capture_output=True, text=True)
        lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        if not lines:
            print(f"{name}: failed\n{done.stderr[-3000:]}")
            continue
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    print(
        f"{'shape':36} {'step ms':>8} {'rows/s':>8} {'floor ms':>8} {'peak':>6} {'reserved':>8} calls"
    )
    for r in results:
        print(
            f"{r['title']:36} {r['step_ms']:8} {r['rows_per_s']:8} {r['floor_ms']:8} "
            f"{r['peak_allocated_gib']:6} {r['reserved_gib']:8} {r['allocator_calls_per_step']:.0f}"
        )
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
