"""A step learns, on every path through it, and does exactly what its parts say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.store import Sample
from draftline.errors import RunError
from draftline.model.drafter.anchors import Anchors, build_blocks
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.losses import LossResult, LossSpec
from draftline.model.drafter.masks import dense_mask
from draftline.model.target.target import Target
from draftline.runtime.compile.gate import CompileGate
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep, compile_kernels
from draftline.train.step.totals import Totals, summarize
from tests.support.tiny import (
    CPU,
    build_drafter,
    build_samples,
    build_shape,
    build_step,
    build_target,
    equal,
    pack_tensors,
    step_spec,
)

BUDGET, ANCHORS = 64, 16
LENGTHS = (26, 20, 13)


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return build_samples(LENGTHS)


def build(
    target: Target,
    samples: list[Sample],
    *,
    shape: dict[str, Any] | None = None,
    token_ids: Tensor | None = None,
    **changes: Any,
) -> tuple[TrainStep, PackTensors]:
    made = build_shape(target, **(shape or {}))
    spec = step_spec(budget=BUDGET, max_anchors=ANCHORS, **changes)
    pack = pack_tensors(target, samples, BUDGET, made.block_size, soft=spec.loss.soft_labels > 0)
    drafter = build_drafter(made, std=0.05)
    return build_step(target, drafter, spec, token_ids=token_ids), pack


def packs(target: Target, samples: list[Sample], count: int) -> list[PackTensors]:
    """Packs of the same conversations in other orders."""
    orders = [samples[i % 3 :] + samples[: i % 3] for i in range(count)]
    return [pack_tensors(target, order, BUDGET, 4) for order in orders]


def sums(totals: Totals) -> list[float]:
    totals.begin_read()
    return totals.finish_read()


def read(totals: Totals) -> dict[str, Any]:
    return summarize(sums(totals))


def state(step: TrainStep) -> dict[str, Tensor]:
    """Everything that a step may change."""
    optimizer = step.optimizer
    found = {**optimizer.buffers(), "working": optimizer.working, "count": optimizer.step_count}
    if optimizer.grad is not None:
        found["grad"] = optimizer.grad
    return {name: tensor.clone() for name, tensor in found.items()}


def watched(step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Anchors, LossResult]]:
    """Anchors and results of the packs that `step` takes from here."""
    seen: list[tuple[Anchors, LossResult]] = []
    plain = step.loss

    def loss(pack: PackTensors, anchors: Anchors) -> LossResult:
        result = plain(pack, anchors)
        seen.append((anchors, result))
        return result

    monkeypatch.setattr(step, "loss", loss)
    return seen


def every_anchor(pack: PackTensors) -> Anchors:
    """The same anchors at every measurement: the first of each conversation's candidates."""
    position = pack.anchor_mask.nonzero().flatten()[::3][:ANCHORS]
    return Anchors(
        position, pack.start[position].long(), torch.ones(len(position), dtype=torch.bool)
    )


VARIANTS: list[dict[str, Any]] = [
    {},
    {"loss": LossSpec("dpace", 3.0, 0.5, 0.0, 16)},
    {"loss": LossSpec("decay", 3.0, 0.5, 0.7, 16)},
    {"loss": LossSpec("dpace", 3.0, 0.5, 1.0, 1000)},
    {"shape": {"sliding_layers": 1, "sliding_window": 5}},
    {"shape": {"sliding_layers": 2, "sliding_window": 3, "block_size": 6}},
    {"token_ids": torch.arange(0, 64, 2)},
    {"noise": 0.1},
    {"ema": 0.9},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v) or "plain")
def test_steps_on_one_pack_learn_it(
    target: Target, samples: list[Sample], variant: dict[str, Any]
) -> None:
    step, pack = build(target, samples, **variant)
    frozen = [p.clone() for p in target.parameters()]
    losses = [step.loss(pack, every_anchor(pack)).loss.item()]
    for number in range(24):
        step(pack, number)
        if number % 8 < 7:
            continue
        losses.append(step.loss(pack, every_anchor(pack)).loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), frozen, strict=True))
    values = read(step.totals)
    assert values["bad_steps"] == values["bad_packs"] == 0
    assert values["anchors"] == ANCHORS


def test_bfloat16_learns_too(samples: list[Sample]) -> None:
    target = build_target(dtype=torch.bfloat16)
    step, pack = build(target, samples)
    assert {p.dtype for p in step.drafter.parameters()} == {torch.bfloat16}
    before = step.loss(pack, every_anchor(pack)).loss.item()
    for number in range(24):
        step(pack, number)
    assert step.loss(pack, every_anchor(pack)).loss.item() < 0.8 * before


