"""A drafter that has learned nothing says nothing: its first loss is the logarithm of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.config.load import load_config
from draftline.data.builtin import demo_config
from draftline.data.packing import build_pack
from draftline.data.store import Sample
from draftline.model.drafter.init import final_gain, init_drafter
from draftline.model.head import Head
from draftline.model.target.target import Target
from draftline.runtime.compile.gate import CompileGate
from draftline.train.assemble import step_spec as configured_spec
from draftline.train.plan.inputs import Inputs, epoch_packs, open_target, prepare
from draftline.train.plan.start import feature_worker, first_drafter
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep, compile_kernels
from tests.support.fakes import tiny_model, tiny_tokenizer
from tests.support.tiny import (
    CPU,
    build_samples,
    build_shape,
    build_step,
    build_target,
    pack_tensors,
    step_spec,
)

BUDGET = 160


def first_loss(target: Target, seed: int, token_ids: Tensor | None = None) -> float:
    vocabulary = target.vocab_size
    samples: list[Sample] = build_samples((60, 50, 40), vocab=vocabulary, seed=seed)
    shape = build_shape(target, head_dim=8)
    drafter = init_drafter(
        shape, target, init="scratch", seed=seed, choices=Choices(), token_ids=token_ids
    )
    spec = step_spec(budget=BUDGET, max_anchors=96)
    step = build_step(target, drafter, spec, token_ids=token_ids)
    pack = pack_tensors(target, samples, BUDGET, shape.block_size)
    return step.loss(pack, step.sample(pack)).loss.item()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("sharpness", [0.5, 3.0, 12.0])
def test_a_sharp_head_does_not_raise_the_first_loss(sharpness: float, seed: int) -> None:
    target = build_target(sharpness=sharpness, vocab=512)
    assert first_loss(target, seed) == pytest.approx(math.log(512), rel=0.1)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_tied_head_does_not_repeat_the_mask(seed: int) -> None:
    target = build_target(vocab=512)
    with torch.no_grad():
        # As in small models: rows are the embedding's, far from zero, with a direction in common.
        rows = 3 * torch.randn(512, target.hidden_size) + 2.0
        target._model.lm_head.weight.copy_(rows)
        target._model.model.embed_tokens.weight.copy_(rows)
    assert first_loss(target, seed) == pytest.approx(math.log(512), rel=0.1)


@pytest.mark.parametrize("kept", [300, 100])
def test_a_draft_vocabulary_has_a_logarithm_of_its_own(kept: int) -> None:
    target = build_target(sharpness=6.0, vocab=512)
    ids = torch.arange(511, 511 - kept, -1).flip(0)
    assert first_loss(target, 0, ids) == pytest.approx(math.log(kept), rel=0.1)


@pytest.mark.parametrize("family", ["gemma3", "granite", "cohere", "tied_llama", "qwen3"])
def test_scaled_capped_and_multiplied_logits(family: str) -> None:
    target = Target(tiny_model(family), tiny_tokenizer(), taps=(1, 3))
    assert first_loss(target, 0) == pytest.approx(math.log(target.vocab_size), rel=0.1)


def test_a_multiplier_shrinks_the_gain_and_a_quiet_head_leaves_it_one() -> None:
    masked = torch.randn(64, generator=torch.Generator().manual_seed(0))
    # A direction in common, which is what a state that is no token's can be large along.
    weight = masked + torch.randn(1000, 64, generator=torch.Generator().manual_seed(1))
    plain, doubled = (final_gain(Head(weight, m), masked).abs() for m in (1.0, 2.0))
    torch.testing.assert_close(doubled, plain / 2)
    assert torch.equal(final_gain(Head(weight / 100), masked).abs(), torch.ones(64))
    state = final_gain(Head(weight), masked) * masked
    rms, before = (float((weight @ s).square().mean().sqrt()) for s in (state, plain * masked))
    assert rms < 0.2 * before


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Inputs, Target, PackTensors, Any]:
    config = load_config(demo_config(), ["loss.soft_labels=0", "features.noise=0"])
    choices = Choices()
    inputs = prepare(config, choices)
    target = open_target(config, choices)
    worker = feature_worker(config, inputs, target, None, target.device, choices)
    pack = epoch_packs(config, inputs.samples, 0).packs[0]
    drafter = first_drafter(
        config, replace(inputs, samples=inputs.samples[:4]), target, worker, choices
    )
    worker.run(inputs.samples, pack)
    arrays = build_pack(inputs.samples, pack, config.token_budget, config.block_size)
    return config, inputs, target, PackTensors.build(arrays, worker.row), drafter


@pytest.mark.parametrize("whole", [False, True])
def test_the_embedded_target(embedded: Any, whole: bool) -> None:
    config, inputs, target, pack, drafter = embedded
    ids = None if whole else inputs.token_ids
    if whole:
        scale = drafter.feature_scale
        drafter = init_drafter(inputs.shape, target, init="scratch", seed=0, choices=Choices())
        drafter.feature_scale.copy_(scale)
    spec = configured_spec(config, total_steps=1, packs_per_step=1, machines=1)
    kernels = compile_kernels(CompileGate(Choices()), target.ends(CPU), ids, spec)
    step = TrainStep(
        drafter, kernels, spec, working_dtype=torch.float32, width=pack.features.shape[1]
    )
    loss = step.loss(pack, step.sample(pack)).loss.item()
    assert loss == pytest.approx(math.log(target.vocab_size if ids is None else len(ids)), rel=0.1)
