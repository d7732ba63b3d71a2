"""MasterAdamW is torch's AdamW with clipping and a schedule, and safe against bad gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftline.train.step.optim import (
    MasterAdamW,
    OptimizerSpec,
    build_mixed_update,
    learning_rate,
)
from tests.support.tiny import equal

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
}
FLOAT, HALF = torch.float32, torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4)
        self.norm = nn.RMSNorm(4)
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(inputs))))


def spec(**changes: Any) -> OptimizerSpec:
    return OptimizerSpec(**(SETTINGS | changes))


def build(
    *, working_dtype: torch.dtype = FLOAT, gather: bool = False, **changes: Any
) -> tuple[Net, MasterAdamW]:
    net = Net()
    return net, MasterAdamW(net, spec(**changes), working_dtype=working_dtype, gather=gather)


def gradients_of(net: nn.Module, step: int) -> list[Tensor]:
    """Gradients above and below the clip in turn."""
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    parameters = list(net.parameters())
    output = net(inputs.to(parameters[0].dtype)).float()
    return list(torch.autograd.grad((1 + 30 * (step % 2)) * output.square().mean(), parameters))


def run(net: nn.Module, optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        optimizer.add(gradients_of(net, step))
        optimizer.update()


def flat(optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Everything that an update may change."""
    state = {**optimizer.buffers(), "working": optimizer.working, "count": optimizer.step_count}
    return {name: tensor.clone() for name, tensor in state.items()}


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
    wanted = spec(peak=2.0, total_steps=total, warmup_ratio=warmup, min_ratio=floor)
    rates = [learning_rate(torch.tensor(step), wanted).item() for step in range(total + 3)]
    expected = [2.0 * rate(step, total, warmup, floor) for step in range(total)]
    assert rates[:total] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert max(rates) <= 2.0
    if total > 1:
        assert rates[-1] == pytest.approx(2.0 * floor, abs=1e-6), "it stays at the floor"


def adamw(net: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.8, 0.95),
    )


