"""What is measured on held-out answers is what decoding does, and measuring changes nothing."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.packing import Pack, PackArrays, build_pack
from draftline.data.store import Sample
from draftline.decode.propose import DraftModel
from draftline.decode.session import DecodeSession
from draftline.model.drafter.anchors import Anchors
from draftline.model.drafter.losses import LossSpec
from draftline.model.target.target import Target
from draftline.runtime.compile.gate import CompileGate
from draftline.train.step.heldout import HeldOut, HeldOutScore, drafted_positions, walk
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep, compile_kernels
from tests.support.heads import CausalHead
from tests.support.tiny import (
    CPU,
    build_drafter,
    build_samples,
    build_shape,
    build_step,
    build_target,
    pack_tensors,
    step_spec,
    teach,
)

PROMPTS = [s.input_ids.tolist() for s in build_samples((5, 17, 1, 9, 12), seed=1)]
NEW = 40
ANCHORS = 24


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target(stop=(11, 12))


def packed(
    target: Target, samples: list[Sample], block: int, *, soft: bool = False
) -> tuple[PackArrays, PackTensors]:
    budget = sum(len(s.input_ids) for s in samples) + 5
    pack = Pack(tuple(range(len(samples))), budget - 5)
    arrays = build_pack(samples, pack, budget, block)
    return arrays, pack_tensors(target, samples, budget, block, soft=soft)


def measured(heldout: HeldOut) -> HeldOutScore:
    return heldout.measure(contextlib.nullcontext, lambda: None)


def decoded_rounds(decoder: DecodeSession, prompt: list[int]) -> tuple[list[int], list[int]]:
    """The new tokens of one prompt, and what each round of decoding it committed."""
    rounds: list[int] = []
    plain = decoder._decode_round

    def watched(window: int) -> None:
        before = int(decoder._start[0])
        plain(window)
        rounds.append(int(decoder._start[0]) - before)

    decoder._decode_round = watched  # type: ignore[method-assign]
    decoded = decoder.decode([prompt], NEW)
    decoder._decode_round = plain  # type: ignore[method-assign]
    assert decoded.committed == sum(rounds)
    return decoded.tokens[0], [n for n in rounds if n]


@pytest.mark.parametrize(
    ("shape", "token_ids", "causal"),
    [
        ({}, None, False),
        ({"block_size": 6, "sliding_layers": 1, "sliding_window": 8}, None, False),
        ({"block_size": 8, "num_layers": 3}, None, False),
        # Some of what the target says cannot be drafted at all.
        ({"block_size": 6}, torch.arange(8, 64, 2), False),
        ({"block_size": 6}, torch.arange(8, 64, 2), True),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_chain_is_greedy_decoding_round_by_round(
    target: Target, shape: dict[str, Any], token_ids: Tensor | None, causal: bool, seed: int
) -> None:
    made = build_shape(target, **shape)
    drafter: Any = build_drafter(made, seed=seed, std=0.1)
    if causal:
        drafter.head = CausalHead(made.hidden_size)
    # Half taught, so that rounds of every length occur; ends by a stop token and by the limit.
    drafter = teach(target, drafter, PROMPTS[:3], new=NEW, steps=20)
    decoder = DecodeSession(target, DraftModel(drafter, token_ids), rows=1, slots=80)
    samples, rounds = [], []
    for index, prompt in enumerate(PROMPTS):
        tokens, committed = decoded_rounds(decoder, prompt)
        ids = np.array(prompt + tokens, np.int32)
        unended = tokens[-1] not in target.stop_ids
        samples.append(Sample(str(index), ids, np.arange(len(ids)) >= len(prompt), unended))
        rounds += committed
    arrays, tensors = packed(target, samples, made.block_size)
    spec = step_spec(budget=len(arrays.input_ids), max_anchors=ANCHORS)
    heldout = HeldOut(
        build_step(target, drafter, spec, token_ids=token_ids), [(arrays, tensors)], ANCHORS
    )
    score = measured(heldout)
    drafted = drafted_positions(arrays)
    counts = np.zeros(len(drafted), np.int64)
    counts[drafted] = heldout._found.numpy().reshape(-1)[: int(drafted.sum())]
    assert list(walk(counts, drafted)) == rounds
    assert score.accept_length_chain == sum(rounds) / len(rounds)
    assert score.heldout_rounds == len(rounds)
    assert len(set(rounds)) >= 3, "rounds of one length would prove little"


def by_hand(step: TrainStep, arrays: PackArrays, pack: PackTensors) -> tuple[float, float]:
    """Uniform accept length and loss, block by block through the training loss."""
    accepted = blocks = 0
    loss = weight = 0.0
    for position in np.flatnonzero(arrays.anchor_mask).tolist():
        at = torch.tensor([position])
        result = step.loss(pack, Anchors(at, pack.start[at].long(), torch.tensor([True])))
        accepted += int(result.accepted.sum())
        blocks += int(result.blocks)
        share = sum(float(np.exp(-j / 3.0)) for j in range(int(result.slot_total.sum())))
        loss += result.loss.item() * share
        weight += share
    return 1 + accepted / blocks, loss / weight


@pytest.mark.parametrize("soft", [0.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [16, 64, 1000])
def test_the_uniform_mean_and_the_loss_are_those_of_training(
    target: Target, soft: float, chunk_rows: int
) -> None:
    samples = build_samples((26, 20, 13))
    shape = build_shape(target)
    drafter = teach(target, build_drafter(shape, std=0.1), PROMPTS[:2], steps=20)
    arrays, tensors = packed(target, samples, shape.block_size, soft=soft > 0)
    loss = LossSpec("decay", 3.0, 0.5, soft, chunk_rows)
    spec = step_spec(budget=len(arrays.input_ids), max_anchors=7, loss=loss)
    step = build_step(target, drafter, spec)
    score = measured(HeldOut(step, [(arrays, tensors)], 7))
    accept, mean = by_hand(step, arrays, tensors)
    assert score.accept_length_heldout == pytest.approx(accept)
    assert score.loss_heldout == pytest.approx(mean, rel=1e-4)
    assert score.heldout_positions == int(arrays.anchor_mask.sum())


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_changes_nothing_and_takes_the_average(
    ema: float | None, dtype: torch.dtype
) -> None:
    target = build_target(dtype=dtype)
    samples = build_samples((26, 20, 13))
    shape = build_shape(target)
    arrays, tensors = packed(target, samples, shape.block_size)
    spec = step_spec(budget=len(arrays.input_ids), max_anchors=9, noise=0.3, ema=ema, gather=True)
    steps = [build_step(target, build_drafter(shape, std=0.1), spec) for _ in range(2)]
    step, twin = steps
    heldout = HeldOut(step, [(arrays, tensors)], 9)
    for number in range(6):
        for each in steps:
            each(tensors, number)
        before = {**step.optimizer.buffers(), "working": step.optimizer.working}
        before = {name: tensor.clone() for name, tensor in before.items()}
        drawn = step._generator.get_state()
        score = measured(heldout)
        assert measured(heldout) == replace(score, heldout_s=pytest.approx(0, abs=60))
        after = {**step.optimizer.buffers(), "working": step.optimizer.working}
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert torch.equal(step._generator.get_state(), drawn)
        assert torch.equal(step.optimizer.master, twin.optimizer.master)
    # What is exported is what was measured.
    plain = replace(spec, optimizer=replace(spec.optimizer, ema=None))
    shown = build_step(target, build_drafter(shape), plain)
    flat = step.optimizer.master if ema is None else step.optimizer.buffers()["average"]
    shown.optimizer.working.copy_(flat)
    alone = measured(HeldOut(shown, [(arrays, tensors)], 9))
    assert alone.loss_heldout == score.loss_heldout


def test_a_large_average_changes_places_in_stretches(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.train.step.optim._STRETCH", 1000)
    spec = step_spec(budget=64, max_anchors=8, ema=0.9)
    step = build_step(target, build_drafter(build_shape(target)), spec)
    optimizer = step.optimizer
    assert optimizer.average is not None
    assert len(optimizer.master) % 1000, "the last stretch is shorter"
    optimizer.average.copy_(torch.arange(len(optimizer.average)))
    before = optimizer.master.clone()
    with optimizer.averaged():
        assert torch.equal(optimizer.working, torch.arange(len(before)).float())
    assert torch.equal(optimizer.master, before)


def test_a_measurement_compiles_nothing_of_its_own(target: Target) -> None:
    shape = build_shape(target)
    samples = build_samples((26, 20, 13))
    arrays, tensors = packed(target, samples, shape.block_size)
    spec = step_spec(budget=len(arrays.input_ids), max_anchors=9, noise=0.1)
    with CompileGate(Choices(), backend="eager", device_types=("cpu",)) as gate:
        kernels = compile_kernels(gate, target.ends(CPU), None, spec)
        step = build_step(target, build_drafter(shape, std=0.1), spec, kernels=kernels)
        step.compile()
        compiled = gate.compiles
        heldout = HeldOut(step, [(arrays, tensors)], 9)
        heldout.compile()
        assert gate.compiles == compiled
        gate.seal()
        step(tensors, 0)
        measured(heldout)
        step(tensors, 1)
        gate.check()


def test_answers_are_walked_to_their_last_token() -> None:
    """Two answers of one conversation and one of the next, which begins where the last one ends."""
    first = Sample("a", np.arange(12, dtype=np.int32), np.arange(12) % 6 >= 2, False)
    second = Sample("b", np.arange(4, dtype=np.int32), np.ones(4, np.bool_), False)
    arrays = build_pack([first, second], Pack((0, 1), 16), 20, 4)
    drafted = drafted_positions(arrays)
    assert np.flatnonzero(drafted).tolist() == [2, 3, 4, 8, 9, 10, 12, 13, 14]
    nothing = np.zeros(20, np.int64)
    assert list(walk(nothing, drafted)) == [1] * 9
    accepted = nothing.copy()
    accepted[[2, 8, 9, 12]] = [3, 1, 3, 2]
    # 2 + 3 + 1 would pass the end; 8 + 1 + 1 lands on 10; 12 + 2 + 1 on the last token.
    assert list(walk(accepted, drafted)) == [3, 2, 1, 3]


def test_uniform_counting_lies_above_decoding() -> None:
    """Long accepted runs are many positions and one round: the reason why the means differ."""
    accepted = np.array([3, 2, 1, 0, 0, 0, 3, 2, 1, 0], np.int64)
    drafted = np.ones(11, np.bool_)
    drafted[10] = False
    rounds = list(walk(np.append(accepted, 0), drafted))
    assert rounds == [4, 1, 1, 4]
    skewed = np.array([7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0], np.int64)
    drafted = np.append(np.ones(12, np.bool_), False)
    rounds = list(walk(np.append(skewed, 0), drafted))
    assert sum(rounds) / len(rounds) < 1 + skewed.mean()
