"""The dense mask is the rule; the BlockMask is the dense mask, tile by tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftline.model.drafter.anchors import Anchors
from draftline.model.drafter.masks import TILE, block_mask, dense_mask


def build_anchors(
    random: np.random.Generator, context: int, count: int, conversations: int, kept: int
) -> Anchors:
    """`kept` sorted anchors in a context cut into conversations, dropped slots last at 0."""
    cuts = np.sort(random.choice(np.arange(1, context), conversations - 1, replace=False))
    starts = np.concatenate([[0], cuts])
    position = np.sort(random.choice(context, kept, replace=False))
    position = np.concatenate([position, np.zeros(count - kept, np.int64)])
    start = starts[np.searchsorted(starts, position, "right") - 1]
    return Anchors(torch.from_numpy(position), torch.from_numpy(start), torch.arange(count) < kept)


def rule(anchors: Anchors, context: int, block: int, window: int | None) -> Tensor:
    """What the module's docstring says, one pair at a time."""
    count = len(anchors.position)
    grid = torch.zeros(count * block, context + count * block, dtype=torch.bool)
    for n in range(count):
        if not anchors.keep[n]:
            continue
        anchor, start = int(anchors.position[n]), int(anchors.start[n])
        for j in range(block):
            for p in range(start, anchor):
                if window is None or p > anchor + j - window:
                    grid[n * block + j, p] = True
            for i in range(block):
                if window is None or (i <= j and j - i < window):
                    grid[n * block + j, context + n * block + i] = True
    return grid


@pytest.mark.parametrize("window", [None, 1, 3, 5, 200])
def test_dense_mask_is_the_rule(window: int | None) -> None:
    random = np.random.default_rng(0)
    for block, context, count, kept in [(4, 30, 5, 5), (7, 41, 6, 4), (2, 9, 3, 0)]:
        anchors = build_anchors(random, context, count, 3, kept)
        seen = dense_mask(anchors, context, block, window)
        assert seen.shape == (1, 1, count * block, context + count * block)
        assert torch.equal(seen[0, 0], rule(anchors, context, block, window))


