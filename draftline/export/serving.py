"""How an export is served: the command of each engine that can, why the others cannot, and the bounds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftline.checkpoint.restore import Restored
from draftline.choices import Choices
from draftline.config.model import TargetSection
from draftline.export.engines import SGLANG, VLLM, obstacle
from draftline.export.zlab import DraftedFor, export_zlab
from draftline.model.target.source import resolve_target
from draftline.model.target.target import Target


@dataclass(frozen=True, slots=True)
class Served:
    """What of a target matters to the engines.

    `path` as an engine takes it (a directory or a hub name), `architecture` the class that its
    config.json names, `embed_scale` what its embedding rows are multiplied by, `recurrent` whether
    it has layers with a state, `remote_code` whether it needs code of its own.
    """

    path: str
    architecture: str
    embed_scale: float = 1.0
    recurrent: bool = False
    remote_code: bool = False


def export_drafter(
    restored: Restored,
    target: DraftedFor,
    out: Path,
    *,
    dtype: str = "bfloat16",
    engine: str = "auto",
    overwrite: bool = False,
    choices: Choices,
) -> list[str]:
    """Writes `restored` to the directory `out` and returns `serve_lines` of it.

    Raises TargetError where it was trained for another target than `target`, and as `export_zlab`. Weights
    that are another target's, as `target.path` asked, or are not read, are recorded.
    """
    another = restored.check_target(target)
    if another or (restored.target_digest is not None and not isinstance(target, Target)):
        choices.record(
            "target.weights",
            wanted="those that the drafter was trained with",
            got="another target's" if another else "not compared",
            reason=another
            or "an export reads the target's shape alone; draftline eval compares them",
        )
    export_zlab(
        restored.drafter(torch.device("cpu"), torch.float32),
        target,
        restored.taps,
        restored.token_ids,
        out,
        dtype=dtype,
        engine=engine,
        overwrite=overwrite,
        choices=choices,
    )
    return serving(out, target, restored.config.target)


def serving(out: Path, target: DraftedFor, section: TargetSection) -> list[str]:
    """`serve_lines` of the export at `out`, made for `target`, which `section` names."""
    kinds = set(getattr(target.text_config, "layer_types", None) or ())
    served = Served(
        path=resolve_target(section.path),
        architecture=target.architecture,
        embed_scale=target.embed_scale,
        recurrent=any("linear" in kind or "attention" not in kind for kind in kinds),
        remote_code=section.trust_remote_code,
    )
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    return serve_lines(str(out), config, served)


def parallel_sizes(heads: int, kv_heads: int, width: int) -> list[int]:
    """Tensor-parallel sizes over which `heads`, `kv_heads` (split or repeated) and the MLP's `width`
    divide evenly, ascending."""
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0
        and width % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    ]


def serve_lines(out: str, config: dict[str, Any], served: Served) -> list[str]:
    """How the export `out` with its `config.json` is served, for people to paste: a command for each
    engine that can, the reason for each that cannot, and the bounds that none of them checks."""
    folded = "embedding_scale_folded" in config["dflash_config"]
    lines: list[str] = []
    for name, title, form, command, notes in (
        ("vllm", VLLM, True, _vllm_command, _vllm_notes(config)),
        ("sglang", SGLANG, False, _sglang_command, []),
    ):
        problem = obstacle(name, served.architecture, served.embed_scale)
        if problem is None and served.embed_scale != 1.0 and folded != form:
            problem = f"this export has the embedding scale in another form; use --engine={name}"
        if problem is None:
            lines += [f"serve with {title}:", f"  {command(out, config, served)}", *notes]
        else:
            lines.append(f"not with {title}: {problem.replace(title, 'it', 1)}")
    return [*lines, _bounds(config)]


def _vllm_command(out: str, config: dict[str, Any], served: Served) -> str:
    speculative = {
        "method": "dflash",
        "model": out,
        "num_speculative_tokens": config["block_size"] - 1,
    }
    words = ["vllm", "serve", served.path]
    words += ["--trust-remote-code"] * served.remote_code
    command = shlex.join([*words, "--speculative-config", json.dumps(speculative)])
    return f"VLLM_USE_V2_MODEL_RUNNER=1 {command}" if _mixed(config["layer_types"]) else command


def _sglang_command(out: str, config: dict[str, Any], served: Served) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", served.path]
    words += ["--trust-remote-code"] * served.remote_code
    words += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", out]
    words += ["--speculative-num-draft-tokens", str(config["block_size"])]
    words += ["--mamba-scheduler-strategy", "extra_buffer"] * served.recurrent
    return shlex.join(words)


def _mixed(layer_types: Sequence[str]) -> bool:
    return len(set(layer_types)) > 1


def _vllm_notes(config: dict[str, Any]) -> list[str]:
    notes = []
    if _mixed(config["layer_types"]):
        notes.append(
            "  (sliding and full layers together need vLLM >= 0.26 and its V2 model runner: the variable)"
        )
    if "final_logit_softcapping" in config["dflash_config"]:
        notes.append(
            "  (the drafts' logits are not capped as the target's are: at temperature 0 drafts are the "
            "same, sampled ones come from a sharper distribution)"
        )
    return notes


def _bounds(config: dict[str, Any]) -> str:
    sizes = parallel_sizes(
        config["num_attention_heads"], config["num_key_value_heads"], config["intermediate_size"]
    )
    return (
        f"bounds: at most {config['max_position_embeddings']} positions per request "
        "(max_position_embeddings, which vLLM does not check for a drafter); "
        "tensor-parallel sizes that divide the drafter: "
        f"{', '.join(map(str, sizes))}"
    )
