"""Acceptance: the greedy prefix, and sampling whose output is the target's distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftline.decode.tree import Tree
from draftline.decode.verify import accept_greedy, accept_sampled, draw, probabilities
from tests.support.tiny import chi_square_p

ROWS = 40_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chain(nodes: int) -> Tree:
    return Tree.chain(nodes, torch.device("cpu"))


@pytest.mark.parametrize("slots", [1, 4])
def test_greedy_takes_the_longest_agreeing_prefix(slots: int) -> None:
    random = generator()
    logits = torch.randn(300, slots + 1, 5, generator=random)
    drafts = torch.where(
        torch.rand(300, slots, generator=random) < 0.7,
        logits[:, :-1].argmax(-1),
        torch.randint(5, (300, slots), generator=random),
    )
    verdict = accept_greedy(chain(slots + 1), drafts, logits)
    for row in range(300):
        accepted = 0
        while accepted < slots and drafts[row, accepted] == logits[row, accepted].argmax():
            accepted += 1
        assert int(verdict.accepted[row]) == accepted
        assert int(verdict.bonus[row]) == int(logits[row, accepted].argmax())
    assert set(verdict.accepted.tolist()) == set(range(slots + 1))


def distributions(kind: str) -> tuple[Tensor, Tensor]:
    """The target's p over 3 slots and a bonus, each conditioned on nothing, and the drafter's q."""
    random = generator(4)
    p = torch.softmax(1.5 * torch.randn(4, 5, generator=random), -1)
    q = torch.softmax(1.5 * torch.randn(3, 5, generator=random), -1)
    if kind == "equal":
        q = p[:3].clone()
    elif kind == "disjoint":
        p = torch.tensor([0.3, 0.7, 0, 0, 0]).expand(4, 5)
        q = torch.tensor([0, 0, 0.2, 0.3, 0.5]).expand(3, 5)
    elif kind == "sure drafter":
        q = torch.eye(5)[[1, 3, 0]]
    elif kind == "sure target":
        p = torch.eye(5)[[1, 3, 0, 2]]
    elif kind == "narrow drafter":
        q = torch.where(torch.arange(5) < 2, q, 0)
        q = q / q.sum(-1, keepdim=True)
    elif kind == "close":
        q = 0.9 * p[:3] + 0.02
    return p.contiguous(), q.contiguous()


KINDS = ["different", "equal", "disjoint", "sure drafter", "sure target", "narrow drafter", "close"]


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_is_the_targets_distribution(kind: str) -> None:
    p, q = distributions(kind)
    random = generator(1)
    draft_probs, target_probs = q.expand(ROWS, 3, 5), p.expand(ROWS, 4, 5)
    drafts = draw(draft_probs, random)
    verdict = accept_sampled(chain(4), drafts, draft_probs, target_probs, random)
    accepted = verdict.accepted
    # The tokens that come out: accepted drafts, then the bonus.
    output = torch.cat([drafts, torch.zeros(ROWS, 1, dtype=torch.long)], 1)
    output[torch.arange(ROWS), accepted] = verdict.bonus
    rate = torch.minimum(p[:3], q).sum(-1)
    reached = torch.cumprod(torch.cat([torch.ones(1), rate]), 0)
    for slot in range(4):
        here = output[accepted >= slot, slot]
        # Given that slot is reached, its token is distributed as p[slot] ...
        assert chi_square_p(torch.bincount(here, minlength=5), len(here) * p[slot]) > 1e-3
        # ... and it is reached as often as sum(min(p, q)) of the slots before allow.
        share = len(here) / ROWS
        spread = (reached[slot] * (1 - reached[slot]) / ROWS).sqrt()
        assert abs(share - float(reached[slot])) <= 4 * float(spread) + 1e-6
    if kind == "equal":
        assert bool((accepted == 3).all())
    if kind == "disjoint":
        assert not accepted.any()


@pytest.mark.parametrize("kind", ["different", "narrow drafter"])
def test_slots_are_jointly_distributed_as_the_target_s(kind: str) -> None:
    """Acceptance must not leak information from one slot to the next."""
    p, q = distributions(kind)
    random = generator(2)
    out = torch.full((ROWS, 2), -1)
    # Two rounds: whoever did not get two tokens from the first drafts again for the second one.
    drafts = draw(q[:1].expand(ROWS, 1, 5), random)
    first = accept_sampled(
        chain(2), drafts, q[:1].expand(ROWS, 1, 5), p[:2].expand(ROWS, 2, 5), random
    )
    both = first.accepted == 1
    out[:, 0] = torch.where(both, drafts[:, 0], first.bonus)
    out[both, 1] = first.bonus[both]
    count = int((~both).sum())
    again = draw(q[1:2].expand(count, 1, 5), random)
    second = accept_sampled(
        chain(2), again, q[1:2].expand(count, 1, 5), p[1:3].expand(count, 2, 5), random
    )
    out[~both, 1] = torch.where(second.accepted == 1, again[:, 0], second.bonus)
    cells = torch.bincount(out[:, 0] * 5 + out[:, 1], minlength=25)
    assert chi_square_p(cells, ROWS * p[0][:, None] * p[1]) > 1e-3


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Rounding can leave p a little below q everywhere; here it is a tenth, so that it matters."""
    q = distributions("different")[1][:1]
    p = torch.cat([0.9 * q, q])
    random = generator(3)
    drafts = draw(q.expand(ROWS, 1, 5), random)
    verdict = accept_sampled(chain(2), drafts, q.expand(ROWS, 1, 5), p.expand(ROWS, 2, 5), random)
    rejected = verdict.accepted == 0
    count = int(rejected.sum())
    assert 0.08 * ROWS < count < 0.12 * ROWS
    seen = torch.bincount(verdict.bonus[rejected], minlength=5)
    assert chi_square_p(seen, count * q[0]) > 1e-3


