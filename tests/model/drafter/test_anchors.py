"""Anchors are fair, sorted and reproducible; blocks ask for exactly what the target generated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.data.packing import Pack, build_pack
from draftline.data.store import Sample
from draftline.model.drafter.anchors import Anchors, Blocks, build_blocks, sample_anchors


def layout(lengths: list[int], budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """conversation, start and position of a pack, padding as build_pack writes it."""
    samples = [Sample("", np.zeros(n, np.int32), np.ones(n, np.bool_), False) for n in lengths]
    arrays = build_pack(samples, Pack(tuple(range(len(lengths))), sum(lengths)), budget, 2)
    return tuple(torch.from_numpy(a) for a in (arrays.conversation, arrays.start, arrays.position))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(20))
def test_anchors_are_sorted_distinct_candidates_and_as_many_as_fit(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, random.integers(1, 8)).tolist()
    budget = sum(lengths) + int(random.integers(0, 30))
    conversation, start, _ = layout(lengths, budget)
    candidates = torch.from_numpy(random.random(budget) < random.choice([0.1, 0.5, 1.0]))
    candidates &= conversation >= 0
    most = int(random.integers(1, budget + 1))
    anchors = sample_anchors(candidates, conversation, start, most, generator(seed))
    count = min(most, int(candidates.sum()))
    assert anchors.position.shape == anchors.start.shape == anchors.keep.shape == (most,)
    assert anchors.keep.tolist() == [True] * count + [False] * (most - count)
    kept = anchors.position[:count]
    assert bool((kept[1:] > kept[:-1]).all())
    assert bool(candidates[kept].all())
    assert anchors.start[:count].tolist() == start[kept].tolist()
    assert anchors.position[count:].tolist() == [0] * (most - count)


def test_no_candidate_keeps_nothing() -> None:
    conversation, start, _ = layout([4, 4], 10)
    anchors = sample_anchors(torch.zeros(10, dtype=torch.bool), conversation, start, 3, None)
    assert not anchors.keep.any()
    assert anchors.position.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("lengths", "most", "shares"),
    [
        ([10, 1000], 64, [10, 54]),
        ([1000, 10], 64, [54, 10]),
        ([1000, 3, 20, 500], 100, [38, 3, 20, 39]),  # a quota of 38.5 for the two long ones
        ([5, 5, 5], 9, [3, 3, 3]),
        ([1, 1, 1, 1], 2, [1, 1, 0, 0]),
        ([40, 40], 80, [40, 40]),
    ],
)
def test_places_are_shared_max_min_fairly(lengths: list[int], most: int, shares: list[int]) -> None:
    conversation, start, _ = layout(lengths, sum(lengths))
    candidates = torch.ones(sum(lengths), dtype=torch.bool)
    for seed in range(5):
        anchors = sample_anchors(candidates, conversation, start, most, generator(seed))
        counts = torch.bincount(
            conversation[anchors.position[anchors.keep]], minlength=len(lengths)
        )
        assert int(counts.sum()) == min(most, sum(lengths))
        # Whoever has candidates left is at most one place behind anybody else.
        for mine, length in zip(counts.tolist(), lengths, strict=True):
            assert mine == length or mine >= int(counts.max()) - 1
        # The place that cannot be split goes to either of those it could go to.
        assert sorted(counts.tolist()) == sorted(shares)


def test_every_candidate_of_a_conversation_is_equally_likely() -> None:
    lengths, most, draws = [6, 24, 60], 21, 3000
    conversation, start, _ = layout(lengths, 100)
    candidates = (torch.arange(100) % 3 != 0) & (conversation >= 0)
    random = generator(5)
    hits = torch.zeros(100)
    for _ in range(draws):
        anchors = sample_anchors(candidates, conversation, start, most, random)
        hits[anchors.position[anchors.keep]] += 1
    assert int(hits[~candidates].sum()) == 0
    for place in range(3):
        mine = hits[candidates & (conversation == place)]
        share = mine.sum().item() / draws / len(mine)
        # Five standard deviations of a binomial count.
        spread = 5 * (draws * share * (1 - share)) ** 0.5
        assert bool(((mine - draws * share).abs() <= spread + 1e-6).all()), mine
        # The short one gets all, the odd place goes to either of the others.
        assert share == pytest.approx({0: 1.0, 1: 8.5 / 16, 2: 8.5 / 40}[place], rel=0.02)


def test_a_short_conversation_is_as_likely_where_there_are_fewer_places_than_conversations() -> (
    None
):
    conversation, start, _ = layout([2, 100, 2, 100], 204)
    candidates = torch.ones(204, dtype=torch.bool)
    random = generator(1)
    counts = torch.zeros(4)
    for _ in range(1000):
        anchors = sample_anchors(candidates, conversation, start, 2, random)
        counts[conversation[anchors.position]] += 1
    assert bool(((counts - 500).abs() < 5 * 250**0.5).all()), counts


def test_anchors_follow_from_the_generator() -> None:
    conversation, start, _ = layout([50, 60], 128)
    candidates = conversation >= 0

    def positions(random: torch.Generator) -> list[int]:
        return sample_anchors(candidates, conversation, start, 20, random).position.tolist()

    once = generator(3)
    first, second = positions(once), positions(once)
    assert first != second
    again = generator(3)
    assert [positions(again), positions(again)] == [first, second]
    assert positions(generator(4)) != first


def blocks_of(
    positions: list[int], lengths: list[int], loss_mask: list[int], block_size: int
) -> Blocks:
    budget = len(loss_mask)
    _, start, position = layout(lengths, budget)
    anchor = torch.tensor(positions)
    keep = anchor >= 0
    anchor = anchor.clamp_min(0)
    return build_blocks(
        Anchors(anchor, start[anchor].long(), keep),
        torch.arange(100, 100 + budget, dtype=torch.int32),
        torch.tensor(loss_mask, dtype=torch.bool),
        start,
        position,
        block_size,
        mask_token_id=7,
    )


def test_a_block_asks_for_the_tokens_of_its_own_positions() -> None:
    blocks = blocks_of([3, 9], [6, 8], [0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1], 4)
    assert blocks.inputs.tolist() == [[103, 7, 7, 7], [109, 7, 7, 7]]
    assert blocks.labels.tolist() == [[103, 104, 105, 106], [109, 110, 111, 112]]
    assert blocks.index.tolist() == [[3, 4, 5, 6], [9, 10, 11, 12]]
    # Positions count in the document: token 9 is the fourth of the second conversation.
    assert blocks.positions.tolist() == [[3, 4, 5, 6], [3, 4, 5, 6]]
    # Slot 0 is the anchor; the first block's last slot belongs to the next conversation.
    assert blocks.supervised.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]


def test_supervision_is_a_contiguous_prefix() -> None:
    # A user's turn at 5, 6: what follows it cannot be drafted from before it.
    blocks = blocks_of([2, 4], [12], [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], 8)
    assert blocks.supervised.int().tolist() == [[0, 1, 1] + [0] * 5, [0] * 8]


def test_blocks_end_with_the_pack_and_with_the_conversation() -> None:
    at_end = blocks_of([4], [6], [1] * 6, 5)
    assert at_end.supervised.int().tolist() == [[0, 1, 0, 0, 0]]
    assert at_end.index.tolist() == [[4, 5, 5, 5, 5]]
    assert at_end.positions.tolist() == [[4, 5, 6, 7, 8]]
    # Padding never counts as an answer, even where a loss mask says so.
    padded = blocks_of([4], [6], [1] * 10, 5)
    assert padded.supervised.int().tolist() == [[0, 1, 0, 0, 0]]


def test_dropped_anchors_are_never_supervised() -> None:
    blocks = blocks_of([2, -1], [8], [1] * 8, 4)
    assert blocks.supervised.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("seed", range(10))
def test_blocks_agree_with_the_rule_written_as_a_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 20, 4).tolist()
    budget = sum(lengths) + 5
    mask = random.random(budget) < 0.8
    anchors = sorted(random.choice(sum(lengths), 6, replace=False).tolist())
    blocks = blocks_of(anchors, lengths, mask.tolist(), 6)
    conversation, start, _ = (t.tolist() for t in layout(lengths, budget))
    for n, anchor in enumerate(anchors):
        alive = True
        for j in range(6):
            p = anchor + j
            alive = alive and p < budget and conversation[p] == conversation[anchor]
            alive = alive and (j == 0 or bool(mask[p]))
            assert bool(blocks.supervised[n, j]) == (alive and j > 0)
            assert int(blocks.positions[n, j]) == p - start[anchor]
