"""The sections of a configuration: every key with its type, default and description.

The descriptions are what `draftline config schema` prints. `None` (YAML `null`) always means off or
"choose for me", as the description says.
"""

from __future__ import annotations

import datetime
import os
import re
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

# What counts fit into wherever they go: 32-bit indices of kernels, 64-bit seeds, eight digits of a
# checkpoint's name. Beyond these a number is a slip, and would be a traceback from deep inside.
MOST = 2**31 - 1
MOST_TOKENS = 2**24
MOST_STEPS = 10**8 - 1


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and off as flags, and pydantic reads a flag as 1 or 0.
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation is not bool
        ):
            raise PydanticCustomError("flag", "a flag where none may be")
        return value


def expanded(value: Any) -> Any:
    """A path, or every path of a list or mapping, with `~` expanded; blanks alone are refused."""
    if isinstance(value, str):
        if not value.strip():
            raise PydanticCustomError("blank", "a path of no characters")
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [expanded(item) for item in value]
    return {k: expanded(v) for k, v in value.items()} if isinstance(value, dict) else value


class RunSection(Section):
    dir: str = Field("runs/draftline", description="Run directory: log, metrics, checkpoints.")
    seed: int = Field(
        0, ge=0, le=2**63 - 1, description="Seeds initialisation, data order, anchors and noise."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        examples=["auto", "cpu", "cuda", "cuda:0"],
        description="Device of eval and bench step (auto: cuda:0 where there is one, else cpu), and of "
        "both sides of a training whose topology names none (auto: all GPUs).",
    )
    strict_choices: bool = Field(
        False, description="Make every recorded fallback an error instead of a warning."
    )

    _paths = field_validator("dir")(expanded)


class TopologySection(Section):
    targets: Literal["auto"] | list[str] = Field(
        "auto",
        description="One worker per entry: cpu, cuda:N, or cuda:A+cuda:B for a target that spans "
        "devices. A device may be named more than once.",
    )
    drafters: Literal["auto"] | list[str] = Field(
        "auto", description="One worker per entry: cpu or cuda:N. A device may be named again."
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Packs that may wait for one drafter; null: 2, or 1 where it shares its device "
        "with every target.",
    )
    reduction: Literal["auto", "nccl", "ordered"] = Field(
        "auto",
        description="How the drafters of one machine sum gradients: nccl needs one GPU each; "
        "ordered adds them in the drafters' order.",
    )
    check_every: int = Field(
        100,
        ge=1,
        le=MOST,
        description="Steps between comparisons of the drafters' parameter checksums.",
    )
    deadline_s: float = Field(
        600.0,
        ge=1,
        le=1e6,
        description="Seconds without progress after which a worker counts as hung.",
    )

    @field_validator("targets", "drafters", mode="before")
    @classmethod
    def _refuse_a_bare_name(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and value != "auto":
            raise ValueError(
                f"topology.{info.field_name}={value}: give a list, [{value}] for one worker, or auto"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> TopologySection:
        for key, names in (("targets", self.targets), ("drafters", self.drafters)):
            if names == "auto":
                continue
            if not names:
                raise ValueError(f"topology.{key}=[]: at least one worker is needed, or auto")
            spans = (
                r"(cpu|cuda:\d{1,3}(\+cuda:\d{1,3})*)"
                if key == "targets"
                else r"(cpu|cuda:\d{1,3})"
            )
            bad = [name for name in names if not re.fullmatch(spans, name)]
            if bad:
                wanted = "cpu, cuda:N or cuda:A+cuda:B" if key == "targets" else "cpu or cuda:N"
                raise ValueError(f"topology.{key}={bad}: an entry is {wanted}")
        return self


class TargetSection(Section):
    path: str = Field(
        description="Directory or hub name of a Hugging Face causal LM, a .gguf file, or builtin:smollm2."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 on CUDA, float32 on CPU."
    )
    num_taps: int = Field(5, ge=1, le=4096, description="Layers read, spread by the z-lab rule.")
    tap_layers: list[int] | None = Field(
        None, description="Explicit 0-based layer ids (z-lab target_layer_ids) instead of num_taps."
    )
    trust_remote_code: bool = Field(False, description="Run the code that the target brings.")
    batches: list[tuple[int, int]] | None = Field(
        None,
        description="The (rows, length) shapes of target forwards; null derives a table from the "
        "data's lengths.",
    )
    capture: Literal["auto", "always", "never"] = Field(
        "auto",
        description="CUDA graphs for target forwards; auto measures whether the host is what limits "
        "them, and records the choice.",
    )

    _paths = field_validator("path")(expanded)

    @field_validator("batches", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        pairs = isinstance(value, list) and all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
        )
        if value is not None and not pairs:
            raise ValueError(
                f"target.batches={value}: give a list of [rows, length] pairs, such as "
                "[[8, 512], [1, 2048]], or null"
            )
        return value


class DrafterSection(Section):
    layers: int = Field(5, ge=1, le=4096, description="Drafter decoder layers.")
    num_heads: int | None = Field(
        None, ge=1, le=65536, description="Query heads; null copies the target."
    )
    num_kv_heads: int | None = Field(
        None, ge=1, le=65536, description="KV heads; null copies the target."
    )
    head_dim: int | None = Field(
        None, ge=2, le=65536, description="Head size; null copies the target."
    )
    intermediate_size: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="MLP width; null: the target's."
    )
    rope_theta: float | None = Field(
        None,
        ge=1e-6,
        le=1e15,
        description="RoPE base of the drafter; null copies the target's plain base.",
    )
    sliding_layers: int = Field(
        0,
        ge=0,
        le=4096,
        description="How many of the first layers use causal sliding-window attention.",
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="Window of the sliding layers, in tokens, current one included.",
    )
    mask_token_id: int | None = Field(
        None,
        ge=0,
        le=MOST,
        description="Embedding row of a masked slot; null: the rule in docs/data.md.",
    )
    init: Literal["scratch", "target"] = Field(
        "scratch", description="target copies the target's last layers where shapes allow."
    )
    feature_scale: bool = Field(
        False,
        description="Train fc on features divided by a per-channel scale measured on the data; "
        "folded into fc.weight at export.",
    )
    vocab_size: int | None = Field(
        None,
        ge=2,
        le=MOST,
        description="Draft only the most frequent tokens of the training answers (a d2t map is "
        "exported); null drafts the whole vocabulary.",
    )

    @model_validator(mode="after")
    def _check(self) -> DrafterSection:
        if self.sliding_layers > self.layers:
            raise ValueError(
                f"drafter.sliding_layers={self.sliding_layers} clashes with "
                f"drafter.layers={self.layers}: there are not that many layers"
            )
        if (self.sliding_layers > 0) != (self.sliding_window is not None):
            raise ValueError(
                f"drafter.sliding_layers={self.sliding_layers} clashes with "
                f"drafter.sliding_window={self.sliding_window}: set both or neither"
            )
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"drafter.num_heads={self.num_heads} clashes with drafter.num_kv_heads="
                f"{self.num_kv_heads}: query heads must be a multiple of KV heads"
            )
        if self.head_dim and self.head_dim % 2:
            raise ValueError(f"drafter.head_dim={self.head_dim}: RoPE needs an even head size")
        return self


