"""A trained drafter read back from a run or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.checkpoint.store import Checkpoint, checkpoint_paths, load_checkpoint
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.target.identity import digest_in, target_digest
from draftline.model.target.target import Target

_FREE_KEYS = ("evaluate.", "run.", "target.path=", "target.dtype=", "data.template", "data.date=")


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint with its configuration; weights stay on the CPU until `drafter()`."""

    checkpoint: Checkpoint
    config: Config
    shape: DrafterShape
    taps: tuple[int, ...]
    num_target_layers: int
    token_ids: Tensor | None
    target_named: bool = False

    def drafter(self, device: torch.device, dtype: torch.dtype) -> Drafter:
        """The drafter to evaluate (the averaged weights where the run averaged)."""
        drafter = Drafter(self.shape)
        tensors = dict(self.checkpoint.tensors["drafter"])
        tensors.pop("token_ids", None)
        drafter.feature_scale.copy_(tensors.pop("feature_scale"))
        try:
            drafter.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"{self.checkpoint.path}: {error}") from None
        return drafter.to(device=device, dtype=dtype).requires_grad_(False)

    def check_target(self, target: Target) -> str:
        """What to warn of: another target that was asked for by its path, "" for the one trained with.

        Raises TargetError where it was not asked for, and where it is not shaped like that one.
        """
        seen = (target.hidden_size, target.num_layers, target.taps)
        needed = (self.shape.hidden_size, self.num_target_layers, self.taps)
        if seen != needed:
            raise TargetError(
                f"the target has (hidden, layers, taps) = {seen}, the drafter was trained for "
                f"{needed}; use the target it was trained with"
            )
        if self.target_digest in (None, target_digest(target)):
            return ""
        said = f"the weights of {self.config.target.path} are not those that the drafter was trained with"
        if self.target_named:
            return f"{said}: this is another target, and it will accept fewer of its drafts"
        raise TargetError(
            f"{said}; restore them, or train a drafter for this target (`draftline eval` tries it all "
            f"the same with target.path={self.config.target.path})"
        )

    @property
    def target_digest(self) -> str | None:
        """Of the target trained with; None where an earlier draftline did not note it."""
        return digest_in(self.checkpoint.state.get("features", ""))


def restore(path: Path, overrides: list[str] | None = None) -> Restored:
    """The newest checkpoint of run directory `path`, or the checkpoint `path` itself.

    `overrides` change its configuration. Raises CheckpointError or ConfigError; CheckpointError too where
    the newest is damaged, since another one's numbers would pass for its.
    """
    fixed = [o for o in overrides or [] if not o.startswith(_FREE_KEYS)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: fixed by the training of {path}; only evaluate.*, run.*, "
            "target.path, target.dtype, data.template and data.date can be changed afterwards"
        )
    names = _names(path)
    # A checkpoint that has lost one of these is a damaged checkpoint all the same.
    if {"state.json", "state.json.sha256", "drafter.safetensors"} & names:
        checkpoint = load_checkpoint(path)
    elif "checkpoints" in names:
        checkpoint = _newest(path / "checkpoints")
    else:
        if "config.yaml" in names:
            raise CheckpointError(f"{path} is a run without a checkpoint yet")
        raise ConfigError(f"{path} is neither a run directory nor a checkpoint; give one of these")
    state: dict[str, Any] = checkpoint.state
    try:
        return Restored(
            checkpoint=checkpoint,
            config=build_config(state["config"], overrides or []),
            shape=DrafterShape(**state["shape"]),
            taps=tuple(state["taps"]),
            num_target_layers=int(state["num_target_layers"]),
            token_ids=checkpoint.tensors["drafter"].get("token_ids"),
            target_named=any(o.startswith("target.path=") for o in overrides or []),
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} was written by another version of draftline: {error}"
        ) from None


def _newest(directory: Path) -> Checkpoint:
    paths = checkpoint_paths(directory)
    if not paths:
        raise CheckpointError(f"no checkpoint in {directory}")
    try:
        return load_checkpoint(paths[0])
    except CheckpointError as error:
        instead = f"; to take the one before it, give {paths[1]}" if len(paths) > 1 else ""
        raise CheckpointError(f"{error}{instead}") from None


def _names(path: Path) -> set[str]:
    """What lies in `path`; raises ConfigError where that cannot be seen."""
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a run directory or a checkpoint") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give a run directory or a checkpoint"
        ) from None
