"""Which keys a block's rows see, as a dense grid (the reference) and as a BlockMask (the fast path).

Rows are block slots, `anchors * block_size`; keys are the S context tokens followed by the same rows.
Row (n, j), slot j of block n with anchor a and conversation start s, sees
  * context key p iff s <= p < a: the anchor's own feature does not exist yet when it drafts;
  * block key (m, i) iff m = n;
  * in sliding layers of window W also p > a + j - W, and i <= j with j - i < W: causal.
Rows of anchors that are not kept see nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from draftline.model.drafter.anchors import Anchors

TILE = 128


def dense_mask(
    anchors: Anchors, context: int, block_size: int, window: int | None = None
) -> Tensor:
    """The rule evaluated on the whole grid: bool `[1, 1, rows, context + rows]`."""
    rows = anchors.position.shape[0] * block_size
    device = anchors.position.device
    row = torch.arange(rows, device=device)[:, None]
    key = torch.arange(context + rows, device=device)[None, :]
    return _rule(anchors, context, block_size, window)(row, key)[None, None]


def block_mask(
    anchors: Anchors, context: int, block_size: int, window: int | None = None
) -> BlockMask:
    """The same mask for flex_attention, from tile arithmetic on anchor positions.

    The rule is never evaluated on the rows x keys grid: a tile of 128 rows holds a few anchors, and
    each anchor sees one interval of the context, so whether a 128 x 128 tile is empty, partial or
    full follows from comparing interval ends with tile ends. Costs `anchors * context / 128`
    comparisons.
    """
    rows = anchors.position.shape[0] * block_size
    partial, full = _tiles(anchors, context, block_size, window)
    partial_count, partial_index = _ordered(partial)
    full_count, full_index = _ordered(full)
    rule = _rule(anchors, context, block_size, window)

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return rule(row, key)

    return BlockMask.from_kv_blocks(
        partial_count,
        partial_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(rows, context + rows),
    )


def draft_masks(
    start: Tensor, positions: Tensor, slots: Tensor, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Boolean masks `[rows, 1, block, slots]` of full and of sliding layers while decoding.

    `slots [slots]` are the cache slots looked at. Context slots lie before the anchor
    `start [rows]`; the block itself lies at `positions [rows, block]` and is bidirectional in full
    layers, causal in sliding ones. Without a window there is no second mask.
    """
    query = positions[:, None, :, None]
    key = slots[None, None, None, :]
    end = start[:, None, None, None] + positions.shape[1]
    full = (key < end).expand(-1, 1, positions.shape[1], -1)
    if window is None:
        return full, None
    return full, (key <= query) & (query - key < window)


def _rule(
    anchors: Anchors, context: int, block_size: int, window: int | None
) -> Callable[[Tensor, Tensor], Tensor]:
    # Every anchor sees an interval of the context and one of the blocks, so a row gathers two ends and
    # a key costs comparisons. The end of an anchor that is not kept lies before every key.
    start = anchors.start
    end = torch.where(anchors.keep, anchors.position, -1)

    def rule(row: Tensor, key: Tensor) -> Tensor:
        block = row // block_size
        first, anchor = start[block], end[block]
        own = context + block * block_size
        own_end = own + block_size
        if window is not None:
            slot = row % block_size
            first = torch.maximum(first, anchor + slot - window + 1)
            own_end = own + slot + 1
            own = torch.maximum(own, own_end - window)
        sees_context = (key >= first) & (key < anchor)
        return sees_context | ((key >= own) & (key < own_end) & (anchor >= 0))

    return rule


def _tiles(
    anchors: Anchors, context: int, block_size: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Partial and full tiles, bool `[row_tiles, key_tiles]` each, disjoint."""
    count = anchors.position.shape[0]
    rows = count * block_size
    device = anchors.position.device
    row_tiles, key_tiles = -(-rows // TILE), -(-(context + rows) // TILE)
    low = torch.arange(key_tiles, device=device)[None, :] * TILE
    high = low + TILE
    # Per anchor: the interval that its first and its last slot see of the context.
    begin_any = begin_all = anchors.start
    if window is not None:
        begin_any = torch.maximum(begin_any, anchors.position + 1 - window)
        begin_all = torch.maximum(begin_all, anchors.position + block_size - window)
    end = torch.where(anchors.keep, anchors.position, 0)
    touched = (
        torch.maximum(begin_any[:, None], low) < torch.minimum(end[:, None], high)
    ) & anchors.keep[:, None]
    # A tile that reaches past the context into the blocks is never full: its end exceeds any anchor.
    covered = (begin_all[:, None] <= low) & (end[:, None] >= high) & anchors.keep[:, None]

    # Row tile t holds rows of anchors first[t] .. last[t].
    tile = torch.arange(row_tiles, device=device)
    first = tile * TILE // block_size
    last = torch.clamp(((tile + 1) * TILE - 1) // block_size, max=count - 1)
    span = int(-(-TILE // block_size)) + 1
    member = first[:, None] + torch.arange(span, device=device)[None, :]
    inside = member <= last[:, None]
    member = member.clamp_max(count - 1)
    any_touched = (touched[member] & inside[:, :, None]).any(1)
    # Only a tile of existing rows can be skipped by the rule; rows past the end do not matter.
    all_covered = (covered[member] | ~inside[:, :, None]).all(1)

    # Keys of the blocks themselves: the columns of the row tile's own anchors.
    own_begin = context + first * block_size
    own_end = context + (last + 1) * block_size
    own = (own_begin[:, None] < high) & (own_end[:, None] > low)
    kept_here = (anchors.keep[member] & inside).any(1)
    own = own & kept_here[:, None]
    full = all_covered & ~own
    return (any_touched | own) & ~full, full


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Counts `[1, 1, row_tiles]` and, marked tiles first, indices `[1, 1, row_tiles, key_tiles]`."""
    marked = tiles.int()
    index = torch.argsort(marked, dim=1, descending=True, stable=True).int()
    return marked.sum(1, dtype=torch.int32)[None, None], index[None, None].contiguous()
