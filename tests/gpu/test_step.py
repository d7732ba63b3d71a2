"""The step on a GPU: captured, sealed, flat, and in float32 the CPU's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import CompileError
from draftline.model.attention import dense_attention, fused_attention
from draftline.model.drafter.anchors import sample_anchors
from draftline.model.drafter.losses import LossSpec
from draftline.model.drafter.masks import block_mask, dense_mask
from draftline.model.target.target import Target
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.memory import MemoryBaseline
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import StepSpec, TrainStep, compile_kernels
from draftline.train.step.totals import summarize
from tests.support.gpu import GPU, apart, needs_gpu
from tests.support.tiny import (
    build_drafter,
    build_samples,
    build_shape,
    build_step,
    build_target,
    pack_tensors,
    step_spec,
)

pytestmark = needs_gpu

BUDGET, ANCHORS, BLOCK = 256, 128, 8
# Fewer candidates than anchors: all of them are drawn, whatever a device's generator says.
SAMPLES = build_samples((60, 50, 44, 40, 30), prompt=24)
STEPS = 60


@dataclass(frozen=True)
class Variant:
    """A drafter, a loss and a vocabulary."""

    loss: LossSpec
    shape: dict[str, Any]
    token_ids: Tensor | None = None


VARIANTS = {
    "plain": Variant(LossSpec("decay", 3.0, 0.5, 0.0, 64), {}),
    "sliding": Variant(
        LossSpec("dpace", 3.0, 0.5, 0.7, 1000), {"sliding_layers": 1, "sliding_window": 16}
    ),
    "sub-vocabulary": Variant(
        LossSpec("decay", 3.0, 0.5, 0.5, 1000), {"num_layers": 1}, torch.arange(0, 64, 2)
    ),
}


def made(target: Target, variant: Variant, **spec: Any) -> tuple[Any, StepSpec, PackTensors]:
    """Shape, settings and pack, the pack on the CPU."""
    shape = build_shape(
        target, head_dim=64, block_size=BLOCK, intermediate_size=128, **variant.shape
    )
    settings = step_spec(budget=BUDGET, max_anchors=ANCHORS, loss=variant.loss, **spec)
    soft = variant.loss.soft_labels > 0
    pack = pack_tensors(target, SAMPLES, BUDGET, BLOCK, soft=soft)
    assert 0 < int(pack.anchor_mask.sum()) <= ANCHORS
    return shape, settings, pack


def warmed(
    gate: CompileGate, target: Target, shape: Any, spec: StepSpec, token_ids: Tensor | None
) -> TrainStep:
    """The step on the GPU, compiled and captured behind a sealed gate."""
    kernels = compile_kernels(gate, target.ends(GPU), token_ids, spec)
    step = build_step(target, build_drafter(shape, std=0.05).to(GPU), spec, kernels=kernels)
    gate.warm("compile", GPU, step.compile)
    gate.warm("capture", GPU, step.capture, captures=True)
    gate.seal()
    return step


def losses(step: TrainStep, pack: PackTensors, steps: int) -> list[float]:
    found = []
    for number in range(steps):
        step(pack, number)
        step.totals.begin_read()
        found.append(float(summarize(step.totals.finish_read())["loss"]))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_captured_step_is_the_cpu_s(name: str) -> None:
    """Compiled flex_attention in graphs against dense masks: gradients, then losses of updates."""
    target, variant = build_target(hidden=64), VARIANTS[name]
    shape, spec, pack = made(target, variant, gather=True)
    own = build_step(target, build_drafter(shape, std=0.05), spec, token_ids=variant.token_ids)
    with CompileGate(Choices()) as gate:
        step = warmed(gate, target, shape, spec, variant.token_ids)
        assert step.captured
        gradients = []
        for one in (own, step):
            one.stage(pack.tensors())
            one.gradients(0)
            assert one.optimizer.grad is not None
            gradients.append(one.optimizer.grad.clone())
            one.optimizer.grad.zero_()
            one.totals.clear()
        wanted, found = gradients
        assert apart(found, wanted) < 1e-4
        of_gpu = step.optimizer.named(found)
        for parameter, gradient in own.optimizer.named(wanted).items():
            assert apart(of_gpu[parameter], gradient) < 1e-3, parameter
        expected = losses(own, pack, 6)
        assert losses(step, pack, 6) == pytest.approx(expected, rel=1e-3)
        assert expected[-1] < expected[0], "the updates changed something"
        gate.check()


def test_a_captured_step_takes_no_memory_and_never_waits() -> None:
    target = build_target(hidden=64, dtype=torch.bfloat16)
    shape, spec, pack = made(target, VARIANTS["plain"], noise=0.1, ema=0.9)
    pack = PackTensors(**{name: tensor.to(GPU) for name, tensor in pack.tensors().items()})
    with CompileGate(Choices(strict=True)) as gate:
        step = warmed(gate, target, shape, spec, None)
        assert step.captured
        assert gate.cold() == []
        assert [row.outcome for row in gate.rows][-1] == "captured"
        step(pack, 0)
        before = step.optimizer.master.clone()
        torch.cuda.synchronize()
        baseline = MemoryBaseline([GPU])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(1, STEPS + 1):
                step(pack, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        (change,) = baseline.changes()
        assert (change.allocator_calls, change.reserved_change_bytes) == (0, 0)
        assert change.flat
        assert step.replays == 2 * (STEPS + 1)
        assert int(step.optimizer.step_count) == STEPS + 1
        assert not torch.equal(step.optimizer.master, before)
        gate.check()


def test_a_late_compile_is_an_error() -> None:
    target = build_target(hidden=64)
    shape, spec, pack = made(target, VARIANTS["plain"])
    pack = PackTensors(**{name: tensor.to(GPU) for name, tensor in pack.tensors().items()})
    with CompileGate(Choices()) as gate:
        step = warmed(gate, target, shape, spec, None)
        with pytest.raises(CompileError, match="after the seal"):
            gate.warm("another", GPU, step.compile)
        half = replace(pack, **{n: t[: BUDGET // 2] for n, t in pack.tensors().items()})
        anchors = sample_anchors(half.anchor_mask, half.conversation, half.start, ANCHORS, None)
        with pytest.raises(CompileError, match=r"drafter on cuda:0 would have to compile"):
            step.loss(half, anchors)
        step(pack, 0)  # what was captured still runs
        gate.check()


@pytest.mark.parametrize("window", [None, 16])
def test_flex_attention_is_dense_attention(window: int | None) -> None:
    """Outputs and gradients in float32, rows of anchors that are not kept included."""
    pack = pack_tensors(build_target(), SAMPLES, BUDGET, BLOCK)
    drawn = torch.Generator().manual_seed(0)
    anchors = sample_anchors(pack.anchor_mask, pack.conversation, pack.start, ANCHORS, drawn)
    assert not bool(anchors.keep.all())
    rows, keys = ANCHORS * BLOCK, BUDGET + ANCHORS * BLOCK
    shapes = ((1, 4, rows, 64), (1, 2, keys, 64), (1, 2, keys, 64))
    own = [torch.randn(shape, generator=drawn, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], generator=drawn)
    wanted = dense_attention(*own, dense_mask(anchors, BUDGET, BLOCK, window))
    (wanted * weight).sum().backward()
    there = [tensor.detach().to(GPU).requires_grad_() for tensor in own]
    on_gpu = replace(
        anchors,
        position=anchors.position.to(GPU),
        start=anchors.start.to(GPU),
        keep=anchors.keep.to(GPU),
    )
    mask = block_mask(on_gpu, BUDGET, BLOCK, window)
    with CompileGate(Choices()) as gate:
        attention = gate.compile(fused_attention, "attention", GPU)
        found = attention(*there, mask)
        (found * weight.to(GPU)).sum().backward()
    assert apart(found, wanted) < 1e-4
    for mine, theirs in zip(there, own, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert apart(mine.grad, theirs.grad) < 1e-4
