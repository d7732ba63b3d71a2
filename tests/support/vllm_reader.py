"""What vLLM 0.32 does with an exported directory, written out anew: no code of draftline's, one request.

It takes bare rows of the target's embedding, reads no key of `dflash_config` but the mask token, and uses
the first rows of the target's head where a draft vocabulary comes without a head of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(states: Tensor, positions: Tensor, base: float) -> Tensor:
    half = states.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=states.dtype) / half)
    angle = (positions.to(states.dtype)[:, None] * frequency)[:, None]
    first, second = states[..., :half], states[..., half:]
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        -1,
    )


def vllm_logits(
    out: Path, embedding: Tensor, head: Tensor, features: Tensor, anchor: int
) -> tuple[Tensor, Tensor]:
    """Final states `[block, hidden]` and logits `[block - 1, vocab]` of the block behind `features
    [context, taps * hidden]`, in the dtype of `embedding`; tokens that cannot be drafted get -inf."""
    config = json.loads((out / "config.json").read_text())
    kind = embedding.dtype
    stored = load_file(out / "model.safetensors")
    weights = {name: t.to(kind) for name, t in stored.items() if name != "d2t"}
    eps, base = config["rms_norm_eps"], config["rope_theta"]
    heads, kv_heads, dim = (
        config[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    block = config["block_size"]
    ids = torch.tensor([anchor] + [config["dflash_config"]["mask_token_id"]] * (block - 1))
    states = embedding[ids]
    context = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    before = torch.arange(len(features))
    own = len(features) + torch.arange(block)
    positions = torch.cat([before, own])
    for number, layer_type in enumerate(config["layer_types"]):

        def of(name: str, number: int = number) -> Tensor:
            return weights[f"layers.{number}.{name}.weight"]

        normed = _norm(states, of("input_layernorm"), eps)
        both = torch.cat([context, normed])
        query = (normed @ of("self_attn.q_proj").T).view(block, heads, dim)
        keys = (both @ of("self_attn.k_proj").T).view(-1, kv_heads, dim)
        values = (both @ of("self_attn.v_proj").T).view(-1, kv_heads, dim)
        query = _rotate(_norm(query, of("self_attn.q_norm"), eps), own, base)
        keys = _rotate(_norm(keys, of("self_attn.k_norm"), eps), positions, base)
        keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * dim**-0.5
        if layer_type == "sliding_attention":
            distance = own[:, None] - positions
            seen = (distance >= 0) & (distance < config["sliding_window"])
            scores = scores.masked_fill(~seen, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(block, -1)
        states = states + mixed @ of("self_attn.o_proj").T
        normed = _norm(states, of("post_attention_layernorm"), eps)
        gate, up = normed @ of("mlp.gate_proj").T, normed @ of("mlp.up_proj").T
        states = states + (gate * gate.sigmoid() * up) @ of("mlp.down_proj").T
    states = _norm(states, weights["norm.weight"], eps)
    size = config.get("draft_vocab_size", config["vocab_size"])
    rows = weights.get("lm_head.weight", head[:size])
    logits = states[1:] @ rows.T * config.get("logit_scale", 1.0)
    if "d2t" not in stored:
        return states, logits
    whole = torch.full((block - 1, config["vocab_size"]), -torch.inf, dtype=kind)
    whole[:, torch.arange(size) + stored["d2t"]] = logits
    return states, whole
