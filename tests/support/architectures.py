"""Small configurations of the families whose layers do something of their own about positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.fakes import LATENT, SHAPE, VOCAB_SIZE

_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 6}
_INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 6.0, 8.0, 10.0],
    "original_max_position_embeddings": 32,
}
_GEMMA4 = {
    "num_hidden_layers": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}

# Name -> model type and what differs from the shape above.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        },
    ),
    "gemma3": ("gemma3_text", _ALTERNATE | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma4_12b": (
        "gemma4_text",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_e2b": (
        "gemma4_text",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 4,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "ministral": ("ministral", _ALTERNATE | {"head_dim": 8}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "phi3_longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 32,
            "rope_parameters": _LONGROPE,
        },
    ),
    "dynamic_ntk": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "cohere2": ("cohere2", _ALTERNATE),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _ALTERNATE),
    "exaone4": ("exaone4", _ALTERNATE),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0] * 2}),
    "glm4": ("glm4", {"head_dim": 8}),
    "granite": ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
    "deepseek_v3": ("deepseek_v3", LATENT | {"first_k_dense_replace": 2}),
    "gpt_neox": ("gpt_neox", {}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    # Refused
    "gemma2": ("gemma2", {"head_dim": 8}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 6}),
    "doge": ("doge", {"keep_window_size": 4}),
    "deepseek_v32": ("deepseek_v32", _INDEXED | {"first_k_dense_replace": 2}),
    "glm_moe_dsa": ("glm_moe_dsa", _INDEXED),
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "head_dim": 8,
            "rotary_dim": 8,
            "num_local_experts": 4,
            "layer_types": ["minimax_m3_sparse"] * 6,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 48,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "intermediate_size": [48] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "mimo_v2_flash": ("mimo_v2_flash", _ALTERNATE | {"head_dim": 8}),
    "xglm": ("xglm", {"d_model": 32, "attention_heads": 4, "num_layers": 4, "ffn_dim": 48}),
}


def build_config(name: str, **changes: Any) -> Any:
    kind, own = ARCHITECTURES[name]
    return CONFIG_MAPPING[kind](**SHAPE | own | changes)


def build_model(name: str, **changes: Any) -> Any:
    """A float32 model with transformers' own eager attention and weights that make layers show."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(
            build_config(name, **changes), attn_implementation="eager"
        )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model.float().eval()
