"""A step learns, on every path through it, and does exactly what its parts say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.data.tokens import Sample
from draftline.model.anchors import Anchors, build_blocks
from draftline.model.losses import LossSpec
from draftline.model.masks import dense_mask
from draftline.model.target import Target
from draftline.train.step import PackTensors, Totals, TrainStep
from tests.tiny import (
    build_drafter,
    build_samples,
    build_shape,
    build_step,
    build_target,
    pack_tensors,
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
    target: Target, samples: list[Sample], *, shape: dict[str, Any] | None = None, **step: Any
) -> tuple[TrainStep, PackTensors]:
    made = build_shape(target, **(shape or {}))
    drafter = build_drafter(made, std=0.05)
    spec = step.get("loss")
    soft = spec is not None and spec.soft_labels > 0
    pack = pack_tensors(target, samples, BUDGET, made.block_size, soft=soft)
    return build_step(target, drafter, max_anchors=ANCHORS, **step), pack


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
    for _ in range(3):
        for _ in range(8):
            step(pack)
        losses.append(step.loss(pack, every_anchor(pack)).loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), frozen, strict=True))
    step.totals.begin_read()
    values = step.totals.finish_read()
    assert values["bad_steps"] == 0
    assert values["anchors"] == ANCHORS


def test_bfloat16_learns_too(samples: list[Sample]) -> None:
    target = build_target(dtype=torch.bfloat16)
    step, pack = build(target, samples)
    assert {p.dtype for p in step.drafter.parameters()} == {torch.bfloat16}
    before = step.loss(pack, every_anchor(pack)).loss.item()
    for _ in range(24):
        step(pack)
    assert step.loss(pack, every_anchor(pack)).loss.item() < 0.8 * before


@pytest.mark.parametrize("variant", VARIANTS[:7], ids=lambda v: "-".join(v) or "plain")
def test_the_loss_is_put_together_from_its_parts(
    target: Target, samples: list[Sample], variant: dict[str, Any]
) -> None:
    """Block by block, with logits in full: labels, features and the target's hint all line up."""
    step, pack = build(target, samples, **variant)
    spec: LossSpec = variant.get("loss", LossSpec("decay", 3.0, 0.5, 0.0, 64))
    shape, anchors = step.drafter.shape, every_anchor(pack)
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
            pack.features[start:anchor],
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
                assert pack.last_hidden is not None
                wanted = torch.log_softmax(pack.last_hidden[p - 1] @ head.t(), -1)
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

    def spy(hidden: Tensor, hint: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        seen.append(torch.softmax(hint @ weight.t(), -1))
        return plain(hidden, hint, weight, *rest)

    plain = step._chunk_loss
    step._chunk_loss = spy
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
    assert int(result.accepted) == int(result.slot_correct.sum()) == 0
    assert int(result.blocks) > 0
    assert int(result.slot_total.sum()) > 0


def test_warming_changes_no_state(target: Target, samples: list[Sample]) -> None:
    (step, pack), (twin, _) = build(target, samples, noise=0.1), build(target, samples, noise=0.1)
    step.warm(pack)
    assert all(p.grad is None for p in step.drafter.parameters())
    for both in (step, twin):
        both(pack)
        both.totals.begin_read()
    assert step.totals.finish_read() == twin.totals.finish_read()
    for mine, theirs in zip(step.drafter.parameters(), twin.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_noise_is_in_units_of_the_channel(target: Target, samples: list[Sample]) -> None:
    step, pack = build(target, samples, noise=0.5)
    seen: list[Tensor] = []

    def spy(features: Tensor, *rest: Any) -> Tensor:
        seen.append(features)
        return plain(features, *rest)

    plain = step._forward
    step._forward = spy
    for _ in range(40):
        step.loss(pack, every_anchor(pack))
    noise = torch.stack(seen) - pack.features
    assert not torch.equal(seen[0], seen[1])
    deviation = noise.std((0, 1)) * step.drafter.feature_scale
    torch.testing.assert_close(deviation, torch.full_like(deviation, 0.5), rtol=0.1, atol=0)
    assert float(noise.mean((0, 1)).abs().max()) < 0.1


def test_a_bad_pack_is_counted_and_harms_nothing(target: Target, samples: list[Sample]) -> None:
    step, pack = build(target, samples)
    weights = [p.detach().clone() for p in step.drafter.parameters()]
    # The second token is in every block's context, so whatever is drawn is spoiled.
    features = pack.features.clone()
    features[1] = math.nan
    step(replace(pack, features=features))
    assert all(torch.equal(a, b) for a, b in zip(step.drafter.parameters(), weights, strict=True))
    step(pack)
    step.totals.begin_read()
    values = step.totals.finish_read()
    assert values["bad_steps"] == 1
    assert not torch.equal(next(step.drafter.parameters()), weights[0])


def test_totals_are_means_over_a_stretch(target: Target, samples: list[Sample]) -> None:
    step, pack = build(target, samples)
    spied: list[Any] = []
    plain = Totals.add

    def spy(self: Totals, result: Any, anchors: Tensor, norm: Tensor) -> None:
        spied.append((result, int(anchors), float(norm)))
        plain(self, result, anchors, norm)

    step.totals.add = spy.__get__(step.totals)  # type: ignore[method-assign]
    for _ in range(3):
        step(pack)
    step.totals.begin_read()
    step(pack)  # belongs to the next stretch
    values = step.totals.finish_read()
    results = [r for r, _, _ in spied[:3]]
    accepted, blocks = (sum(int(getattr(r, k)) for r in results) for k in ("accepted", "blocks"))
    assert values["loss"] == pytest.approx(sum(r.loss.item() for r in results) / 3)
    assert values["grad_norm"] == pytest.approx(sum(n for _, _, n in spied[:3]) / 3)
    assert values["accept_length_forced"] == pytest.approx(1 + accepted / blocks)
    assert (values["accepted"], values["blocks"], values["anchors"]) == (accepted, blocks, ANCHORS)
    correct = sum(r.slot_correct for r in results)
    total = sum(r.slot_total for r in results)
    assert values["slot_accuracy"] == pytest.approx((correct / total).tolist())
    step.totals.begin_read()
    assert step.totals.finish_read()["loss"] == pytest.approx(spied[3][0].loss.item())


def test_nothing_measured_is_nan() -> None:
    totals = Totals(4, torch.device("cpu"))
    totals.begin_read()
    values = totals.finish_read()
    assert math.isnan(values["accept_length_forced"])  # type: ignore[arg-type]
    assert all(math.isnan(v) for v in values["slot_accuracy"])  # type: ignore[union-attr]


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
