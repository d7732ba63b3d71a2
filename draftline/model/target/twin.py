"""A target's decoder in miniature: its own classes and rules, with sizes that run in milliseconds."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_VOCABULARY = 96
_MOST_LAYERS = 12
# A twin must take little of a second.
_MOST_PARAMETERS = 12_000_000
# Where a rule about positions begins to matter, by the name of the number in the configuration, and
# what it becomes. Texts longer than all of these are cheap.
_LIMITS = (
    (r"original_max_position_embeddings", 16),
    (
        r"(sliding|attention|keep|local|attn)\w*window(_size)?|window_size|local_attention|dense_len",
        8,
    ),
    (r"attention_chunk_size|floor_scale|\w*n_floor", 8),
    (r"index_topk\w*|sparse_topk\w*|topk|\w*block_size", 4),
)
_COUNTS = (
    (r"n_group|topk_group|num_expert_group|mamba_n_groups|n_groups", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_topk|num_selected_experts", 2),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"\w*intermediate_size\w*|ffn_dim|ffn_hidden_size|intermediate_dim|mlp_hidden_size", 64),
    (r"vocab_size\w*", _VOCABULARY),
    (r"index_n_heads", 2),
    # Of linear attention and state spaces.
    (r"chunk_size|mamba_chunk_size", 8),
    (r"mamba_d_state|ssm_state_size|mamba_head_dim|linear_head_dim|linear_\w+_head_dim", 16),
    (r"mamba_num_heads|linear_num_heads|linear_num_key_heads", 2),
    (r"num_nextn_predict_layers|num_mtp_layers|num_mtp_modules", 0),
)


@dataclass(frozen=True, slots=True)
class Twin:
    """`decoder` float32 with random weights; `limits` the numbers about positions, made
    small in it, by name, as the target has them."""

    decoder: Any
    limits: dict[str, int]


def build_twin(decoder: Any, *, small_heads: bool) -> Twin:
    """A twin of `decoder`, which may be on the meta device. Raises whatever its classes raise when
    the smaller sizes do not suit them; `small_heads` makes heads 32 wide, else they keep their size.
    """
    tree = copy.deepcopy(decoder.config.to_dict())
    shrunken, limits = shrink(tree, decoder, small_heads=small_heads)
    config = type(decoder.config)(**shrunken)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in type(decoder)(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"its twin would still have {size} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(decoder)(config).float().eval()
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.ndim > 1:  # so large that attention is uneven and every layer shows
                    parameter.normal_(std=float(parameter.shape[-1]) ** -0.5)
    return Twin(twin.requires_grad_(False), limits)


def shrink(
    tree: dict[str, Any], decoder: Any, *, small_heads: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """The configuration `tree` of `decoder` made small, and its limits of positions before that."""
    ratio = (tree.get("linear_num_value_heads") or 1) // (tree.get("linear_num_key_heads") or 1)
    names = {own: common for common, own in (decoder.config.attribute_map or {}).items()}
    common = {names.get(key, key): key for key in tree}
    kept = representative_layers(decoder.layers)
    total = len(decoder.layers)
    limits: dict[str, int] = {}
    _shrink_numbers(tree, names, limits)
    _shrink_rope(tree, limits)
    _shrink_heads(tree, common, small_heads=small_heads)
    if keys := tree.get("linear_num_key_heads"):
        tree["linear_num_value_heads"] = keys * ratio
    for key, value in tree.items():
        if isinstance(value, (list, tuple)) and len(value) == total > 1:
            tree[key] = [value[i] for i in kept]
        elif "pattern" in key and isinstance(value, str) and len(value) == total:
            tree[key] = "".join(value[i] for i in kept)
        elif re.search(r"(layers|indices|layer_ids)$", key) and isinstance(value, (list, tuple)):
            tree[key] = [kept.index(i) for i in value if i in kept]
    if isinstance(tree.get("per_layer_config"), dict):
        overrides = {int(i): value for i, value in tree["per_layer_config"].items()}
        tree["per_layer_config"] = {
            new: overrides[old] for new, old in enumerate(kept) if old in overrides
        }
    if shared := tree.get("num_kv_shared_layers"):
        tree["num_kv_shared_layers"] = sum(i >= total - shared for i in kept)
    tree[common.get("num_hidden_layers", "num_hidden_layers")] = len(kept)
    for key in ("quantization_config", "dtype", "torch_dtype", "transformers_version"):
        tree.pop(key, None)
    return tree, limits


def representative_layers(layers: Sequence[nn.Module]) -> list[int]:
    """Indices of layers among which every kind occurs: the first ones where these are few enough,
    so that whatever is decided by an index stays, else the first of every kind."""
    seen: dict[object, int] = {}
    for index, layer in enumerate(layers):
        seen.setdefault(_signature(layer), index)
    last = max(seen.values())
    if last < _MOST_LAYERS:
        return list(range(min(len(layers), max(last + 1, 3))))
    return sorted(seen.values())[:_MOST_LAYERS]


def _signature(layer: nn.Module) -> object:
    """What tells kinds of layers apart: modules, shapes and plain settings, but for the index."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((k, tuple(p.shape)) for k, p in module.named_parameters(recurse=False)),
            tuple(
                (k, v)
                for k, v in sorted(vars(module).items())
                if isinstance(v, (bool, int, float, str))
                and not k.startswith("_")
                and not re.search(r"idx|index|layer_id|layer_num|name", k)
            ),
        )
        for name, module in layer.named_modules()
    )