@pytest.mark.parametrize("packs", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_it_is_adamw_step_by_step(clip: float | None, packs: int) -> None:
    """With several packs a step: on the mean of their gradients."""
    net, optimizer = build(clip=clip, share=1 / packs, gather=packs > 1)
    plain = Net()
    reference = adamw(plain)
    clipped = 0
    for step in range(TOTAL):
        for pack in range(packs):
            optimizer.add(gradients_of(net, 2 * pack + step))
        norm = optimizer.update()
        each = [gradients_of(plain, 2 * pack + step) for pack in range(packs)]
        for parameter, parts in zip(plain.parameters(), zip(*each, strict=True), strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        clipped += float(wanted) > (clip or math.inf)
        for group in reference.param_groups:
            group["lr"] = 0.05 * rate(step, TOTAL, 0.25, 0.1)
        reference.step()
        torch.testing.assert_close(norm, wanted)
        for (name, mine), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda m, n=name: f"{n}: {m}")
    assert int(optimizer.step_count) == TOTAL
    assert (0 < clipped < TOTAL) == (clip == 0.5), "one of the cases must show clipping"


def test_the_rate_of_a_host_step_is_that_of_the_update() -> None:
    _, optimizer = build()
    for step in range(TOTAL):
        wanted = 0.05 * rate(step, TOTAL, 0.25, 0.1)
        assert float(optimizer.rate_at(torch.tensor(step))) == pytest.approx(wanted)


def test_parameters_are_views_of_flat_buffers() -> None:
    for dtype in (FLOAT, HALF):
        net, optimizer = build(working_dtype=dtype, gather=True, ema=0.9)
        exact = Net()
        assert optimizer.grad is not None
        buffers = [*optimizer.buffers().values(), optimizer.working, optimizer.grad]
        assert {b.shape for b in buffers} == {optimizer.working.shape}
        assert (optimizer.working is optimizer.master) == (dtype == FLOAT)
        counts = torch.zeros(len(optimizer.working))
        for view in optimizer.named(counts).values():
            view += 1
        assert set(counts.tolist()) == {0, 1}, "no two parameters overlap"
        for name, parameter in net.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.dtype == dtype
            assert parameter.data_ptr() == optimizer.named(optimizer.working)[name].data_ptr()
            # Wide loads, and matrix kernels that want aligned rows.
            assert (parameter.data_ptr() - optimizer.working.data_ptr()) % 256 == 0
            assert torch.equal(parameter, exact.get_parameter(name).to(dtype))
            assert torch.equal(optimizer.named(optimizer.master)[name], exact.get_parameter(name))
        run(net, optimizer, range(3))
        # One operation on a buffer is one on every weight.
        optimizer.working.zero_()
        assert not any(bool(p.any()) for p in net.parameters())


def test_the_space_between_parameters_stays_zero() -> None:
    """Or a checksum of a buffer would compare what nobody set."""
    net, optimizer = build(working_dtype=HALF, ema=0.9)
    run(net, optimizer, range(3))
    for name, buffer in (*optimizer.buffers().items(), ("working", optimizer.working)):
        used = torch.zeros(len(buffer), dtype=torch.bool)
        for view in optimizer.named(used).values():
            view.fill_(True)
        assert not bool(buffer[~used].any()), name
        assert bool(buffer[used].any()), name


def test_bfloat16_weights_follow_float32_masters() -> None:
    net, optimizer = build(working_dtype=HALF, peak=1e-4, min_ratio=1.0)
    masters = optimizer.named(optimizer.master)
    start = masters["norm.weight"].clone()
    for step in range(30):
        gradients = gradients_of(net, step)
        assert {g.dtype for g in gradients} == {HALF}
        optimizer.add(gradients)
        optimizer.update()
        for name, master in masters.items():
            assert master.dtype == FLOAT
            assert torch.equal(net.get_parameter(name), master.bfloat16())
    # Steps of 1e-4 are lost in a bfloat16 near one; the masters keep them.
    assert float((masters["norm.weight"] - start).abs().min()) > 1e-4


@pytest.mark.parametrize("gather", [False, True])
def test_bfloat16_masters_take_the_same_step_as_float32_weights_given_the_same_gradients(
    gather: bool,
) -> None:
    net, optimizer = build(working_dtype=HALF, gather=gather, ema=0.9)
    plain, reference = build(ema=0.9)
    for step in range(8):
        gradients = gradients_of(net, step)
        reference.add([g.float() for g in gradients])
        optimizer.add(gradients)
        torch.testing.assert_close(optimizer.update(), reference.update())
    assert int(optimizer.step_count) == 8
    for name, mine in optimizer.buffers().items():
        torch.testing.assert_close(mine, reference.buffers()[name], rtol=2e-6, atol=1e-7, msg=name)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=2**-8, atol=1e-6)


def test_a_compiled_update_replaces_the_plain_one() -> None:
    calls: list[int] = []
    plain = build_mixed_update(spec())

    def counted(*arguments: Any) -> None:
        calls.append(1)
        plain(*arguments)

    net = Net()
    optimizer = MasterAdamW(net, spec(), working_dtype=HALF, mixed_update=counted)
    twin, other = build(working_dtype=HALF)
    run(net, optimizer, range(3))
    run(twin, other, range(3))
    assert len(calls) == 3
    assert equal(flat(optimizer), flat(other))


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_bad_gradient_leaves_everything_as_it_was(
    bad: float, dtype: torch.dtype, gather: bool
) -> None:
    net, optimizer = build(working_dtype=dtype, gather=gather, ema=0.9)
    run(net, optimizer, range(1))
    before = flat(optimizer)
    gradients = gradients_of(net, 1)
    gradients[-1][0, 0] = bad
    optimizer.add(gradients)
    assert not bool(torch.isfinite(optimizer.update()))
    # The step counts all the same: the rate follows the packs that were seen.
    assert equal(flat(optimizer), before | {"count": torch.tensor(2)})
    # And it goes on afterwards.
    run(net, optimizer, range(2, 3))
    assert all(bool(torch.isfinite(t.float()).all()) for t in flat(optimizer).values())
    assert not torch.equal(optimizer.working, before["working"])


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_switched_off_it_computes_and_changes_nothing(dtype: torch.dtype, gather: bool) -> None:
    net, optimizer = build(working_dtype=dtype, gather=gather, ema=0.9)
    twin, other = build(working_dtype=dtype, gather=gather, ema=0.9)
    for module, both in ((net, optimizer), (twin, other)):
        run(module, both, range(2))
    before = flat(optimizer)
    optimizer.enable(False)
    optimizer.add(gradients_of(net, 2))
    assert float(optimizer.update()) > 0
    optimizer.add(gradients_of(net, 3))
    assert equal(flat(optimizer), before)
    optimizer.enable(True)
    # What was added while it was off does not count either.
    for module, both in ((net, optimizer), (twin, other)):
        run(module, both, range(4, 6))
    assert equal(flat(optimizer), flat(other))


