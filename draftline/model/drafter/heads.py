"""How block states become tokens: the loss that a drafter learns them by, and how it proposes them.

A head is the attribute `head` of a `Drafter`, and has `loss` and `propose`; one that looks at the
tokens before a slot stands here as a class beside `ParallelHead`. As a module it has weights of its
own, which are trained, saved and exported with the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftline.model.drafter.losses import LossKernels, LossResult, head_loss
from draftline.model.head import TargetEnds

# Of float32 logits [..., vocab]: the rows chosen [...], and the distribution they were drawn from, or
# None where nothing is left to chance.
Choose = Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a drafter drafts, and what it borrows of its target to do so.

    `ends` are embedding and head, the head over these tokens only; `token_ids [draft_vocab]` are the
    tokens of its rows, None where they are all; `row [vocab]` is the row of every token, -1 where it
    has none.
    """

    ends: TargetEnds
    token_ids: Tensor | None
    row: Tensor

    @classmethod
    def of(cls, ends: TargetEnds, token_ids: Tensor | None) -> DraftVocabulary:
        """That of `token_ids`, on the device of the target's embedding and head, `ends`."""
        row = torch.arange(ends.vocab_size, device=ends.device)
        if token_ids is None:
            return cls(ends, None, row)
        ids = token_ids.to(ends.device)
        row = torch.full_like(row, -1).index_copy_(0, ids, row[: len(ids)])
        return cls(replace(ends, head=ends.head.restricted(ids)), ids, row)

    def tokens(self, rows: Tensor) -> Tensor:
        """The tokens `[...]` of `rows` of the head."""
        return rows if self.token_ids is None else self.token_ids[rows]

    def distribution(self, probs: Tensor) -> Tensor:
        """`probs [rows, slots, draft_vocab]` over the whole vocabulary, 0 for what is not drafted."""
        if self.token_ids is None:
            return probs
        whole = probs.new_zeros(*probs.shape[:2], len(self.row))
        return whole.index_copy_(2, self.token_ids, probs)


@dataclass(frozen=True, slots=True)
class Answers:
    """What blocks should have said: `tokens [blocks, block_size]`, the anchor's first, `supervised`
    bool of the same shape, and with soft labels `target_hidden [blocks, block_size - 1, hidden]`, the
    target's final-norm states that predict the slots."""

    tokens: Tensor
    supervised: Tensor
    target_hidden: Tensor | None


class ParallelHead:
    """Every slot from its own state alone, all slots at once (DFlash)."""

    def loss(
        self,
        states: Tensor,
        answers: Answers,
        vocabulary: DraftVocabulary,
        kernels: LossKernels,
    ) -> LossResult:
        """The loss of final-norm `states [blocks, block_size - 1, hidden]`; see `head_loss`."""
        rows = vocabulary.row[answers.tokens]
        return head_loss(
            states,
            answers.target_hidden,
            vocabulary.ends.head,
            rows.clamp_min(0),
            rows >= 0,
            answers.supervised,
            kernels,
        )

    def propose(
        self, states: Tensor, anchor: Tensor, vocabulary: DraftVocabulary, choose: Choose
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens `[rows, slots]` of `states [rows, slots, hidden]` behind the tokens
        `anchor [rows, 1]`, and what `choose` drew them from, over the whole vocabulary."""
        chosen, probs = choose(vocabulary.ends.head.logits(states))
        whole = None if probs is None else vocabulary.distribution(probs)
        return vocabulary.tokens(chosen), whole
