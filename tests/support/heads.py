"""A head beside the parallel one, as somebody would add it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftline.model.drafter.heads import Answers, Choose, DraftVocabulary, ParallelHead
from draftline.model.drafter.losses import LossKernels, LossResult


class CausalHead(nn.Module):
    """Corrects the state of a slot by the token before it: a block is drafted token by token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.previous = nn.Linear(hidden, hidden, bias=False)

    def _corrected(self, states: Tensor, before: Tensor, vocabulary: DraftVocabulary) -> Tensor:
        corrected: Tensor = states + self.previous(vocabulary.ends.embed(before))
        return corrected

    def loss(
        self,
        states: Tensor,
        answers: Answers,
        vocabulary: DraftVocabulary,
        kernels: LossKernels,
    ) -> LossResult:
        corrected = self._corrected(states, answers.tokens[:, :-1], vocabulary)
        return ParallelHead().loss(corrected, answers, vocabulary, kernels)

    def propose(
        self, states: Tensor, anchor: Tensor, vocabulary: DraftVocabulary, choose: Choose
    ) -> tuple[Tensor, Tensor | None]:
        found = []
        for slot in range(states.shape[1]):
            corrected = self._corrected(states[:, slot : slot + 1], anchor, vocabulary)
            anchor, probs = ParallelHead().propose(corrected, anchor, vocabulary, choose)
            found.append((anchor, probs))
        tokens, probs_of = zip(*found, strict=True)
        whole = None if probs_of[0] is None else torch.cat(probs_of, 1)
        return torch.cat(tokens, 1), whole
