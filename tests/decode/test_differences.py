"""A near-tie is told from a fault by the margin at the first token that differs."""

from __future__ import annotations

import math

import pytest
import torch

from draftline.decode.differences import Difference, first_differences
from draftline.decode.evaluate import PlainOutputs, evaluate, score_details
from draftline.decode.propose import DraftModel
from draftline.decode.session import DecodeSession
from draftline.model.target.target import Target
from tests.support.tiny import build_drafter, build_samples, build_shape, build_target

PROMPTS = [s.input_ids.tolist() for s in build_samples((5, 11, 3), seed=2)]


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target(stop=())


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    with DecodeSession(target, None, rows=3, slots=60) as decoder:
        return decoder.decode(PROMPTS, 10).tokens


def test_equal_outputs_have_no_difference(target: Target, plain: list[list[int]]) -> None:
    assert first_differences(target, PROMPTS, plain, plain) == []


def test_the_margin_is_that_of_the_two_tokens_behind_the_common_text(
    target: Target, plain: list[list[int]]
) -> None:
    changed = [list(tokens) for tokens in plain]
    changed[1][4] = (changed[1][4] + 1) % target.vocab_size
    (found,) = first_differences(target, PROMPTS, changed, plain)
    ids = torch.tensor([[*PROMPTS[1], *plain[1][:4]]])
    _, hidden = target.features(ids, last_hidden=True)
    assert hidden is not None
    logits = target.head.logits(hidden[0, -1])
    wanted = float(logits[plain[1][4]] - logits[changed[1][4]])
    assert (found.prompt, found.position) == (1, 4)
    assert (found.plain, found.speculative) == (plain[1][4], changed[1][4])
    assert found.margin == pytest.approx(wanted, abs=1e-5)
    assert wanted > 0, "plain decoding takes the largest logit"
    assert not found.near_tie, "in float32 hardly anything is a near-tie"
    assert "fault" in found.describe()


def test_an_output_that_only_ends_earlier_is_a_fault(
    target: Target, plain: list[list[int]]
) -> None:
    (found,) = first_differences(target, PROMPTS, [plain[0][:6], *plain[1:]], plain)
    assert (found.position, found.margin, found.plain) == (6, None, None)
    assert not found.near_tie
    assert "ends there" in found.describe()


@pytest.mark.parametrize(("margin", "tie"), [(0.0, True), (-0.3, True), (0.31, False)])
def test_rounding_decides_what_a_near_tie_is(margin: float, tie: bool) -> None:
    difference = Difference(0, 3, 7, 9, margin, rounding=0.3)
    assert difference.near_tie is tie
    assert ("NO near-tie" in difference.describe()) is not tie


def test_evaluation_shows_each_difference(
    target: Target, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DraftModel(build_drafter(build_shape(target)))
    wrong = [[*tokens[:2], (tokens[2] + 1) % target.vocab_size, *tokens[3:]] for tokens in plain]
    known = PlainOutputs()
    known._known[("set", 0.0, 1)] = (wrong, math.nan)
    (score,) = evaluate(
        target,
        draft,
        {"set": PROMPTS},
        temperatures=[0.0],
        max_new_tokens=10,
        batch_size=3,
        seed=0,
        plain=known,
    )
    assert (score.identical, score.compared) == (0, 3)
    assert [d.position for d in score.differences] == [2, 2, 2]
    assert score_details(score).count("differs from decoding token by token in prompt") == 3


def test_evaluation_says_what_identical_compares_with(
    target: Target, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in bfloat16: token by token another output, with equal kernels the same."""
    monkeypatch.setattr("draftline.decode.evaluate._shared_width", lambda *_: 4)
    wrong = [[*plain[0][:2], (plain[0][2] + 1) % target.vocab_size, *plain[0][3:]], *plain[1:]]
    known = PlainOutputs()
    known._known[("set", 0.0, 1)] = (wrong, 123.0)
    (score,) = evaluate(
        target,
        DraftModel(build_drafter(build_shape(target))),
        {"set": PROMPTS},
        temperatures=[0.0],
        max_new_tokens=10,
        batch_size=3,
        seed=0,
        plain=known,
    )
    assert (score.identical, score.compared, score.reference_width) == (3, 3, 4)
    assert score.plain_tokens_per_s == 123.0, "speed is that of single tokens"
    assert "plain decoding of 4 tokens per row" in score_details(score)
    assert "token by token 2 of 3 are" in score_details(score)


@pytest.mark.parametrize("width", [2, 7])
@pytest.mark.parametrize("stop", [(), (3, 5, 8)])
def test_wider_target_calls_change_nothing(width: int, stop: tuple[int, ...]) -> None:
    target = build_target(stop=stop)
    outputs = []
    for wide in (1, width):
        with DecodeSession(target, None, rows=3, slots=40, width=wide) as decoder:
            decoded = decoder.decode(PROMPTS, 20)
            outputs.append((decoded.tokens, decoded.committed_counts, decoded.rounds))
    assert outputs[0] == outputs[1]