def _each(value: Any, change: Callable[[int], int]) -> Any:
    """`value`, a number or a list of them, changed; whatever else it is stays."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(value)
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    return value


def _shrink_numbers(tree: dict[str, Any], names: dict[str, str], limits: dict[str, int]) -> None:
    for key, value in tree.items():
        name = names.get(str(key), str(key))
        if isinstance(value, dict) and name != "rope_parameters":
            _shrink_numbers(value, names, limits)
        for pattern, most in (*_LIMITS, *_COUNTS):
            if re.fullmatch(pattern, name):
                tree[key] = _each(value, lambda n, most=most: min(n, most))  # type: ignore[misc]
                if (pattern, most) in _LIMITS and isinstance(value, int):
                    limits[key] = value
                break
        if str(key).endswith("_token_id"):
            tree[key] = _each(value, lambda n: n % 4)


def _shrink_rope(tree: dict[str, Any], limits: dict[str, int]) -> None:
    parameters = tree.get("rope_parameters")
    tables = [t for t in (parameters, *(parameters or {}).values()) if isinstance(t, dict)]
    longest = tree.get("max_position_embeddings")
    kinds = {str(table.get("rope_type")) for table in tables}
    most = 16 if any("dynamic" in kind for kind in kinds) else 128
    for table in tables:
        original = table.get("original_max_position_embeddings")
        if isinstance(original, (int, float)) and original > 16:
            if isinstance(longest, int):
                most = max(most, int(16 * longest / original))
            table["original_max_position_embeddings"] = 16
            limits["original_max_position_embeddings"] = int(original)
    if isinstance(longest, int):
        tree["max_position_embeddings"] = min(longest, most)


def _shrink_heads(tree: dict[str, Any], common: dict[str, str], *, small_heads: bool) -> None:
    """A few heads, grouped as before; widths of heads only where no table depends on them."""
    heads_key = common.get("num_attention_heads", "num_attention_heads")
    hidden_key = common.get("hidden_size", "hidden_size")
    heads = tree.get(heads_key)
    if not isinstance(heads, int) or not isinstance(tree.get(hidden_key), int):
        return
    kv_heads = tree.get(common.get("num_key_value_heads", "num_key_value_heads")) or heads

    def fewer(number: int) -> int:
        if number >= heads:
            return 2 if kv_heads in (1, heads) else 4
        return min(number, 2)

    hidden = tree[hidden_key]
    width = hidden // heads
    small = small_heads and not any(
        isinstance(value, list) for value in (tree.get("rope_parameters") or {}).values()
    )
    overrides = list((tree.get("per_layer_config") or {}).values())
    for place in (tree, *overrides):
        if small and isinstance(place.get("head_dim"), int):
            place["head_dim"] = 32 if place is tree else 64
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            own = common.get(key, key)
            if own in place:
                place[own] = _each(place[own], fewer)
    tree[heads_key] = fewer(heads)
    tree[hidden_key] = tree[heads_key] * (32 if small else width)
    if "mamba_n_heads" in tree:
        inner = int(tree.get("mamba_expand") or 2) * tree[hidden_key]
        tree |= {"mamba_d_head": inner // 2, "mamba_n_heads": 2}
        if tree.get("mamba_d_ssm"):
            tree["mamba_d_ssm"] = inner