class LossSection(Section):
    kind: Literal["decay", "dpace"] = Field(
        "decay",
        description="Slot weights: decay is exp(-(slot-1)/gamma); dpace follows the block's own "
        "acceptance (D-PACE, arXiv 2605.18810).",
    )
    gamma: float | None = Field(
        None, ge=1e-3, le=1e6, description="gamma of kind decay; null takes 1 + 3/8 block_size."
    )
    alpha: float = Field(0.5, ge=0, le=1, description="Smoothing of kind dpace.")
    soft_labels: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of forward KL against the target's distribution (0: hard labels only, "
        "1: KL only). Needs the target's last hidden state, so the whole target runs.",
    )
    chunk_rows: int = Field(
        4096,
        ge=1,
        le=MOST,
        description="Rows whose logits exist at once; memory is chunk_rows * vocab.",
    )

    @model_validator(mode="after")
    def _check(self) -> LossSection:
        if self.kind == "dpace" and self.gamma is not None:
            raise ValueError(
                f"loss.gamma={self.gamma} clashes with loss.kind=dpace: dpace derives its weights "
                "from the block, set loss.alpha instead"
            )
        return self


class DataSection(Section):
    train: list[str] = Field(
        min_length=1, description="Conversation files, or builtin:demo-train. Globs are expanded."
    )
    heldout: float | list[str] | None = Field(
        0.02,
        description="What training measures itself on and never sees: a share of the conversations (at "
        "most 64 of them), or files; null: nothing.",
    )
    max_length: int = Field(
        2048, ge=2, le=MOST_TOKENS, description="Longest conversation in tokens; longer is cut."
    )
    template: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the chat template."
    )
    date: datetime.date | None = Field(
        None,
        description="Day that the chat template writes, where it writes one; null: the day on which "
        "the run starts, kept when it is resumed.",
    )

    _paths = field_validator("train", "heldout")(expanded)

    @field_validator("heldout", mode="after")
    @classmethod
    def _a_share_or_files(cls, value: float | list[str] | None) -> float | list[str] | None:
        if isinstance(value, float) and not 0 < value <= 0.5:
            raise ValueError(
                f"data.heldout={value:g}: a share is above 0 and at most 0.5; null holds out nothing"
            )
        if value == []:
            raise ValueError("data.heldout=[]: name at least one file, give a share, or null")
        return value
