"""The frozen ends of a target that its drafters borrow: the embedding and the output head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits: `softcap(multiplier * hidden @ weight.T)`.

    `weight [vocab, hidden]` is frozen. `softcap` is None or the bound of a tanh (Gemma).
    """

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[..., vocab]` of final-norm hidden states `[..., hidden]`.

        On CUDA the product leaves its float32 accumulator unrounded: in bfloat16 the best two of
        49,152 logits are often equal, and which one wins then depends on the kernel.
        """
        if hidden.device.type != "cuda" or hidden.dtype == torch.float32:
            return self.transform(hidden @ self.weight.t())
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        return self.transform(product.reshape(*hidden.shape[:-1], -1))

    def transform(self, product: Tensor) -> Tensor:
        """float32 logits of `hidden @ weight.T`."""
        logits = product.float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def restricted(self, token_ids: Tensor) -> Head:
        """The head over the sub-vocabulary `token_ids [draft_vocab]`, in that order."""
        return Head(self.weight[token_ids].contiguous(), self.multiplier, self.softcap)


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a drafter borrows of its target, on the drafter's device.

    `embedding [rows, hidden]` times `embed_scale` are block inputs; `head` makes logits.
    """

    embedding: Tensor
    embed_scale: float
    head: Head

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Block inputs `[..., hidden]` of `token_ids`: embedding rows times `embed_scale`."""
        rows = nn.functional.embedding(token_ids, self.embedding)
        return rows * self.embed_scale if self.embed_scale != 1.0 else rows

    def on(self, device: torch.device) -> TargetEnds:
        """These ends on `device`: the same memory where they are there already, else a copy; a head
        that is the embedding stays it."""
        embedding = self.embedding.to(device)
        tied = self.head.weight.data_ptr() == self.embedding.data_ptr()
        weight = embedding if tied else self.head.weight.to(device)
        return TargetEnds(embedding, self.embed_scale, replace(self.head, weight=weight))
