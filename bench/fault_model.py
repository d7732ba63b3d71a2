"""A small causal transformer, with flex_attention or without, that the corpus' programs train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its batch. `pace_ms` is the least time of a step: a loader's wait fills the rest."""

    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    vocab: int
    pace_ms: float

    def __str__(self) -> str:
        return f"hidden {self.hidden}, {self.layers} layers, {self.batch}x{self.length} tokens"


SIZES = (
    Size(1024, 2, 8, 8, 1024, 16384, 24.0),
    Size(1536, 3, 12, 8, 1024, 32768, 32.0),
    Size(2048, 4, 16, 4, 2048, 32768, 45.0),
)
TINY = Size(16, 2, 2, 2, 16, 32, 0.0)


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size.hidden, 4 * size.hidden, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.hidden, size.hidden, bias=False),
        )
        self.probe: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, mask: flex.BlockMask | None) -> Tensor:
        batch, length, hidden = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if mask is None:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = flex.flex_attention(query, key, value, block_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        if self.probe is not None:
            self.probe(x)
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    """Returns the mean cross-entropy of a causal transformer. `running` [hidden] is updated in place
    and `scale` (a scalar that may lie on the CPU) multiplies the loss, where given."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden).requires_grad_(False)  # as a drafter's
        self.position = nn.Parameter(torch.zeros(size.length, size.hidden))
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        mask: flex.BlockMask | None,
        scale: Tensor | None = None,
        running: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        if running is not None:
            running.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, targets.flatten())
        return loss if scale is None else loss * scale