@pytest.mark.parametrize("variant", VARIANTS[:7], ids=lambda v: "-".join(v) or "plain")
def test_the_loss_is_put_together_from_its_parts(
    target: Target, samples: list[Sample], variant: dict[str, Any]
) -> None:
    """Block by block, with logits in full: labels, features and the target's hint all line up."""
    step, pack = build(target, samples, **variant)
    spec: LossSpec = variant.get("loss", LossSpec("decay", 3.0, 0.5, 0.0, 64))
    shape, anchors = step.drafter.shape, every_anchor(pack)
    taps_width = 2 * target.hidden_size
    result = step.loss(pack, anchors)
    ids = variant.get("token_ids", torch.arange(64))
    head = target.head.weight[ids]
    total = norm = 0.0
    for anchor, start in zip(anchors.position.tolist(), anchors.start.tolist(), strict=True):
        # The conversation up to the anchor, alone: what decoding would have.
        one = Anchors(torch.tensor([anchor - start]), torch.tensor([0]), torch.tensor([True]))
        length = anchor - start
        inputs = torch.full((shape.block_size,), shape.mask_token_id)
        inputs[0] = pack.input_ids[anchor]
        hidden = step.drafter(
            pack.features[start:anchor, :taps_width],
            target.embed(inputs),
            torch.arange(length),
            length + torch.arange(shape.block_size),
            dense_mask(one, length, shape.block_size),
            dense_mask(one, length, shape.block_size, shape.sliding_window),
        )
        log_probs = torch.log_softmax(hidden @ head.t(), -1)
        reach = 1.0
        rows = []
        for j in range(1, shape.block_size):
            p = anchor + j
            if not (p < BUDGET and pack.start[p] == start and pack.loss_mask[p]):
                break
            place = (ids == pack.input_ids[p]).nonzero().flatten().tolist()
            ce = -log_probs[j, place[0]].item() if place else 0.0
            q = math.exp(-ce) if place else 0.0
            reach *= (1 - spec.alpha) * q + spec.alpha
            soft = 0.0
            if spec.soft_labels:
                last_hidden = pack.features[p - 1, taps_width:]
                wanted = torch.log_softmax(last_hidden @ head.t(), -1)
                soft = (wanted.exp() * (wanted - log_probs[j])).sum().item()
            hard = (1 - spec.soft_labels) * bool(place)
            decay = math.exp(-(j - 1) / spec.gamma)
            rows.append(
                (reach, decay, hard * ce + spec.soft_labels * soft, hard + spec.soft_labels)
            )
        for j, (_, decay, loss, share) in enumerate(rows):
            weight = decay if spec.kind == "decay" else sum(r[0] for r in rows[j:])
            total += weight * loss
            norm += weight * share
    assert result.loss.item() == pytest.approx(total / norm, rel=1e-4)


def test_the_target_hint_is_the_distribution_that_made_the_token(
    target: Target, samples: list[Sample]
) -> None:
    step, pack = build(target, samples, loss=LossSpec("decay", 3.0, 0.5, 1.0, 64))
    seen: list[Tensor] = []
    plain = step._kernels.loss

    def spy(raw: Tensor, hint: Tensor, *rest: Tensor) -> Any:
        seen.append(torch.softmax(hint, -1))
        return plain.score(raw, hint, *rest)

    step._kernels = replace(step._kernels, loss=replace(plain, score=spy))
    anchors = every_anchor(pack)
    step.loss(pack, anchors)
    hints = torch.cat(seen)
    with torch.no_grad():
        for n, (anchor, start) in enumerate(
            zip(anchors.position.tolist(), anchors.start.tolist(), strict=True)
        ):
            for j in range(1, 4):
                if anchor + j >= BUDGET or pack.start[anchor + j] != start:
                    break
                prefix = pack.input_ids[start : anchor + j].long()[None]
                logits = target._model(input_ids=prefix).logits[0, -1]
                torch.testing.assert_close(
                    hints[n, j - 1], torch.softmax(logits, -1), rtol=1e-3, atol=1e-5
                )


def test_tokens_outside_the_sub_vocabulary_teach_nothing(
    target: Target, samples: list[Sample]
) -> None:
    ids = torch.arange(0, 64, 2)
    step, pack = build(target, samples, token_ids=ids)
    odd = pack.input_ids % 2 == 1
    none_known = replace(pack, input_ids=torch.where(odd, pack.input_ids, 9))
    result = step.loss(none_known, every_anchor(pack))
    assert result.loss.item() == 0
    assert int(result.accepted.sum()) == int(result.slot_correct.sum()) == 0
    assert int(result.blocks) > 0
    assert int(result.slot_total.sum()) > 0