def test_draw_never_takes_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 1e-12, 0.0, 3.0, 0.0, 1.0])
    drawn = draw(weights.expand(ROWS, 6), generator())
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    expected = torch.tensor([0, 0, 0, 0.75, 0, 0.25]) * ROWS
    counts[3] += counts[1]
    counts[1] = 0
    assert chi_square_p(counts, expected) > 1e-3
    assert torch.equal(drawn, draw(weights.expand(ROWS, 6), generator()))
    assert draw(torch.eye(4), generator()).tolist() == [0, 1, 2, 3]
    assert draw(torch.zeros(2, 0, 4), generator()).shape == (2, 0)


def truncated(p: list[float], top_p: float, top_k: int) -> list[float]:
    """By sorting in plain Python: the k likeliest, then the fewest that reach the share."""
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    whole = sum(p[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        if sum(p[j] for j in kept) / whole >= top_p:
            break
        kept.append(i)
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 3, 7, 12, 50])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.9, 0.999, 1.0])
def test_truncation_keeps_the_likeliest_and_their_ratios(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = 2 * torch.randn(6, 3, 12, generator=generator(7))
    seen = probabilities(logits, temperature, top_p, top_k)
    whole = torch.softmax(logits.double() / temperature, -1)
    wanted = [
        [truncated(p, 1.0 if top_p is None else top_p, top_k or 12) for p in row]
        for row in whole.tolist()
    ]
    torch.testing.assert_close(seen.double(), torch.tensor(wanted, dtype=torch.float64))
    if top_p == 0.01 or top_k == 1:
        assert torch.equal(seen.argmax(-1), logits.argmax(-1))
        assert bool((seen.max(-1).values == 1).all())


def test_truncation_does_not_choose_among_equals() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert (probabilities(logits, 1.0, None, 2) > 0).tolist() == [True, True, True, True, False]
    assert (probabilities(logits, 1.0, 0.5, 2) > 0).tolist() == [True, True, True, True, False]
    assert (probabilities(logits, 1.0, 0.3, None) > 0).tolist() == [True] + [False] * 4


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, None), (None, 2), (0.8, 3)])
@pytest.mark.parametrize("draft_truncated", [False, True])
def test_a_truncated_target_is_sampled_losslessly(
    top_p: float | None, top_k: int | None, draft_truncated: bool
) -> None:
    """Whether or not the drafter proposes tokens that the target no longer gives."""
    random = generator(9)
    target = 1.5 * torch.randn(3, 6, generator=random)
    drafter = 1.5 * torch.randn(2, 6, generator=random)
    p = probabilities(target, 0.8, top_p, top_k)
    q = probabilities(drafter, 0.8, *((top_p, top_k) if draft_truncated else ()))
    assert bool((p == 0).any(-1).all())
    drafts = draw(q.expand(ROWS, 2, 6), random)
    verdict = accept_sampled(chain(3), drafts, q.expand(ROWS, 2, 6), p.expand(ROWS, 3, 6), random)
    output = torch.cat([drafts, torch.zeros(ROWS, 1, dtype=torch.long)], 1)
    output[torch.arange(ROWS), verdict.accepted] = verdict.bonus
    for slot in range(3):
        here = output[verdict.accepted >= slot, slot]
        assert chi_square_p(torch.bincount(here, minlength=6), len(here) * p[slot]) > 1e-3
