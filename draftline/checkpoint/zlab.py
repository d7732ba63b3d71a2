"""The z-lab layout read back: a drafter that was exported here, or that somebody else trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftline.errors import ConfigError, ParityError
from draftline.model.drafter.backbone import Drafter, DrafterShape

# Dividing the outputs of attention and MLP by the embedding scale divides the residual stream; the
# others feed norms alone, and are divided so that these see the same ratio to their smaller eps.
_SCALED = ("fc.weight", "q_proj.weight", "k_proj.weight", "o_proj.weight", "down_proj.weight")


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of the exported directory `path`; raises OSError, ValueError or TypeError."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise TypeError("its config.json is no mapping")
    return config


def load_zlab(path: Path) -> tuple[Drafter, tuple[int, ...], Tensor | None]:
    """Drafter (float32), taps and draft-vocabulary ids of an exported directory.

    Every tensor must be there with its shape, and no other. A drafter with a folded embedding scale
    takes bare embedding rows. Raises ConfigError or ParityError.
    """
    try:
        config = read_config(path)
        tensors = load_file(path / "model.safetensors")
        dflash = config["dflash_config"]
        layers = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        sliding = layers.count("sliding_attention")
        shape = DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_taps=len(dflash["target_layer_ids"]),
            block_size=dflash.get("block_size") or config["block_size"],
            mask_token_id=dflash["mask_token_id"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=_rope_theta(config),
            sliding_layers=sliding,
            sliding_window=config.get("sliding_window") if sliding else None,
        )
        if layers != shape.layer_types:
            raise ValueError(f"layer_types={layers} do not begin with the sliding ones")
    except (OSError, KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a drafter in the z-lab layout: {error}") from None
    offsets, head = tensors.pop("d2t", None), tensors.pop("lm_head.weight", None)
    drafter = Drafter(shape)
    _check_draft_head(path, config, offsets, head)
    try:
        drafter.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)
    except RuntimeError as error:
        raise ParityError(f"{path}: {error}") from None
    token_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    return drafter.requires_grad_(False), tuple(dflash["target_layer_ids"]), token_ids


def _check_draft_head(
    path: Path, config: dict[str, Any], offsets: Tensor | None, head: Tensor | None
) -> None:
    size = config.get("draft_vocab_size")
    needed = None if size is None else ((size,), (size, config["hidden_size"]))
    seen = tuple(None if t is None else tuple(t.shape) for t in (offsets, head))
    if seen != (needed or (None, None)):
        raise ParityError(
            f"{path}: d2t and lm_head.weight have the shapes {seen[0]} and {seen[1]}, and "
            f"draft_vocab_size={size} needs {needed or 'neither'}; export the drafter again (an "
            "earlier draftline wrote no lm_head.weight, without which vLLM drafts with wrong rows)"
        )


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotation; raises ValueError for a rotation that is not the plain one."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (kind := table.get("rope_type", table.get("type", "default"))) != "default":
        raise ValueError(
            f"its rotation is of the kind {kind}, and draftline's drafters have a plain one"
        )
    return float(table["rope_theta"] if "rope_theta" in table else config["rope_theta"])


def fold_embedding_scale(tensors: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The drafter's tensors for a reader that gives it bare embedding rows, where it was trained on
    rows times `scale`.

    The residual stream is then the trained one divided by `scale`. With eps divided by `scale ** 2`
    every norm puts out what it did: final states are equal up to rounding, at any scale.
    """
    return {
        name: value / scale if name.endswith(_SCALED) else value for name, value in tensors.items()
    }