@pytest.mark.parametrize("gather", [False, True])
def test_warming_changes_no_state(target: Target, samples: list[Sample], gather: bool) -> None:
    (step, pack), (twin, _) = (
        build(target, samples, noise=0.1, gather=gather, ema=0.9) for _ in range(2)
    )
    before = state(step)
    step.compile()
    step.capture()
    assert equal(state(step), before)
    assert read(step.totals)["blocks"] == 0
    step(pack, 0)
    twin(pack, 0)
    assert equal(state(step), state(twin))
    assert not equal(state(step), before)
    # And late, between two steps.
    before = state(step)
    step.compile()
    step.capture()
    assert equal(state(step), before)
    assert all(p.grad is None for p in step.drafter.parameters())
    step(pack, 1)
    twin(pack, 1)
    assert equal(state(step), state(twin))
    assert read(step.totals)["loss"] > 0
    assert not step.captured, "there are no graphs on a CPU"


def test_anchors_and_noise_follow_from_seed_and_number(
    target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever drafter takes a pack, whatever it did before, the pack is trained on alike."""

    def run(seed: int, numbers: list[int], *, disturbed: bool = False) -> list[Any]:
        step, pack = build(target, samples, noise=0.3, seed=seed, gather=True)
        seen = watched(step, monkeypatch)
        step.stage(pack.tensors())
        for number in numbers:
            if disturbed:
                step.compile()
                step.loss(pack, step.sample(pack))
                seen.clear()
            step.gradients(number)
        return [(a.position.tolist(), r.loss.item()) for a, r in seen[-len(numbers) :]]

    first = run(3, [0, 1, 2, 70_000])
    assert run(3, [70_000, 2, 1, 0]) == first[::-1]
    assert run(3, [5, 2])[1:] == first[2:3]
    assert run(3, [2], disturbed=True) == first[2:3]
    others = [*first, *run(4, [0, 1, 2]), *run(0, [0, 3]), *run(2**31, [0])]
    assert len({tuple(positions) for positions, _ in others}) == len(others)
    assert len({loss for _, loss in others}) == len(others)


def test_neighbouring_seeds_and_numbers_share_no_stream(
    target: Target, samples: list[Sample]
) -> None:
    step, pack = build(target, samples)
    step.stage(pack.tensors())
    drawn = set()
    for seed in range(6):
        step._spec = replace(step._spec, seed=seed)
        for number in range(6):
            step.gradients(number)
            drawn.add(tuple(torch.rand(4, generator=step._generator).tolist()))
    assert len(drawn) == 36


def test_several_packs_a_step_are_their_mean(target: Target, samples: list[Sample]) -> None:
    step, _ = build(target, samples, gather=True, share=1 / 3)
    three = packs(target, samples, 3)
    means = [torch.zeros_like(p) for p in step.optimizer.parameters]
    losses = []
    for number, pack in enumerate(three):
        step._generator.manual_seed(0)
        result = step.loss(pack, every_anchor(pack))
        losses.append(result.loss.item())
        for mean, part in zip(
            means, torch.autograd.grad(result.loss, step.optimizer.parameters), strict=True
        ):
            mean += part / 3
        step.sample = lambda p: every_anchor(p)  # type: ignore[method-assign]
        step.stage(pack.tensors())
        step.gradients(number)
    grad = step.optimizer.grad
    assert grad is not None
    for summed, mean in zip(step.optimizer.named(grad).values(), means, strict=True):
        torch.testing.assert_close(summed / 3, mean, rtol=1e-4, atol=1e-6)
    single, _ = build(target, samples)
    single.optimizer.add(means)
    norm = single.optimizer.update()
    step.update()
    torch.testing.assert_close(
        step.optimizer.working, single.optimizer.working, rtol=1e-5, atol=1e-6
    )
    assert not bool(grad.any()), "the next step starts anew"
    values = read(step.totals)
    assert values["loss"] == pytest.approx(sum(losses) / 3)
    assert values["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert int(step.optimizer.step_count) == 1


def misfits() -> list[Any]:
    small = torch.zeros(BUDGET, dtype=torch.int32)
    return [
        ("input_ids", small.long(), 0, r"\[64\] int32, seen \[64\] int64"),
        ("loss_mask", small, 1, r"\[64\] bool, seen \[64\] int32"),
        ("start", small[:-1], 5, r"\[64\] int32, seen \[63\] int32"),
        # As [batch, tokens, taps, hidden]: a loader that forgot to put the taps side by side.
        ("features", torch.zeros(1, 64, 2, 32), 6, r"\[64, 64\] float32, seen \[1, 64, 2, 32\]"),
        ("features", torch.zeros(1, 64, 64), 6, r"\[64, 64\] float32, seen \[1, 64, 64\]"),
        ("features", torch.zeros(64, 96), 6, r"\[64, 64\] float32, seen \[64, 96\]"),
        ("features", torch.zeros(64, 64).bfloat16(), 6, r"float32, seen \[64, 64\] bfloat16"),
    ]


@pytest.mark.parametrize(("name", "value", "index", "shapes"), misfits())
def test_a_pack_of_another_shape_is_refused(
    target: Target, samples: list[Sample], name: str, value: Tensor, index: int, shapes: str
) -> None:
    step, pack = build(target, samples)
    step.stage(pack.tensors())
    with pytest.raises(RunError, match=rf"input {index} \({name}\).*expected .*{shapes}"):
        step.stage(pack.tensors() | {name: value})


def test_a_staged_pack_is_a_copy(target: Target, samples: list[Sample]) -> None:
    """Whoever gave it may fill its buffers again while the step runs."""
    (step, pack), (twin, other) = build(target, samples), build(target, samples)
    step.stage(pack.tensors())
    for tensor in pack.tensors().values():
        tensor.zero_()
    step.gradients(0)
    step.update()
    twin(other, 0)
    assert equal(state(step), state(twin))


def test_empty_buffers_are_those_of_a_pack(target: Target, samples: list[Sample]) -> None:
    _, pack = build(target, samples)
    empty = PackTensors.empty(BUDGET, 2 * target.hidden_size, torch.float32, CPU)
    assert empty.tensors().keys() == pack.tensors().keys()
    for name, tensor in empty.tensors().items():
        given = pack.tensors()[name]
        assert (tensor.shape, tensor.dtype) == (given.shape, given.dtype), name
        assert not tensor.any()


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [
        (torch.float32, VARIANTS[0]),
        (torch.bfloat16, VARIANTS[2]),
        (torch.bfloat16, VARIANTS[4] | VARIANTS[6]),
    ],
)
def test_drafters_of_one_device_share_what_is_compiled(
    samples: list[Sample], dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    """Each function once, whoever calls; the second drafter compiles nothing."""
    target = build_target(dtype=dtype)
    changes = dict(variant)
    ids = changes.pop("token_ids", None)
    shape = build_shape(target, **changes.pop("shape", {}))
    # One chunk size, as the shapes of a run should be chosen.
    if "loss" in changes:
        changes["loss"] = replace(changes["loss"], chunk_rows=24)
    spec = step_spec(budget=BUDGET, max_anchors=ANCHORS, gather=True, **changes)
    pack = pack_tensors(target, samples, BUDGET, shape.block_size, soft=spec.loss.soft_labels > 0)
    drafters = [build_drafter(shape, std=0.05, seed=seed) for seed in (0, 1)]
    plain = [build_step(target, copy.deepcopy(d), spec, token_ids=ids) for d in drafters]
    choices = Choices()
    with CompileGate(choices, backend="eager", device_types=("cpu",)) as gate:
        kernels = compile_kernels(gate, target.ends(CPU), ids, spec)
        steps = [build_step(target, d, spec, kernels=kernels) for d in drafters]
        steps[0].compile()
        steps[0].capture()
        # drafter, loss, loss_gradient; and the update where the weights have masters.
        assert gate.compiles == 3 + (dtype == torch.bfloat16)
        assert gate.cold() == ([] if dtype == torch.bfloat16 else [("update", "cpu")])
        steps[1].compile()
        steps[1].capture()
        assert gate.compiles == 3 + (dtype == torch.bfloat16)
        gate.seal()
        for number in range(3):
            for mine, theirs in zip(steps, plain, strict=True):
                for both in (mine, theirs):
                    both(pack, number)
        gate.check()
        for mine, theirs in zip(steps, plain, strict=True):
            torch.testing.assert_close(mine.optimizer.master, theirs.optimizer.master)
            assert sums(mine.totals) == pytest.approx(sums(theirs.totals))
    assert choices.entries == [], "nothing ran uncompiled"


def test_replicas_stay_equal(target: Target, samples: list[Sample]) -> None:
    """Two drafters, each with half of the packs and the sum of both gradients."""
    pair = [build(target, samples, gather=True, share=0.5)[0] for _ in range(2)]
    whole, _ = build(target, samples, gather=True, share=0.5)
    given = packs(target, samples, 4)
    for number in range(0, 4, 2):
        for rank, step in enumerate(pair):
            step.stage(given[number + rank].tensors())
            step.gradients(number + rank)
            whole.stage(given[number + rank].tensors())
            whole.gradients(number + rank)
        grads = [step.optimizer.grad for step in pair]
        assert grads[0] is not None
        assert grads[1] is not None
        total = grads[0] + grads[1]
        for step, grad in zip(pair, grads, strict=True):
            grad.copy_(total)  # type: ignore[union-attr]
            step.update()
        whole.update()
    assert equal(state(pair[0]), state(pair[1]))
    torch.testing.assert_close(pair[0].optimizer.master, whole.optimizer.master)


def test_noise_is_in_units_of_the_channel(target: Target, samples: list[Sample]) -> None:
    soft = LossSpec("decay", 3.0, 0.5, 0.5, 64)
    step, pack = build(target, samples, noise=0.5, loss=soft)
    seen: list[Tensor] = []
    plain = step._kernels.forward

    def spy(drafter: Drafter, features: Tensor, *rest: Any) -> Tensor:
        seen.append(features)
        return plain(drafter, features, *rest)

    step._kernels = replace(step._kernels, forward=spy)
    for _ in range(40):
        step.loss(pack, every_anchor(pack))
    # The target's last hidden state is what is taught, and stays as it is.
    noise = torch.stack(seen) - pack.features[:, : 2 * target.hidden_size]
    assert not torch.equal(seen[0], seen[1])
    deviation = noise.std((0, 1)) * step.drafter.feature_scale
    torch.testing.assert_close(deviation, torch.full_like(deviation, 0.5), rtol=0.1, atol=0)
    assert float(noise.mean((0, 1)).abs().max()) < 0.1


def test_a_bad_pack_is_counted_and_harms_nothing(target: Target, samples: list[Sample]) -> None:
    step, pack = build(target, samples)
    weights = step.optimizer.working.clone()
    # The second token is in every block's context, so whatever is drawn is spoiled.
    features = pack.features.clone()
    features[1] = math.nan
    step(replace(pack, features=features), 0)
    assert torch.equal(step.optimizer.working, weights)
    step(pack, 1)
    values = read(step.totals)
    assert (values["bad_packs"], values["bad_steps"]) == (1, 1)
    assert not torch.equal(step.optimizer.working, weights)


def test_totals_are_means_over_a_stretch(
    target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, pack = build(target, samples)
    seen = watched(step, monkeypatch)
    norms: list[float] = []
    plain = step.totals.add_step

    def spy(norm: Tensor) -> None:
        norms.append(float(norm))
        plain(norm)

    monkeypatch.setattr(step.totals, "add_step", spy)
    for number in range(3):
        step(pack, number)
    step.totals.begin_read()
    step(pack, 3)  # belongs to the next stretch
    values = summarize(step.totals.finish_read())
    results = [result for _, result in seen[:3]]
    accepted, blocks = (
        sum(int(getattr(r, k).sum()) for r in results) for k in ("accepted", "blocks")
    )
    assert values["loss"] == pytest.approx(sum(r.loss.item() for r in results) / 3)
    assert values["grad_norm"] == pytest.approx(sum(norms[:3]) / 3)
    assert values["accept_length_forced"] == pytest.approx(1 + accepted / blocks)
    assert (values["accepted"], values["blocks"], values["anchors"]) == (accepted, blocks, ANCHORS)
    correct = sum(r.slot_correct for r in results)
    total = sum(r.slot_total for r in results)
    assert values["slot_accuracy"] == pytest.approx((correct / total).tolist())
    assert read(step.totals)["loss"] == pytest.approx(seen[3][1].loss.item())


def test_a_conversation_without_context_to_spare_still_trains(target: Target) -> None:
    """Anchors at the very start of a conversation see an empty context."""
    samples = build_samples((10, 12), prompt=0)
    step, pack = build(target, samples)
    assert bool(pack.anchor_mask[0])
    anchors = Anchors(torch.tensor([0, 10]), torch.tensor([0, 10]), torch.ones(2, dtype=torch.bool))
    result = step.loss(pack, anchors)
    result.loss.backward()
    for parameter in step.drafter.parameters():
        if parameter.grad is not None:
            assert bool(torch.isfinite(parameter.grad).all())
    blocks = build_blocks(anchors, pack.input_ids, pack.loss_mask, pack.start, pack.position, 4, 7)
    assert int(blocks.supervised.sum()) == int(result.slot_total.sum()) == 6
