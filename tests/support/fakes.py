"""Tiny targets: random models of real families, saved as directories that `load_target` reads.

Weights are larger than a fresh model's, so that layers change the residual stream, attention is
uneven, and a wrong layer, a wrong mask or a wrong scale shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>")
# Every character that plain test texts need is a token of its own.
_PIECES = ("\n", " ", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!'-")
VOCAB_SIZE = len(SPECIAL) + len(_PIECES)
END_OF_TURN = SPECIAL.index("<|im_end|>")

# Of every family; whether the head is tied is then each one's own.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": 0,
}
_SHAPE = SHAPE | {"tie_word_embeddings": False}
# Latent attention, whose values are narrower than its keys, and experts.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A fast tokenizer of one token a character, with ChatML's special tokens."""
    vocabulary = {piece: i for i, piece in enumerate((*SPECIAL, *_PIECES))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SHAPE | changes))


def _tied_llama(**changes: Any) -> Any:
    return _llama(tie_word_embeddings=True, **changes)


def _qwen3(**changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SHAPE | {"head_dim": 16} | changes))


def _mistral(**changes: Any) -> Any:
    """A window on every layer, and no layer_types."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_SHAPE | {"sliding_window": 6} | changes))


def _gemma3(**changes: Any) -> Any:
    """Scaled embeddings, windows on most layers, logits capped well inside their range."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    own = {
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE | own | changes))


def _gemma3_with_vision(**changes: Any) -> Any:
    """Gemma 3 in its multimodal wrapper."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = _gemma3(**changes).config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config.tie_word_embeddings = True
    return Gemma3ForConditionalGeneration(config)


def _qwen3_5(**changes: Any) -> Any:
    """A multimodal wrapper: nested text_config, linear-attention layers, a vision tower."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = _SHAPE | {
        "head_dim": 16,
        "num_hidden_layers": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "patch_size": 4,
    }
    config = Qwen3_5Config(text_config=text | changes, vision_config=vision)
    return Qwen3_5ForConditionalGeneration(config)


_MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]}
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _qwen3_vl(**changes: Any) -> Any:
    """Interleaved M-RoPE, and image features that enter several layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {"head_dim": 8, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(text_config=_SHAPE | text | changes, vision_config=vision)
    return Qwen3VLForConditionalGeneration(config)


def _qwen2_5_vl(**changes: Any) -> Any:
    """M-RoPE in sections, and a tied head that only the wrapper's own config mentions."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    config = Qwen2_5_VLConfig(
        text_config=SHAPE | {"rope_parameters": _MROPE} | changes,
        vision_config=vision,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _mistral3(**changes: Any) -> Any:
    """A language model of another type in a wrapper that has no causal class."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = _SHAPE | {"model_type": "mistral", "head_dim": 8} | changes
    config = Mistral3Config(
        text_config=text,
        vision_config=_ENCODER | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    )
    return Mistral3ForConditionalGeneration(config)


def _llava(**changes: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=_SHAPE | {"model_type": "llama"} | changes,
        vision_config=_ENCODER
        | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 16},
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _granite(**changes: Any) -> Any:
    """Multiplied embeddings, residuals, attention scores and logits."""
    from transformers import GraniteConfig, GraniteForCausalLM

    own = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 8.0,
    }
    return GraniteForCausalLM(GraniteConfig(**_SHAPE | own | changes))


def _cohere(**changes: Any) -> Any:
    """LayerNorm, parallel attention and MLP, scaled logits."""
    from transformers import CohereConfig, CohereForCausalLM

    own = {"logit_scale": 0.0625, "tie_word_embeddings": True}
    return CohereForCausalLM(CohereConfig(**_SHAPE | own | changes))


def _deepseek_v3(**changes: Any) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    own = LATENT | {"first_k_dense_replace": 2}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_SHAPE | own | changes))


def _gemma2(**changes: Any) -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**_SHAPE | {"head_dim": 8} | changes))


def _gpt_oss(**changes: Any) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    own = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    return GptOssForCausalLM(GptOssConfig(**_SHAPE | own | changes))


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": END_OF_TURN}
    return GPT2LMHeadModel(GPT2Config(**shape | special | changes))


def _opt(**changes: Any) -> Any:
    """Learned positions behind a list called `layers`, which GPT-2 has not."""
    from transformers import OPTConfig, OPTForCausalLM

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return OPTForCausalLM(OPTConfig(**shape | changes))


def _phi(**changes: Any) -> Any:
    """An output head with a bias."""
    from transformers import PhiConfig, PhiForCausalLM

    return PhiForCausalLM(PhiConfig(**_SHAPE | changes))


def _llama4(**changes: Any) -> Any:
    """Attention inside chunks of positions on most layers."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    own = {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 6,
        "interleave_moe_layer_step": 1,
    }
    return Llama4ForCausalLM(Llama4TextConfig(**_SHAPE | own | changes))


FAMILIES = {
    "llama": _llama,
    "tied_llama": _tied_llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma3_with_vision": _gemma3_with_vision,
    "qwen3_5": _qwen3_5,
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "mistral3": _mistral3,
    "llava": _llava,
    "granite": _granite,
    "cohere": _cohere,
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt2,
    "opt": _opt,
    "phi": _phi,
    "llama4": _llama4,
}


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A float32 model of `family`, the same for equal seeds; `changes` go into its text config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family](**changes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.15)
                elif "norm" in name and name.endswith("weight"):
                    # Around what a fresh model has, which is 0 where the norm adds one to it.
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.float().eval()


def tiny_target_dir(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    template: str | None = CHATML,
    **changes: Any,
) -> Path:
    """`directory`, into which a tiny model of `family` and its tokenizer were saved."""
    tiny_model(family, seed=seed, **changes).save_pretrained(directory)
    tiny_tokenizer(template).save_pretrained(directory)
    return directory


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids `shape` without the special ones."""
    return torch.randint(4, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))
