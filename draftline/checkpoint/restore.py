"""A trained drafter, from wherever it lies: a run, a checkpoint, or a directory in the z-lab layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draftline.checkpoint.store import Checkpoint, checkpoint_paths, load_checkpoint
from draftline.checkpoint.zlab import fold_embedding_scale, load_zlab, read_config
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.config.section import MOST_TOKENS
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.target.identity import digest_in, target_digest
from draftline.model.target.target import Target

_FREE_KEYS = (
    "evaluate.",
    "run.",
    "topology.targets=",
    "target.path=",
    "target.dtype=",
    "data.template",
    "data.date=",
)
# What an exported directory does not say, and the user therefore may.
_UNSAID_KEYS = ("target.trust_remote_code=", "data.max_length=")
_WHAT = "a run directory, a checkpoint or an exported drafter"


class Shaped(Protocol):
    """What of a target must be as it was in training: a loaded one has it, and its outline."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def taps(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """A trained drafter and what it was trained for; weights stay on the CPU until `drafter()`.

    `path` is the checkpoint or the exported directory, `step` None for the latter. `config` is that of
    the training; of an exported drafter it says the target, the data's template and the evaluation only.
    `num_target_layers` is None where nobody wrote it down; `token_ids [draft_vocab]` int64, or None for
    the whole vocabulary. `total_steps` are those of a run that was not finished at `step` or was;
    `target_digest` is that of the target trained with, None where nobody noted it; `target_named` says
    that another target may be meant.
    """

    path: Path
    step: int | None
    config: Config
    shape: DrafterShape
    taps: tuple[int, ...]
    num_target_layers: int | None
    token_ids: Tensor | None
    tensors: dict[str, Tensor]
    total_steps: int | None = None
    target_digest: str | None = None
    target_named: bool = False

    def drafter(self, device: torch.device, dtype: torch.dtype) -> Drafter:
        """The drafter to evaluate (the averaged weights where the run averaged)."""
        drafter = Drafter(self.shape)
        tensors = dict(self.tensors)
        drafter.feature_scale.copy_(tensors.pop("feature_scale"))
        try:
            drafter.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return drafter.to(device=device, dtype=dtype).requires_grad_(False)

    def check_target(self, target: Shaped) -> str:
        """What to warn of: another target that was asked for by its path, "" for the one trained with.

        Raises TargetError where it was not asked for, and where it is not shaped like that one. An
        outline has no weights, so its shape alone is compared.
        """
        seen = (target.hidden_size, target.num_layers, target.taps)
        layers = self.num_target_layers or target.num_layers
        needed = (self.shape.hidden_size, layers, self.taps)
        if seen != needed:
            raise TargetError(
                f"the target has (hidden, layers, taps) = {seen}, the drafter was trained for "
                f"{needed}; use the target it was trained with"
            )
        if not isinstance(target, Target) or self.target_digest in (None, target_digest(target)):
            return ""
        said = f"the weights of {self.config.target.path} are not those that the drafter was trained with"
        if self.target_named:
            return f"{said}: this is another target, and it will accept fewer of its drafts"
        raise TargetError(
            f"{said}; restore them, or train a drafter for this target (`draftline eval` tries it all "
            f"the same with target.path={self.config.target.path})"
        )


def restore(path: Path, overrides: Sequence[str] = ()) -> Restored:
    """The newest checkpoint of run directory `path`, the checkpoint `path` itself, or the drafter that
    lies there in the z-lab layout, whoever exported it. Of a checkpoint the drafter alone is read.

    `overrides` change the configuration; an exported drafter needs target.path among them. Raises
    CheckpointError or ConfigError; CheckpointError too where the newest is damaged, since another one's
    numbers would pass for its.
    """
    names = _names(path)
    # A checkpoint that has lost one of these is a damaged checkpoint all the same.
    if {"state.json", "state.json.sha256", "drafter.safetensors"} & names:
        return _trained(path, path, overrides)
    if "checkpoints" in names:
        return _newest(path, overrides)
    if "config.json" in names:
        return _exported(path, overrides)
    if "config.yaml" in names:
        raise CheckpointError(f"{path} is a run without a checkpoint yet")
    raise ConfigError(f"{path} is none of these: {_WHAT}; give one")


def _newest(run: Path, overrides: Sequence[str]) -> Restored:
    paths = checkpoint_paths(run / "checkpoints")
    if not paths:
        raise CheckpointError(f"no checkpoint in {run / 'checkpoints'}")
    try:
        return _trained(run, paths[0], overrides)
    except CheckpointError as error:
        instead = f"; to take the one before it, give {paths[1]}" if len(paths) > 1 else ""
        raise CheckpointError(f"{error}{instead}") from None


def _trained(given: Path, path: Path, overrides: Sequence[str]) -> Restored:
    _check_overrides(overrides, _FREE_KEYS, given)
    checkpoint: Checkpoint = load_checkpoint(path, only=("drafter",))
    state, tensors = checkpoint.state, dict(checkpoint.tensors["drafter"])
    return Restored(
        path=path,
        step=state.step,
        config=build_config(state.config.model_dump(mode="json"), overrides),
        shape=state.shape,
        taps=state.taps,
        num_target_layers=state.num_target_layers,
        token_ids=tensors.pop("token_ids", None),
        tensors=tensors,
        total_steps=state.total_steps,
        target_digest=digest_in(state.features),
        target_named=any(item.startswith("target.path=") for item in overrides),
    )


def _exported(path: Path, overrides: Sequence[str]) -> Restored:
    _check_overrides(overrides, (*_FREE_KEYS, *_UNSAID_KEYS), path)
    drafter, taps, token_ids = load_zlab(path)
    if not any(item.startswith("target.path=") for item in overrides):
        raise ConfigError(
            f"{path} is an exported drafter, which does not say where its target is; add target.path=PATH"
        )
    said = read_config(path)
    shape, tensors = drafter.shape, drafter.state_dict()
    if folded := said["dflash_config"].get("embedding_scale_folded"):
        # As it was trained: what decodes here multiplies the embeddings.
        tensors = fold_embedding_scale(tensors, 1 / folded)
        shape = DrafterShape(**{**shape.to_dict(), "rms_norm_eps": shape.rms_norm_eps * folded**2})
    tree = {
        "target": {"tap_layers": list(taps)},
        "block_size": shape.block_size,
        "token_budget": MOST_TOKENS,
        # A configuration must name these; they say nothing of the training, which nobody knows.
        "data": {"train": [str(path)], "heldout": None},
        "train": {"steps": 1},
    }
    return Restored(
        path=path,
        step=None,
        config=build_config(tree, overrides),
        shape=shape,
        taps=taps,
        num_target_layers=said.get(
            "num_target_layers", said["dflash_config"].get("num_target_layers")
        ),
        token_ids=token_ids,
        tensors={**tensors, "feature_scale": drafter.feature_scale},
    )


def _check_overrides(overrides: Sequence[str], free: tuple[str, ...], path: Path) -> None:
    if fixed := [item for item in overrides if not item.startswith(free)]:
        names = ", ".join(key.rstrip("=") + "*" * key.endswith(".") for key in free)
        raise ConfigError(
            f"{', '.join(fixed)}: fixed by the training of {path}; only {names} can be changed afterwards"
        )


def _names(path: Path) -> set[str]:
    """What lies in `path`; raises ConfigError where that cannot be seen."""
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give {_WHAT}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give {_WHAT}") from None
