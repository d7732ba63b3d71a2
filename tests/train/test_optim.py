"""MasterAdamW is torch's AdamW with clipping and a schedule, and safe against bad gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftline.train.optim import MasterAdamW, learning_rate

TOTAL = 12
SETTINGS: dict[str, Any] = {
    "peak": 0.05,
    "total_steps": TOTAL,
    "warmup_ratio": 0.25,
    "min_ratio": 0.1,
    "betas": (0.8, 0.95),
    "weight_decay": 0.3,
    "clip": 1.0,
    "ema": None,
    "working_dtype": torch.float32,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4)
        self.norm = nn.RMSNorm(4)
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(inputs))))


def build(**changes: Any) -> tuple[Net, MasterAdamW]:
    net = Net()
    return net, MasterAdamW(net, **(SETTINGS | changes))


def batch(step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def backward(net: nn.Module, step: int, scale: float = 1.0) -> None:
    """Gradients above and below the clip in turn."""
    inputs = batch(step).to(next(net.parameters()).dtype)
    (scale * (1 + 30 * (step % 2)) * net(inputs).float().square().mean()).backward()


def rate(step: int, total: int, warmup_ratio: float, floor: float) -> float:
    """The schedule in plain words: rise over the warm-up steps, fall to the floor at the last."""
    warmup = max(1, warmup_ratio * total)
    if step + 1 <= warmup:
        return (step + 1) / warmup
    progress = (step + 1 - warmup) / (total - warmup)
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(
    ("total", "warmup", "floor"), [(12, 0.25, 0.1), (10, 0.0, 0.0), (1, 0.5, 0), (7, 0.9, 0.5)]
)
def test_the_rate_warms_up_and_falls_along_a_cosine(
    total: int, warmup: float, floor: float
) -> None:
    rates = [
        learning_rate(
            torch.tensor(step), peak=2.0, total_steps=total, warmup_ratio=warmup, min_ratio=floor
        ).item()
        for step in range(total + 3)
    ]
    expected = [2.0 * rate(step, total, warmup, floor) for step in range(total)]
    assert rates[:total] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert max(rates) <= 2.0
    if total > 1:
        assert rates[-1] == pytest.approx(2.0 * floor, abs=1e-6), "it stays at the floor"


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_it_is_adamw_step_by_step(clip: float | None) -> None:
    net, optimizer = build(clip=clip)
    plain = Net()
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.8, 0.95),
    )
    for step in range(TOTAL):
        backward(net, step)
        norm = optimizer.update()
        backward(plain, step)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = 0.05 * rate(step, TOTAL, 0.25, 0.1)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(norm, wanted.detach())
        assert float(optimizer.rate) == pytest.approx(0.05 * rate(step, TOTAL, 0.25, 0.1))
        for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert mine.grad is None
            torch.testing.assert_close(mine, theirs, msg=lambda m, n=name: f"{n}: {m}")
    assert int(optimizer.step_count) == TOTAL


def test_bfloat16_weights_follow_float32_masters() -> None:
    net, optimizer = build(working_dtype=torch.bfloat16, peak=1e-4, min_ratio=1.0)
    exact = Net()
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    for name, master in optimizer.master_tensors().items():
        assert master.dtype == torch.float32
        assert torch.equal(master, exact.get_parameter(name)), "masters start unrounded"
    start = {n: m.clone() for n, m in optimizer.master_tensors().items()}
    for step in range(30):
        backward(net, step)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
        optimizer.update()
        for name, master in optimizer.master_tensors().items():
            assert torch.equal(net.get_parameter(name), master.bfloat16())
    # Steps of 1e-4 are lost in a bfloat16 near one; the masters keep them.
    moved = optimizer.master_tensors()["norm.weight"] - start["norm.weight"]
    assert float(moved.abs().min()) > 1e-4


def test_bfloat16_masters_take_the_same_step_as_float32_weights_given_the_same_gradients() -> None:
    (net, optimizer), (plain, reference) = build(working_dtype=torch.bfloat16), build()
    for step in range(5):
        backward(net, step)
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.float()
        torch.testing.assert_close(optimizer.update(), reference.update())
    for mine, theirs in zip(optimizer.masters, reference.masters, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_leaves_everything_as_it_was(bad: float, dtype: torch.dtype) -> None:
    net, optimizer = build(working_dtype=dtype, ema=0.9)
    twin, reference = build(working_dtype=dtype, ema=0.9)
    for module, both in ((net, optimizer), (twin, reference)):
        backward(module, 0)
        both.update()
    before = {name: t.clone() for name, t in optimizer.state().items()}
    weights = {name: t.detach().clone() for name, t in net.named_parameters()}
    backward(net, 1)
    assert net.second.weight.grad is not None
    net.second.weight.grad[0, 0] = bad
    norm = optimizer.update()
    assert not bool(torch.isfinite(norm))
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    for name, tensor in optimizer.state().items():
        if name.startswith(("exp_avg", "step.")):
            assert torch.equal(tensor, before[name]), name
        assert bool(torch.isfinite(tensor.float()).all()), name
    # And it goes on afterwards, with Adam's own count untouched.
    backward(net, 2)
    optimizer.update()
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())
    assert not torch.equal(net.second.weight, weights["second.weight"])


def test_the_average_follows_the_masters() -> None:
    net, optimizer = build(ema=0.6)
    average = {n: p.detach().clone() for n, p in net.named_parameters()}
    for step in range(TOTAL):
        backward(net, step)
        optimizer.update()
        keep = min(0.6, (2 + step) / (11 + step))
        for name, master in optimizer.master_tensors().items():
            average[name] = keep * average[name] + (1 - keep) * master
    best = optimizer.best_tensors()
    for name, wanted in average.items():
        torch.testing.assert_close(best[name], wanted)
        assert not torch.equal(best[name], optimizer.master_tensors()[name])
    assert build()[1].best_tensors().keys() == best.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    net, optimizer = build(working_dtype=dtype, ema=0.9)
    for step in range(4):
        backward(net, step)
        optimizer.update()
    masters = {n: m.clone() for n, m in optimizer.master_tensors().items()}
    state = {n: t.clone() for n, t in optimizer.state().items()}
    assert {"step_count", "average.norm.weight", "exp_avg.norm.weight"} <= state.keys()
    other, restored = build(working_dtype=dtype, ema=0.9)
    backward(other, 9)
    restored.update()  # whatever it held is replaced
    restored.load(masters, state)
    for module, both in ((net, optimizer), (other, restored)):
        for step in range(4, 8):
            backward(module, step)
            both.update()
    assert float(optimizer.rate) == float(restored.rate)
    for name, tensor in optimizer.state().items():
        assert torch.equal(tensor, restored.state()[name]), name
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_loading_leaves_what_was_loaded_alone() -> None:
    """A checkpoint in memory can be taken up twice."""
    net, optimizer = build()
    backward(net, 0)
    optimizer.update()
    state = {n: t.clone() for n, t in optimizer.state().items()}
    masters = {n: t.clone() for n, t in optimizer.master_tensors().items()}
    kept = {n: t.clone() for n, t in (state | masters).items()}
    other, restored = build()
    restored.load(masters, state)
    backward(other, 1)
    restored.update()
    for name, tensor in (state | masters).items():
        assert torch.equal(tensor, kept[name]), name


def test_an_average_can_be_switched_on_at_a_resume() -> None:
    net, optimizer = build()
    backward(net, 0)
    optimizer.update()
    _, restored = build(ema=0.9)
    restored.load(optimizer.master_tensors(), optimizer.state())
    for name, value in restored.best_tensors().items():
        assert torch.equal(value, optimizer.master_tensors()[name])


def test_an_average_can_be_switched_off_at_a_resume() -> None:
    net, optimizer = build(ema=0.9)
    backward(net, 0)
    optimizer.update()
    other, restored = build()
    restored.load(optimizer.master_tensors(), optimizer.state())
    backward(other, 1)
    restored.update()
    assert not any(name.startswith("average.") for name in restored.state())
