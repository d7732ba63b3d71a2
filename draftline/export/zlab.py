"""Export to the z-lab layout, which vLLM, SGLang and the `dflash` package load.

A directory with `config.json` and `model.safetensors`: Qwen3 fields with the DFlash fields beside
them, bare tensor names, no embedding and no head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.errors import ConfigError, ParityError
from draftline.export.directory import check_replaceable, metadata, replacing
from draftline.model.drafter import Drafter, DrafterShape
from draftline.model.target import Target
from draftline.runlog import write_atomic

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_config(
    shape: DrafterShape, target: Target, taps: tuple[int, ...], dtype: str, draft_vocab: int | None
) -> dict[str, Any]:
    """`config.json` of the exported drafter.

    RoPE is the drafter's own (plain, whole head); nothing of the target's scaling, partial rotation
    or M-RoPE is written. `is_causal` is left out: readers take sliding layers as causal and full
    layers as bidirectional, as they were trained. The window is written only where it is used.
    """
    text = target.text_config
    sliding = shape.sliding_window if shape.sliding_layers else None
    dflash: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(taps),
        "num_target_layers": target.num_layers,
    }
    if target.embed_scale != 1.0:
        dflash["input_embedding_scale"] = target.embed_scale
    if target.head.multiplier != 1.0:
        dflash["output_multiplier"] = target.head.multiplier
    if target.head.softcap is not None:
        dflash["final_logit_softcapping"] = target.head.softcap
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", 40960)),
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "layer_types": shape.layer_types,
        "sliding_window": sliding,
        "use_sliding_window": sliding is not None,
        "max_window_layers": shape.num_layers,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
        "num_target_layers": target.num_layers,
        "block_size": shape.block_size,
        "dflash_config": dflash,
    }
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    return config


def export_tensors(drafter: Drafter, token_ids: Tensor | None, dtype: str) -> dict[str, Tensor]:
    """The checkpoint's tensors: bare names, the feature scale folded into `fc.weight`.

    With a draft vocabulary also `d2t [draft_vocab]` int64, target id minus draft id. Raises
    ParityError where a weight is not finite in `dtype`.
    """
    tensors = {name: value.detach().float().cpu() for name, value in drafter.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] * drafter.feature_scale.float().cpu()
    tensors = {name: value.to(_DTYPES[dtype]).contiguous() for name, value in tensors.items()}
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise ParityError(
                f"tensor {name} is not finite in {dtype}: the training diverged, or the folded feature "
                "scale is too large for float16; export bfloat16 or float32"
            )
    if token_ids is not None:
        ids = token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
    return tensors


def check_export(out: Path, dtype: str, overwrite: bool) -> None:
    """Raises ConfigError for what can be refused before anything is loaded."""
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype={dtype} is not one of {', '.join(_DTYPES)}")
    check_replaceable(out, overwrite)


def export_zlab(
    drafter: Drafter,
    target: Target,
    taps: tuple[int, ...],
    token_ids: Tensor | None,
    out: Path,
    *,
    dtype: str = "bfloat16",
    overwrite: bool = False,
) -> Path:
    """Writes the directory `out` and reads it back strictly; returns it.

    Raises ConfigError when `out` exists and is not to be overwritten or is no export of draftline, or
    cannot be written; ParityError when what was read back is not what was exported.
    """
    check_export(out, dtype, overwrite)
    config = build_config(
        drafter.shape, target, taps, dtype, None if token_ids is None else len(token_ids)
    )
    tensors = export_tensors(drafter, token_ids, dtype)
    with replacing(out, overwrite) as scratch:
        save_file(tensors, scratch / "model.safetensors", metadata=metadata())
        write_atomic(scratch / "config.json", json.dumps(config, indent=2) + "\n")
        loaded, _, _ = load_zlab(scratch)
        for name, value in loaded.state_dict().items():
            if not torch.equal(value, tensors[name].float()):
                raise ParityError(f"{out}: tensor {name} was not read back as written")
    return out


def load_zlab(path: Path) -> tuple[Drafter, tuple[int, ...], Tensor | None]:
    """Drafter (float32), taps and draft-vocabulary ids of an exported directory.

    Every tensor must be there with its shape, and no other. Raises ConfigError or ParityError.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "model.safetensors")
        dflash = config["dflash_config"]
        shape = DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_taps=len(dflash["target_layer_ids"]),
            block_size=dflash.get("block_size", config.get("block_size")),
            mask_token_id=dflash["mask_token_id"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            sliding_layers=config["layer_types"].count("sliding_attention"),
            sliding_window=config.get("sliding_window"),
        )
        if config["layer_types"] != shape.layer_types:
            raise ValueError(
                f"layer_types={config['layer_types']} do not begin with the sliding ones"
            )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a drafter in the z-lab layout: {error}") from None
    offsets = tensors.pop("d2t", None)
    drafter = Drafter(shape)
    try:
        drafter.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)
    except RuntimeError as error:
        raise ParityError(f"{path}: {error}") from None
    token_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    return drafter.requires_grad_(False), tuple(dflash["target_layer_ids"]), token_ids
