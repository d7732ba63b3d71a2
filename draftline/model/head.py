"""What a target's drafters borrow of it, frozen: the embedding and the output head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Head:
    """How hidden states become logits: `softcap(multiplier * hidden @ weight.T)`.

    `weight [vocab, hidden]` is frozen. `softcap` is None or the bound of a tanh (Gemma). Whoever wants
    a product with the weight asks for it here, so that its number format is known in one place.
    """

    weight: Tensor
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens that get a logit: rows of the weight."""
        return int(self.weight.shape[0])

    def product(self, hidden: Tensor, *, unrounded: bool = False) -> Tensor:
        """`hidden @ weight.T`, `[..., vocab]` in the dtype of `hidden`; `unrounded` leaves the product
        its float32 sums on CUDA."""
        if not unrounded or hidden.device.type != "cuda" or hidden.dtype == torch.float32:
            return hidden @ self.weight.t()
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        return product.reshape(*hidden.shape[:-1], -1)

    def product_back(self, gradient: Tensor, out: Tensor) -> None:
        """Writes to `out [..., hidden]` the gradient of the states behind `product`, whose own is
        `gradient [..., vocab]`."""
        torch.matmul(gradient, self.weight, out=out)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits `[..., vocab]` of final-norm hidden states `[..., hidden]`.

        The product is not rounded: in bfloat16 the best two of 49,152 logits are often equal, and
        which one wins then depends on the kernel.
        """
        return self.transform(self.product(hidden, unrounded=True))

    def transform(self, product: Tensor) -> Tensor:
        """float32 logits of a `product`."""
        logits = product.float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def transform_back(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of a product whose `logits` have the float32 `gradient`."""
        if self.softcap is not None:
            gradient = gradient * (1 - (logits / self.softcap).square())
        return gradient * self.multiplier

    def rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the weight for `token_ids [tokens]`, `[tokens, hidden]` on its device."""
        return self.weight[token_ids.to(self.weight.device)]

    def restricted(self, token_ids: Tensor) -> Head:
        """The head over the sub-vocabulary `token_ids [draft_vocab]`, in that order."""
        return replace(self, weight=self.rows(token_ids).contiguous())


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
        return self.head.vocab_size

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
        """Embedding and head on `device`: the same memory where they are there already, else a copy; a head
        that is the embedding stays it."""
        embedding = self.embedding.to(device)
        tied = self.head.weight.data_ptr() == self.embedding.data_ptr()
        weight = embedding if tied else self.head.weight.to(device)
        return TargetEnds(embedding, self.embed_scale, replace(self.head, weight=weight))
