"""The block-diffusion drafter: a Qwen3-style stack that reads target features through its KV.

DFlash, arXiv 2602.06036. Queries come from the block only; every layer's keys and values are those of
the fused target features (the context) followed by those of the block. Module names are the tensor
names of the z-lab checkpoint layout. The drafter has no embedding and no vocabulary of its own: it
borrows the target's, and its `head` says how.

Symbols: S context tokens, R block rows (anchors * block_size in training), `rope` a (cos, sin) pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from draftline.model.attention import dense_attention, fused_attention
from draftline.model.drafter.heads import ParallelHead

Rope = tuple[Tensor, Tensor]
Mask = Tensor | BlockMask
Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
Keep = Callable[[Tensor], Tensor]


def _everything(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Everything that fixes the drafter's tensors and arithmetic; stored in every checkpoint."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    block_size: int
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    sliding_layers: int = 0
    sliding_window: int | None = None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def layer_types(self) -> list[str]:
        """One of sliding_attention (causal, windowed) or full_attention (bidirectional) per layer."""
        full = self.num_layers - self.sliding_layers
        return ["sliding_attention"] * self.sliding_layers + ["full_attention"] * full

    @property
    def num_parameters(self) -> int:
        """Trained parameters, by the formula of the layout's shape table."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        layer = (
            2 * hidden * heads
            + 2 * hidden * self.num_kv_heads * self.head_dim
            + 3 * hidden * self.intermediate_size
            + 2 * hidden
            + 2 * self.head_dim
        )
        return self.num_layers * layer + self.num_taps * hidden * hidden + 2 * hidden


class Attention(nn.Module):
    """Projections, per-head norms and RoPE; the kernel itself is chosen by the mask's type."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        hidden, dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=shape.rms_norm_eps)

    def keys_values(self, states: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values `[rows, kv_heads, tokens, head_dim]` of states
        `[rows, tokens, hidden]`; the same projections serve context and block."""
        split = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(split)).transpose(1, 2)
        return rotate(keys, rope), self.v_proj(states).view(split).transpose(1, 2)

    def forward(
        self, block: Tensor, rope: Rope, mask: Mask, layer: int, extend: Extend, keep: Keep
    ) -> Tensor:
        split = (*block.shape[:-1], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(block).view(split)).transpose(1, 2), rope)
        keys, values = extend(layer, *self.keys_values(block, rope))
        if isinstance(mask, Tensor):
            output = dense_attention(query, keys, values, mask)
        else:
            output = fused_attention(query, keys, values, mask)
        rows = output.transpose(1, 2).reshape(*block.shape[:-1], -1)
        projected: Tensor = self.o_proj(keep(rows))
        return projected


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gate_proj(states), self.up_proj(states)
        if torch.compiler.is_dynamo_compiling():
            # Left alone, the compiler keeps the product for the backward pass: 3.7 GiB at 32,768
            # rows of a Qwen3-8B drafter. Made again there, it costs one more write.
            product = checkpoint(_gated, gate, up, use_reentrant=False)
        else:
            product = _gated(gate, up)
        output: Tensor = self.down_proj(product)
        return output


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(
        self, block: Tensor, rope: Rope, mask: Mask, layer: int, extend: Extend, keep: Keep
    ) -> Tensor:
        """Of the rows that `keep` selects; all of them serve as keys and values."""
        attended = self.self_attn(self.input_layernorm(block), rope, mask, layer, extend, keep)
        block = keep(block) + attended
        output: Tensor = block + self.mlp(self.post_attention_layernorm(block))
        return output