def test_the_average_follows_the_masters() -> None:
    for dtype in (FLOAT, HALF):
        net, optimizer = build(ema=0.6, working_dtype=dtype)
        wanted = optimizer.master.clone()
        for step in range(TOTAL):
            run(net, optimizer, range(step, step + 1))
            keep = min(0.6, (2 + step) / (11 + step))
            wanted = keep * wanted + (1 - keep) * optimizer.master
        assert optimizer.average is not None
        torch.testing.assert_close(optimizer.average, wanted)
        assert not torch.equal(optimizer.average, optimizer.master)
    assert build()[1].average is None


def saved(optimizer: MasterAdamW) -> tuple[dict[str, Tensor], dict[str, Tensor], Any, int]:
    """What `load` takes."""
    named = {k: optimizer.named(v.clone()) for k, v in optimizer.buffers().items()}
    keys = ("exp_avg", "exp_avg_sq")
    moments = {f"{key}.{name}": t for key in keys for name, t in named[key].items()}
    return named["master"], moments, named.get("average"), int(optimizer.step_count)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    net, optimizer = build(working_dtype=dtype, ema=0.9)
    run(net, optimizer, range(4))
    other, restored = build(working_dtype=dtype, ema=0.9)
    run(other, restored, range(9, 10))  # whatever it held is replaced
    restored.load(*saved(optimizer))
    assert equal(flat(optimizer), flat(restored))
    run(net, optimizer, range(4, 8))
    run(other, restored, range(4, 8))
    assert equal(flat(optimizer), flat(restored))
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_replica_takes_the_whole_state(dtype: torch.dtype) -> None:
    net, optimizer = build(working_dtype=dtype, ema=0.9)
    run(net, optimizer, range(3))
    other, replica = build(working_dtype=dtype, ema=0.9)
    run(other, replica, range(5, 6))
    replica.copy_from(optimizer)
    assert equal(flat(optimizer), flat(replica))
    before = flat(optimizer)
    run(other, replica, range(3, 5))
    assert equal(flat(optimizer), before), "it is a copy"
    run(net, optimizer, range(3, 5))
    assert equal(flat(optimizer), flat(replica))


def test_loading_leaves_what_was_loaded_alone() -> None:
    """A checkpoint in memory can be taken up twice."""
    net, optimizer = build()
    run(net, optimizer, range(1))
    masters, moments, _, step = saved(optimizer)
    kept = {n: t.clone() for n, t in (moments | masters).items()}
    other, restored = build()
    restored.load(masters, moments, None, step)
    run(other, restored, range(1, 2))
    assert equal(moments | masters, kept)


def test_an_average_can_be_switched_on_at_a_resume() -> None:
    net, optimizer = build()
    run(net, optimizer, range(1))
    _, restored = build(ema=0.9)
    masters, moments, average, step = saved(optimizer)
    assert average is None
    restored.load(masters, moments, None, step)
    assert restored.average is not None
    assert torch.equal(restored.average, optimizer.master)


def test_an_average_can_be_switched_off_at_a_resume() -> None:
    net, optimizer = build(ema=0.9)
    run(net, optimizer, range(1))
    other, restored = build()
    restored.load(*saved(optimizer))
    run(other, restored, range(1, 2))
    assert "average" not in restored.buffers()


def test_moments_that_are_missing_start_at_zero() -> None:
    net, optimizer = build()
    run(net, optimizer, range(2))
    other, restored = build()
    run(other, restored, range(1))
    restored.load(saved(optimizer)[0], {}, None, 2)
    assert torch.equal(restored.master, optimizer.master)
    assert not restored.exp_avg.any()
    assert not restored.exp_avg_sq.any()
