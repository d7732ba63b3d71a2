"""What a run knows beside its tensors, as `state.json` of a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import CheckpointError, ConfigError
from draftline.model.drafter.backbone import DrafterShape


@dataclass(frozen=True, slots=True)
class RunState:
    """The state after `step` steps, of `total_steps`, in `seconds` of training.

    `shape`, `taps` and `num_target_layers` say which drafter it is and for what target; `features` is
    the identity of the features that it is trained on (see `feature_key`). The next step begins at pack
    `next_pack` of `epoch`, which is number `next_number` of the run. `provenance` says which code ran.
    """

    step: int
    config: Config
    shape: DrafterShape
    taps: tuple[int, ...]
    num_target_layers: int
    features: str
    epoch: int
    next_pack: int
    next_number: int
    packs_per_step: int
    total_steps: int
    seconds: float
    provenance: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """As plain values, with the configuration's digest beside it."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest(),
            "shape": self.shape.to_dict(),
            "taps": list(self.taps),
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RunState:
        """What `to_json` gave, of this release or an earlier one: a key that is not there has its default.

        Raises CheckpointError for one that another version wrote in another form.
        """
        try:
            given = {f.name: tree[f.name] for f in fields(cls) if f.name in tree or _needed(f)}
            return cls(
                **given
                | {
                    "config": build_config(tree["config"]),
                    "shape": DrafterShape(**tree["shape"]),
                    "taps": tuple(tree["taps"]),
                }
            )
        except (KeyError, TypeError, ConfigError) as error:
            commit = (tree.get("provenance") or {}).get("commit") or "unknown"
            raise CheckpointError(
                f"step {tree.get('step')} was written by another version of draftline: "
                f"{type(error).__name__}: {error}; use the one that wrote it (commit {commit})"
            ) from None


def _needed(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