class Drafter(nn.Module):
    """The trained module.

    `feature_scale [taps * hidden]` multiplies the columns of `fc`: training then sees features of
    unit scale although some target channels are thousands of times larger than others, and the
    product is what gets exported.
    """

    feature_scale: Tensor

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_taps * shape.hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.head = ParallelHead()
        self.register_buffer("feature_scale", torch.ones(width), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Context states `[..., hidden]` of features `[..., taps * hidden]`."""
        weight = self.fc.weight * self.feature_scale.to(self.fc.weight.dtype)
        context: Tensor = self.hidden_norm(F.linear(features, weight))
        return context

    def forward(
        self,
        features: Tensor,
        block: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        full_mask: Mask,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Final-norm states `[R, hidden]` of one pack's blocks.

        `features [S, taps * hidden]`, `block [R, hidden]` embeddings, positions `[S]` and `[R]`;
        masks are over `R` queries and `S + R` keys, context first: a boolean tensor
        `[1, 1, R, S + R]` runs dense attention, a BlockMask runs flex_attention.
        """
        return self.states(
            features,
            block,
            self.rope(context_positions[None], features.dtype),
            self.rope(block_positions[None], block.dtype),
            full_mask,
            sliding_mask,
        )

    def states(
        self,
        features: Tensor,
        block: Tensor,
        context_rope: Rope,
        block_rope: Rope,
        full_mask: Mask,
        sliding_mask: Mask | None,
        *,
        predictions: bool = False,
    ) -> Tensor:
        """`forward` at given rotations: what is compiled, as a compiler would otherwise compute
        every angle again in each kernel that rotates (1.4 ms per layer at 32,768 rows on an H200).

        With `predictions` only the slots that predict, `[anchors * (block_size - 1), hidden]`: past
        its keys and values, the last layer has no use for the anchors' own rows.
        """
        context = self.fuse(features)[None]

        def extend(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            context_keys, context_values = self._attention(layer).keys_values(context, context_rope)
            return torch.cat([context_keys, keys], 2), torch.cat([context_values, values], 2)

        def predicting(rows: Tensor) -> Tensor:
            blocks = rows.view(rows.shape[0], -1, self.shape.block_size, rows.shape[-1])
            return blocks[:, :, 1:].flatten(1, 2)

        last = predicting if predictions else _everything
        return self._stack(block[None], block_rope, full_mask, sliding_mask, extend, last)[0]

    def draft(
        self,
        block: Tensor,
        positions: Tensor,
        extend: Extend,
        full_mask: Mask,
        sliding_mask: Mask | None = None,
    ) -> Tensor:
        """Final-norm states `[rows, tokens, hidden]` of one block per row; `extend` holds the cache."""
        rope = self.rope(positions, block.dtype)
        return self._stack(block, rope, full_mask, sliding_mask, extend)

    def context(self, features: Tensor, positions: Tensor, extend: Extend) -> None:
        """Hands every layer's context keys and values of `features [rows, tokens, taps * hidden]`
        at `positions [rows, tokens]` to `extend`."""
        context = self.fuse(features)
        rope = self.rope(positions, context.dtype)
        for index in range(self.shape.num_layers):
            extend(index, *self._attention(index).keys_values(context, rope))

    def _attention(self, layer: int) -> Attention:
        attention = self.layers[layer].self_attn
        assert isinstance(attention, Attention), "every layer has one"
        return attention

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin `[rows, 1, tokens, head_dim / 2]`, computed in float32 (neox layout)."""
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequency = self.shape.rope_theta ** (-half / self.shape.head_dim)
        angle = positions.float()[:, None, :, None] * frequency
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _stack(
        self,
        block: Tensor,
        rope: Rope,
        full_mask: Mask,
        sliding_mask: Mask | None,
        extend: Extend,
        last: Keep = _everything,
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            mask = full_mask
            if index < self.shape.sliding_layers:
                assert sliding_mask is not None, "sliding layers need their own mask"
                mask = sliding_mask
            keep = last if index == self.shape.num_layers - 1 else _everything
            block = layer(block, rope, mask, index, extend, keep)
        output: Tensor = self.norm(block)
        return output


def rotate(states: Tensor, rope: Rope) -> Tensor:
    """RoPE over the whole head, first half against second half, of `[..., tokens, head_dim]`."""
    cos, sin = rope
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
