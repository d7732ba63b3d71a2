"""The sections that say what is trained: the target, the drafter, the loss.

The descriptions are what `draftline config schema` prints. `None` (YAML `null`) always means off or
"choose for me", as the description says.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftline.config.section import MOST, MOST_TOKENS, Section, expanded


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
