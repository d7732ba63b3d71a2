"""The frozen output head that target and drafter share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits: `softcap(multiplier * hidden @ weight.T)`.

    `weight [vocab, hidden]` is frozen. `softcap` is None or the bound of a tanh (Gemma).
    """

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[..., vocab]` of final-norm hidden states `[..., hidden]`."""
        logits = (hidden @ self.weight.t()).float() * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def restricted(self, token_ids: Tensor) -> Head:
        """The head over the sub-vocabulary `token_ids [draft_vocab]`, in that order."""
        return Head(self.weight[token_ids].contiguous(), self.multiplier, self.softcap)