def test_an_anchor_sees_neither_itself_nor_what_follows_in_the_context() -> None:
    anchors = Anchors(torch.tensor([5]), torch.tensor([2]), torch.tensor([True]))
    seen = dense_mask(anchors, 10, 3)[0, 0]
    assert seen.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]] * 3
    sliding = dense_mask(anchors, 10, 3, window=2)[0, 0]
    assert sliding.int().tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def tiles_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Partial and full tiles as grids, read from the index buffers."""
    grids = []
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert counts is not None
        assert indices is not None
        assert counts.dtype == indices.dtype == torch.int32
        grid = torch.zeros(indices.shape[-2:], dtype=torch.bool)
        for row, number in enumerate(counts[0, 0].tolist()):
            listed = indices[0, 0, row, :number].long()
            assert len(set(listed.tolist())) == number
            grid[row, listed] = True
        grids.append(grid)
    return grids[0], grids[1]


def tile_grid(seen: Tensor, value: bool) -> Tensor:
    """`seen` padded with `value` to whole tiles, `[row_tiles, TILE, key_tiles, TILE]`."""
    rows, keys = (-(-n // TILE) * TILE for n in seen.shape)
    padded = torch.full((rows, keys), value)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    return padded.view(rows // TILE, TILE, keys // TILE, TILE)


def check(anchors: Anchors, context: int, block: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Asserts that the tiles rebuild the dense mask; returns partial and full tiles."""
    dense = dense_mask(anchors, context, block, window)[0, 0]
    mask = block_mask(anchors, context, block, window)
    assert mask.seq_lengths == tuple(dense.shape)
    assert mask.BLOCK_SIZE == (TILE, TILE)
    partial, full = tiles_of(mask)
    assert not (partial & full).any()
    rows, keys = dense.shape
    zero = torch.zeros((), dtype=torch.int64)
    evaluated = mask.mask_mod(zero, zero, torch.arange(rows)[:, None], torch.arange(keys)[None, :])
    spread = partial.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows, :keys]
    whole = full.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows, :keys]
    assert torch.equal((spread & evaluated) | whole, dense)
    # Every existing row of a full tile sees all of it, and it has no keys past the end.
    assert bool(tile_grid(dense, True).all(3).all(1)[full].all())
    assert not full[:, (context // TILE) :].any()
    # The backward pass goes through the transposed lists.
    assert mask.q_num_blocks is not None
    assert mask.q_num_blocks[0, 0].tolist() == partial.sum(0).tolist()
    assert mask.full_q_num_blocks is not None
    assert mask.full_q_num_blocks[0, 0].tolist() == full.sum(0).tolist()
    return partial, full


@pytest.mark.parametrize("block", [4, 7, 8, 10, 16, 32])
def test_tiles_rebuild_the_dense_mask(block: int) -> None:
    random = np.random.default_rng(block)
    some_full = 0
    for turn in range(12):
        context = int(random.integers(40, 1200))
        count = int(random.integers(1, 40))
        kept = int(random.integers(0, min(count, context) + 1))
        conversations = int(random.integers(1, min(12, context)))
        if turn % 3 == 0:  # all kept and few conversations: here tiles are full
            context, count = context + 600, count + 256 // block
            kept, conversations = count, 1 + turn // 6
        anchors = build_anchors(random, context, count, conversations, kept)
        for window in (None, int(random.integers(1, 60)), int(random.integers(100, 700))):
            some_full += int(check(anchors, context, block, window)[1].sum())
    assert some_full > 0, "these shapes show nothing about full tiles"


@pytest.mark.parametrize("context", [127, 128, 129, 256, 500])
@pytest.mark.parametrize("window", [None, 1, 128, 129, 256])
def test_tiles_at_their_borders(context: int, window: int | None) -> None:
    near = [p for t in (0, TILE, 2 * TILE, 3 * TILE) for p in (t - 1, t, t + 1)]
    position = torch.tensor([p for p in near if 0 <= p < context])
    for start in (0, 1, 127):
        kept = position >= start
        anchors = Anchors(
            torch.where(kept, position, 0),
            torch.where(kept, start, 0),
            kept,
        )
        check(anchors, context, 16, window)


@pytest.mark.parametrize("block", [4, 7, 16])
def test_no_tile_is_visited_in_vain(block: int) -> None:
    random = np.random.default_rng(block)
    for _ in range(10):
        context = int(random.integers(200, 900))
        count = int(random.integers(10, 80))
        anchors = build_anchors(random, context, count, int(random.integers(1, 9)), count)
        partial, full = check(anchors, context, block, None)
        dense = dense_mask(anchors, context, block)[0, 0]
        touched = tile_grid(dense, False).any(3).any(1)
        assert torch.equal(partial | full, touched)
        # And a context tile that could be full is: the kernel need not evaluate the rule in it.
        whole = tile_grid(dense, True).all(3).all(1)
        whole[:, context // TILE :] = False
        assert torch.equal(full, whole)


@pytest.mark.parametrize("window", [None, 1, 2, 4, 129])
@pytest.mark.parametrize("block", [4, 7, 16])
def test_anchors_at_position_zero_and_slots_that_hold_none(block: int, window: int | None) -> None:
    """Slots without an anchor point at position 0, where a real anchor may stand too."""
    keeps = [
        [True, False, False],  # a kept one at 0, and empty slots that look the same
        [True, True, True],
        [False, False, False],
        [True] + 40 * [False],  # whole tiles of empty slots
        40 * [True] + [False],
    ]
    for kept in keeps:
        keep = torch.tensor(kept)
        order = torch.arange(len(kept))
        for start in (0, 3):
            # In one conversation from 0; or the second begins at 3, and its first token is an anchor.
            position = torch.where(keep, torch.where(order == 0, 0, 3 * order), 0)
            begin = torch.where(position >= start, start, 0)
            anchors = Anchors(position, torch.where(keep, begin, 0), keep)
            context = 3 * len(kept) + 2
            seen = dense_mask(anchors, context, block, window)[0, 0]
            assert torch.equal(seen, rule(anchors, context, block, window))
            assert not seen.view(len(kept), block, -1)[~keep].any()
            if bool(keep[0]):
                assert not seen[:block, :context].any(), "there is nothing before position 0"
                assert bool(seen[:block, context : context + block].any(1).all())
            partial, full = check(anchors, context, block, window)
            # Tiles of nothing but empty slots cost nothing.
            busy = tile_grid(seen, False).any(3).any(1).any(1)
            assert torch.equal((partial | full).any(1), busy)


@pytest.mark.parametrize("window", [None, 3, 200])
def test_anchors_that_are_not_kept_may_stand_anywhere(window: int | None) -> None:
    """The mask asks `keep`, not the position that an empty slot happens to have."""
    random = np.random.default_rng(5)
    for turn in range(6):
        context, count = 300, 30
        anchors = build_anchors(random, context, count, 4, count)
        keep = torch.from_numpy(random.random(count) < (0.5 if turn else 0.02))
        anchors = Anchors(anchors.position, anchors.start, keep)
        seen = dense_mask(anchors, context, 8, window)[0, 0]
        assert torch.equal(seen, rule(anchors, context, 8, window))
        check(anchors, context, 8, window)
