"""Packs: rows of exactly `token_budget` tokens, filled with whole conversations."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftline.data.store import Mask, Sample
from draftline.data.tokens import anchor_mask
from draftline.errors import DataError

Limit = Literal["tokens", "max_batch_size", "too few conversations"]
# A plan this full is limited by its tokens, however the last per cents are lost.
_FULL_PCT = 98.0


@dataclass(frozen=True, slots=True)
class Pack:
    """One row: the samples in it, by index and in order, and the tokens that they fill."""

    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One epoch: every sample is in exactly one pack.

    `fill_pct` is the share of all packs' tokens that are no padding. `limited_by` names what keeps
    it from 100: "tokens", the healthy case, where whole conversations leave gaps;
    "max_batch_size", where packs are closed for their number of conversations; "too few
    conversations", where none are left for the last pack and it weighs much in the plan.
    """

    packs: tuple[Pack, ...]
    token_budget: int
    max_batch_size: int
    fill_pct: float
    limited_by: Limit


@dataclass(frozen=True, slots=True, eq=False)
class PackArrays:
    """A pack as arrays [token_budget], padding last.

    `input_ids` int32, 0 on padding; `loss_mask` and `anchor_mask` bool; `conversation` int32, the
    place in the pack, -1 on padding; `position` int32, counted in the conversation, 0 on padding;
    `start` int32, where the token's conversation begins in the pack, on padding the token's own
    place, so that a padding row sees itself and no mask row is empty.
    """

    input_ids: NDArray[np.int32]
    loss_mask: Mask
    anchor_mask: Mask
    conversation: NDArray[np.int32]
    position: NDArray[np.int32]
    start: NDArray[np.int32]


def plan_packs(
    lengths: Sequence[int], *, token_budget: int, max_batch_size: int, seed: int, epoch: int
) -> PackPlan:
    """Packs that hold each sample once, the same for the same seed and epoch.

    Samples arrive in a shuffled order and each goes to the open pack that it fills best. The order
    is not sorted by length: the gaps left over are the same to within a per cent, and where
    max_batch_size binds, packs of only short samples would close half empty. `lengths` are tokens.
    Raises DataError for no samples, and for one that is empty or longer than the budget.
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, token_budget, max_batch_size)
    random = np.random.default_rng([seed, epoch])
    smallest = int(sizes.min())
    members: list[list[int]] = []
    # (space left, pack), sorted; a pack leaves it when no sample fits or no seat is free.
    open_packs: list[tuple[int, int]] = []
    for index in random.permutation(len(sizes)).tolist():
        size = int(sizes[index])
        place = bisect_left(open_packs, (size, -1))
        if place < len(open_packs):
            space, pack = open_packs.pop(place)
        else:
            space, pack = token_budget, len(members)
            members.append([])
        members[pack].append(index)
        if space - size >= smallest and len(members[pack]) < max_batch_size:
            insort(open_packs, (space - size, pack))
    # The packs opened last are the emptier ones; shuffled, no epoch ends on them.
    packs = [
        Pack(tuple(members[pack]), int(sizes[members[pack]].sum()))
        for pack in random.permutation(len(members)).tolist()
    ]
    return _plan(packs, token_budget, max_batch_size)


def build_pack(
    samples: Sequence[Sample], pack: Pack, token_budget: int, block_size: int
) -> PackArrays:
    """The pack's arrays, its members in their order and padding after them."""
    row = PackArrays(
        input_ids=np.zeros(token_budget, np.int32),
        loss_mask=np.zeros(token_budget, np.bool_),
        anchor_mask=np.zeros(token_budget, np.bool_),
        conversation=np.full(token_budget, -1, np.int32),
        position=np.zeros(token_budget, np.int32),
        start=np.arange(token_budget, dtype=np.int32),
    )
    begin = 0
    for place, index in enumerate(pack.members):
        sample = samples[index]
        tokens = len(sample.input_ids)
        span = slice(begin, begin + tokens)
        row.input_ids[span] = sample.input_ids
        row.loss_mask[span] = sample.loss_mask
        row.anchor_mask[span] = anchor_mask(sample.loss_mask, sample.truncated, block_size)
        row.conversation[span] = place
        row.position[span] = np.arange(tokens)
        row.start[span] = begin
        begin += tokens
    assert begin == pack.tokens, f"the plan was made for other samples: {begin} != {pack.tokens}"
    return row


def _check(sizes: NDArray[np.int64], token_budget: int, max_batch_size: int) -> None:
    if not len(sizes):
        raise DataError("there is no sample to pack; check the rejects of the data")
    if max_batch_size < 1:
        raise DataError(f"max_batch_size={max_batch_size}: a pack holds at least one conversation")
    if sizes.min() < 1:
        raise DataError(
            f"sample {int(sizes.argmin())} has {sizes.min()} tokens; it can not be packed"
        )
    if sizes.max() > token_budget:
        raise DataError(
            f"{int((sizes > token_budget).sum())} samples are longer than token_budget="
            f"{token_budget}, the longest (sample {int(sizes.argmax())}) has {sizes.max()} tokens; "
            "raise token_budget or lower data.max_length"
        )


def _plan(packs: list[Pack], token_budget: int, max_batch_size: int) -> PackPlan:
    fill_pct = 100 * sum(pack.tokens for pack in packs) / (len(packs) * token_budget)
    # The emptiest pack is only where the conversations ended, the others show why packs close.
    *others, (last_gap, _) = sorted(
        (token_budget - pack.tokens, len(pack.members) == max_batch_size) for pack in packs
    )
    gaps = sum(gap for gap, _ in others)
    limited_by: Limit = "tokens"
    if fill_pct < _FULL_PCT:
        if gaps + last_gap < token_budget:
            limited_by = "too few conversations"
        elif 2 * sum(gap for gap, full in others if full) > gaps:
            limited_by = "max_batch_size"
        elif last_gap > gaps:
            limited_by = "too few conversations"
    return PackPlan(tuple(packs), token_budget, max_batch_size, fill_pct, limited_by)
