"""Anchors: the positions from which blocks are drafted in a training step.

Everything has a fixed shape and runs on the device without a host decision, so that it can be
captured: `anchors [max_anchors]` ascending, with a keep mask, invalid slots last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Anchors:
    """`position [anchors]` int64 index in the pack, `start [anchors]` where the conversation of the
    anchor begins in the pack, `keep [anchors]` bool. Slots that are not kept point at position 0."""

    position: Tensor
    start: Tensor
    keep: Tensor


def sample_anchors(
    candidates: Tensor,
    conversation: Tensor,
    start: Tensor,
    max_anchors: int,
    generator: torch.Generator | None,
) -> Anchors:
    """Draws up to `max_anchors` of the candidate positions without replacement, sorted.

    `candidates [tokens]` bool, `conversation [tokens]` the conversation's index in the pack (padding
    -1), `start [tokens]`. Places are dealt out in rounds, one per conversation and round, so a short
    conversation is never starved by a long one: each gets all its candidates or the common quota.
    """
    tokens = candidates.shape[0]
    device = candidates.device
    draw = torch.rand(tokens, device=device, generator=generator)
    group = torch.where(candidates, conversation.long(), tokens)
    by_draw = torch.argsort(draw)
    order = by_draw[torch.argsort(group[by_draw], stable=True)]
    sorted_group = group[order]
    index = torch.arange(tokens, device=device)
    first_of_group = torch.searchsorted(sorted_group, sorted_group)
    turn = torch.empty_like(index).scatter_(0, order, index - first_of_group)
    # Who gets a place of the last, incomplete round is drawn per conversation: by the candidates' own
    # draws the longest conversation, with the most chances of a small one, would nearly always win.
    luck = torch.rand(tokens + 1, device=device, generator=generator)[group]
    # float64 keeps the luck's order inside one turn however many turns there are.
    key = torch.where(candidates, turn.double() + luck.double(), float(2 * tokens))
    chosen = torch.topk(key, max_anchors, largest=False).indices
    position = torch.where(candidates[chosen], chosen, tokens).sort().values
    keep = position < tokens
    position = torch.where(keep, position, 0)
    return Anchors(position, start[position].long(), keep)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the blocks of a step are asked and should answer; all `[anchors, block_size]`.

    `inputs` are the anchor token and masks, `labels` the tokens of the block's own positions,
    `supervised` bool, `positions` document-local, `index` positions in the pack (clamped to it).
    """

    inputs: Tensor
    labels: Tensor
    supervised: Tensor
    positions: Tensor
    index: Tensor


def build_blocks(
    anchors: Anchors,
    input_ids: Tensor,
    loss_mask: Tensor,
    start: Tensor,
    position: Tensor,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """The blocks at `anchors` over a pack's `[tokens]` tensors.

    Slot 0 is the anchor and never supervised. Later slots are supervised up to the first token that
    the target did not generate or that belongs to another conversation: what follows a user's turn
    cannot be drafted.
    """
    offset = torch.arange(block_size, device=input_ids.device)
    wanted = anchors.position[:, None] + offset
    index = wanted.clamp_max(input_ids.shape[0] - 1)
    labels = input_ids[index].long()
    same = (start[index].long() == anchors.start[:, None]) & (wanted == index)
    answer = loss_mask[index] & same & anchors.keep[:, None]
    prefix = answer[:, 1:].long().cumprod(1).bool()
    supervised = torch.cat([torch.zeros_like(answer[:, :1]), prefix], dim=1)
    inputs = torch.where(offset == 0, labels, mask_token_id)
    positions = position[anchors.position].long()[:, None] + offset
    return Blocks(inputs, labels, supervised, positions, index)
