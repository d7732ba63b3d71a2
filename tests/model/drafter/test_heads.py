"""The head of a drafter: the parallel one, and another in its place that nothing else knows of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.decode.propose import DraftModel
from draftline.decode.session import DecodeSession
from draftline.model.drafter.heads import DraftVocabulary, ParallelHead
from draftline.model.head import Head, TargetEnds
from tests.support.heads import CausalHead
from tests.support.tiny import build_drafter, build_samples, build_shape, build_target, teach

PROMPTS = [s.input_ids.tolist() for s in build_samples((5, 17, 1, 9, 30), seed=1)]


def vocabulary(token_ids: Tensor | None) -> DraftVocabulary:
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return DraftVocabulary.of(TargetEnds(rows, 1.0, Head(rows)), token_ids)


def test_a_draft_vocabulary_maps_rows_and_tokens_onto_each_other() -> None:
    ids = torch.tensor([2, 3, 7, 11])
    part = vocabulary(ids)
    assert part.row.tolist() == [-1, -1, 0, 1, -1, -1, -1, 2, -1, -1, -1, 3]
    assert torch.equal(part.tokens(part.row[ids]), ids)
    assert part.ends.vocab_size == 4
    probs = torch.rand(2, 3, 4)
    spread = part.distribution(probs)
    assert torch.equal(spread[..., ids], probs)
    assert spread.sum() == pytest.approx(float(probs.sum()))
    whole = vocabulary(None)
    assert whole.row.tolist() == list(range(12))
    assert whole.distribution(probs) is probs


@pytest.mark.parametrize("token_ids", [None, torch.tensor([2, 3, 7, 11])])
def test_the_parallel_head_proposes_each_slot_from_its_own_state(token_ids: Tensor | None) -> None:
    known = vocabulary(token_ids)
    states = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    probs_of = torch.softmax(known.ends.head.logits(states), -1)
    for drawn in (None, probs_of):
        tokens, probs = ParallelHead().propose(
            states,
            torch.zeros(3, 1, dtype=torch.long),
            known,
            lambda logits, drawn=drawn: (logits.argmax(-1), drawn),
        )
        assert torch.equal(tokens, known.tokens(probs_of.argmax(-1)))
        if drawn is None:
            assert probs is None
        else:
            assert torch.equal(probs, known.distribution(probs_of))


@pytest.mark.parametrize("token_ids", [None, torch.arange(8, 64)])
def test_another_head_is_trained_decoded_and_saved_with_the_drafter(
    token_ids: Tensor | None,
) -> None:
    target = build_target(stop=())
    shape = build_shape(target, block_size=6)
    drafters: list[Any] = [build_drafter(shape), build_drafter(shape)]
    drafters[1].head = CausalHead(shape.hidden_size)
    torch.nn.init.zeros_(drafters[1].head.previous.weight)
    assert set(drafters[1].state_dict()) - set(drafters[0].state_dict()) == {"head.previous.weight"}
    plain = DecodeSession(target, None, rows=5, slots=100).decode(PROMPTS, 40).tokens
    rounds = []
    for drafter in drafters:
        teach(target, drafter, PROMPTS, steps=50)
        for temperature in (0.0, 1.0):
            session = DecodeSession(
                target,
                DraftModel(drafter, token_ids),
                rows=5,
                slots=100,
                temperature=temperature,
            )
            decoded = session.decode(PROMPTS, 40)
            assert decoded.rounds < 39 * 5
            if temperature == 0:
                assert decoded.tokens == plain
                rounds.append(decoded.rounds)
    assert drafters[1].head.previous.weight.abs().max() > 0.01
    assert rounds[1] < rounds[0], "knowing the token before a slot helps"
