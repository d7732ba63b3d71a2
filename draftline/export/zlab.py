"""Export to the z-lab layout, which vLLM, SGLang and the `dflash` package load.

A directory with `config.json` and `model.safetensors`: Qwen3 fields with the DFlash fields beside
them, bare tensor names, no embedding, and a head only where the drafter has a vocabulary of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftline.checkpoint.restore import Shaped
from draftline.checkpoint.zlab import load_zlab
from draftline.choices import Choices
from draftline.errors import ConfigError, ParityError
from draftline.export.directory import check_replaceable, metadata, replacing
from draftline.export.engines import choose_folding
from draftline.export.tensors import export_tensors
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.head import Head
from draftline.runlog import write_atomic

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_POSITIONS = 40960


class DraftedFor(Shaped, Protocol):
    """What of a target an export says: a loaded one has it, and so has its outline. Rows of the head are
    needed only where the drafter has a vocabulary of its own."""

    @property
    def architecture(self) -> str: ...
    @property
    def text_config(self) -> Any: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def head(self) -> Head: ...


def build_config(
    shape: DrafterShape,
    target: DraftedFor,
    taps: tuple[int, ...],
    dtype: str,
    draft_vocab: int | None,
    *,
    folded: bool = False,
    choices: Choices | None = None,
) -> dict[str, Any]:
    """`config.json` of the exported drafter.

    `folded`: the embedding scale is in the tensors (see `fold_embedding_scale`), so no key
    multiplies the embeddings, and eps is divided by its square. The logit multiplier is written
    twice: vLLM reads `logit_scale`, the other readers `output_multiplier`.

    RoPE is the drafter's own (plain, whole head); nothing of the target's scaling, partial rotation
    or M-RoPE is written. `is_causal` is left out: readers take sliding layers as causal and full
    layers as bidirectional, as they were trained. The window is written only where it is used.
    """
    text = target.text_config
    choices = choices or Choices()
    eps = shape.rms_norm_eps
    sliding = shape.sliding_window if shape.sliding_layers else None
    dflash: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(taps),
        "num_target_layers": target.num_layers,
    }
    if folded:
        eps /= target.embed_scale**2
        dflash["embedding_scale_folded"] = target.embed_scale
    elif target.embed_scale != 1.0:
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
        "rms_norm_eps": eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": _positions(text, choices),
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "layer_types": shape.layer_types,
        "sliding_window": sliding,
        "use_sliding_window": sliding is not None,
        "max_window_layers": shape.num_layers,
        "vocab_size": _vocab_size(target, choices),
        "tie_word_embeddings": False,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
        "num_target_layers": target.num_layers,
        "block_size": shape.block_size,
        "dflash_config": dflash,
    }
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    if target.head.multiplier != 1.0:
        config["logit_scale"] = target.head.multiplier
    return config


def check_export(out: Path, dtype: str, overwrite: bool) -> None:
    """Raises ConfigError for what can be refused before anything is loaded."""
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype={dtype} is not one of {', '.join(_DTYPES)}")
    check_replaceable(out, overwrite)


def export_zlab(
    drafter: Drafter,
    target: DraftedFor,
    taps: tuple[int, ...],
    token_ids: Tensor | None,
    out: Path,
    *,
    dtype: str = "bfloat16",
    engine: str = "auto",
    overwrite: bool = False,
    choices: Choices | None = None,
) -> Path:
    """Writes the directory `out` for `engine` (see `choose_folding`) and reads it back strictly;
    returns it.

    Raises ConfigError when `engine` cannot serve the target, when `out` exists and is not to be
    overwritten or is no export of draftline, or cannot be written; ParityError when what was read
    back is not what was exported.
    """
    check_export(out, dtype, overwrite)
    choices = choices or Choices()
    folded = choose_folding(engine, target.architecture, target.embed_scale, choices)
    config = build_config(
        drafter.shape,
        target,
        taps,
        dtype,
        None if token_ids is None else len(token_ids),
        folded=folded,
        choices=choices,
    )
    scale = target.embed_scale if folded else 1.0
    tensors = export_tensors(drafter, target.head.weight, token_ids, _DTYPES[dtype], scale)
    with replacing(out, overwrite) as scratch:
        save_file(tensors, scratch / "model.safetensors", metadata=metadata())
        write_atomic(scratch / "config.json", json.dumps(config, indent=2) + "\n")
        loaded, _, _ = load_zlab(scratch)
        for name, value in loaded.state_dict().items():
            if not torch.equal(value, tensors[name].float()):
                raise ParityError(f"{out}: tensor {name} was not read back as written")
    return out


def _positions(text: Any, choices: Choices) -> int:
    """The drafter itself has no limit; vLLM makes its rotation table this long."""
    own = getattr(text, "max_position_embeddings", None)
    if own is not None:
        return int(own)
    choices.record(
        "export.max_position_embeddings",
        wanted="the target's",
        got=str(_POSITIONS),
        reason="the target's configuration names none; serve no longer requests than that",
        fallback=True,
    )
    return _POSITIONS


def _vocab_size(target: DraftedFor, choices: Choices) -> int:
    """What the target's config.json says: servers compare the two and stop."""
    named = int(getattr(target.text_config, "vocab_size", target.vocab_size))
    if named != target.vocab_size:
        choices.record(
            "export.vocab_size",
            wanted=f"{target.vocab_size} rows of the head",
            got=str(named),
            reason="the target's config.json says so, and servers compare it",
        )
    return named
