"""The typed, strict configuration of a run: one YAML file plus dotted overrides.

Every key has a type, a default that runs on one CPU where that is possible, and a description; the
descriptions are what `draftline config schema` prints. Unknown keys are errors that name the nearest
right key. `None` (YAML `null`) always means off or "choose for me", as the description says.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftline.errors import ConfigError


class _Section(BaseModel):
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
            raise PydanticCustomError(
                "flag", "Input should not be a flag; null is what turns a key off"
            )
        return value


class RunSection(_Section):
    dir: str = Field("runs/draftline", description="Run directory: log, metrics, checkpoints.")
    seed: int = Field(0, ge=0, description="Seeds initialisation, data order, anchors and noise.")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto takes cuda:0 where there is one, else cpu; the choice is recorded.",
    )
    strict_choices: bool = Field(
        False, description="Make every recorded fallback an error instead of a warning."
    )


class TargetSection(_Section):
    path: str = Field(
        description="Directory or hub name of a Hugging Face causal LM, a .gguf file, or builtin:smollm2."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 on CUDA, float32 on CPU."
    )
    num_taps: int = Field(5, ge=1, description="Layers read, spread by the z-lab rule.")
    tap_layers: list[int] | None = Field(
        None, description="Explicit 0-based layer ids (z-lab target_layer_ids) instead of num_taps."
    )
    trust_remote_code: bool = Field(False, description="Passed to transformers.")


class DrafterSection(_Section):
    layers: int = Field(5, ge=1, description="Drafter decoder layers.")
    num_heads: int | None = Field(None, ge=1, description="Query heads; null copies the target.")
    num_kv_heads: int | None = Field(None, ge=1, description="KV heads; null copies the target.")
    head_dim: int | None = Field(None, ge=2, description="Head size; null copies the target.")
    intermediate_size: int | None = Field(None, ge=1, description="MLP width; null: the target's.")
    rope_theta: float | None = Field(
        None, gt=0, description="RoPE base of the drafter; null copies the target's plain base."
    )
    sliding_layers: int = Field(
        0, ge=0, description="How many of the first layers use causal sliding-window attention."
    )
    sliding_window: int | None = Field(
        None, ge=1, description="Window of the sliding layers, in tokens, current one included."
    )
    mask_token_id: int | None = Field(
        None, ge=0, description="Embedding row of a masked slot; null: the rule in docs/data.md."
    )
    init: Literal["scratch", "target"] = Field(
        "scratch", description="target copies the target's last layers where shapes allow."
    )
    feature_scale: bool = Field(
        True,
        description="Train fc on features divided by a per-channel scale measured on the data; "
        "folded into fc.weight at export.",
    )
    vocab_size: int | None = Field(
        None,
        ge=2,
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


class LossSection(_Section):
    kind: Literal["decay", "dpace"] = Field(
        "decay",
        description="Slot weights: decay is exp(-(slot-1)/gamma); dpace follows the block's own "
        "acceptance (D-PACE, arXiv 2605.18810).",
    )
    gamma: float | None = Field(
        None, gt=0, description="Decay of `decay`; null takes 1 + 3/8 block_size."
    )
    alpha: float = Field(0.5, ge=0, le=1, description="Smoothing of `dpace`.")
    soft_labels: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of forward KL against the target's distribution (0: hard labels only, "
        "1: KL only). Needs the target's last hidden state, so the whole target runs.",
    )
    chunk_rows: int = Field(
        4096, ge=1, description="Rows whose logits exist at once; memory is chunk_rows * vocab."
    )

    @model_validator(mode="after")
    def _check(self) -> LossSection:
        if self.kind == "dpace" and self.gamma is not None:
            raise ValueError(
                f"loss.gamma={self.gamma} clashes with loss.kind=dpace: dpace derives its weights "
                "from the block, set loss.alpha instead"
            )
        return self


class DataSection(_Section):
    train: list[str] = Field(
        min_length=1, description="Conversation files, or builtin:demo-train. Globs are expanded."
    )
    max_length: int = Field(
        2048, ge=2, description="Longest conversation in tokens; longer is cut."
    )
    template: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the chat template."
    )


class FeatureSection(_Section):
    source: Literal["online", "memory", "disk"] = Field(
        "online",
        description="online runs the target every step; memory and disk compute every feature once.",
    )
    dir: str | None = Field(None, description="Folder of the disk cache; null: inside run.dir.")
    noise: float = Field(
        0.0, ge=0, description="Gaussian noise on features, in units of the channel scale."
    )

    @model_validator(mode="after")
    def _check(self) -> FeatureSection:
        if self.dir is not None and self.source != "disk":
            raise ValueError(
                f"features.dir={self.dir} clashes with features.source={self.source}: only the "
                "disk cache has a folder"
            )
        return self


class TrainSection(_Section):
    steps: int | None = Field(None, ge=1, description="Optimizer steps; give this or epochs.")
    epochs: float | None = Field(None, gt=0, description="Passes over the data; or give steps.")
    learning_rate: float = Field(6e-4, gt=0, description="Peak learning rate of AdamW.")
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="Share of steps of linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Floor of the cosine, of the peak.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay (matrices only).")
    clip: float | None = Field(1.0, gt=0, description="Global gradient norm; null: no clipping.")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of an average of the weights that is evaluated and "
        "exported instead of the last ones; null: no average.",
    )
    log_every: int = Field(10, ge=1, description="Steps between metrics.")
    checkpoint_every: int = Field(500, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=2, description="Newest checkpoints kept.")
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        ["tensorboard"], description="Besides the JSONL metrics."
    )

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"train.steps={self.steps} clashes with train.epochs={self.epochs}: give one of them"
            )
        if self.steps is None and self.epochs is None:
            raise ValueError("train.steps or train.epochs is needed: give one of them")
        return self


class EvaluateSection(_Section):
    prompts: dict[str, str] = Field(
        default_factory=dict, description="Name -> prompt file (or builtin:demo-heldout)."
    )
    temperatures: list[float] = Field(default_factory=lambda: [0.0], description="One table each.")
    max_new_tokens: int = Field(256, ge=1, description="Tokens generated a prompt.")
    batch_size: int = Field(8, ge=1, description="Prompts decoded together.")
    limit: int | None = Field(None, ge=1, description="First prompts of each file; null: all.")
    plain: bool = Field(True, description="Also decode without the drafter: speed and identity.")

    @model_validator(mode="after")
    def _check(self) -> EvaluateSection:
        bad = [t for t in self.temperatures if t < 0]
        if bad:
            raise ValueError(f"evaluate.temperatures={bad}: a temperature is 0 or more")
        return self


class Config(_Section):
    """The whole configuration. The four top keys carry the reference set-up's names."""

    run: RunSection = Field(default_factory=RunSection)
    target: TargetSection
    drafter: DrafterSection = Field(default_factory=DrafterSection)
    block_size: int = Field(16, ge=2, description="Tokens of a block, the anchor included.")
    token_budget: int = Field(8192, ge=2, description="Tokens of a pack: the step's fixed length.")
    max_batch_size: int = Field(64, ge=1, description="Most conversations in a pack.")
    max_anchors: int = Field(
        512, ge=1, description="Anchor slots of a pack: the step's fixed width."
    )
    loss: LossSection = Field(default_factory=LossSection)
    data: DataSection
    features: FeatureSection = Field(default_factory=FeatureSection)
    train: TrainSection
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.data.max_length > self.token_budget:
            raise ValueError(
                f"data.max_length={self.data.max_length} clashes with token_budget="
                f"{self.token_budget}: a whole conversation must fit into a pack"
            )
        if self.block_size > self.data.max_length:
            raise ValueError(
                f"block_size={self.block_size} clashes with data.max_length="
                f"{self.data.max_length}: a block must fit into a conversation"
            )
        if self.max_anchors > self.token_budget:
            raise ValueError(
                f"max_anchors={self.max_anchors} clashes with token_budget={self.token_budget}: "
                "there are not that many positions"
            )
        return self

    @property
    def gamma(self) -> float:
        """The slot decay in force: `loss.gamma`, or 1 + 3/8 of the block size.

        That line passes through the paper's 4 at block 8 and 7 at block 16 and gives 4.75 at
        block 10, where the paper has 5 (DFlash, arXiv 2602.06036, App. A.1).
        """
        return self.loss.gamma if self.loss.gamma is not None else 1 + 0.375 * self.block_size

    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the effective configuration."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def canonical(self) -> str:
        """The effective configuration as JSON with sorted keys."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def to_yaml(self) -> str:
        """The effective configuration as YAML in the order of this file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys; a configuration must not."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"line {line}: a key must be a plain word; put quotes around {{{{ }}}}"
            )
        if key_node.value in seen:
            raise ConfigError(f"line {line}: key {key_node.value!r} stands twice; keep one of them")
        seen.add(key_node.value)
    loader.flatten_mapping(node)  # after the check: a key may override one that << merges in
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with dotted `key=value` overrides applied, checked whole.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type, clashing keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config {path} does not exist; see configs/ for examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path} holds {type(tree).__name__}, not a mapping of keys")
    return build_config(tree, overrides)


def build_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from nested mappings and dotted overrides; raises ConfigError."""
    merged: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    for item in overrides:
        _apply_override(merged, item)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, sections before their keys."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Dotted key -> (old value, new value) wherever two configuration trees differ."""
    changed: dict[str, Any] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed |= changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed[prefix + key] = (before, after)
    return changed


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {item!r} is not key=value, such as train.steps=200")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: the value is not YAML: {error}") from None
    node = tree
    *sections, leaf = key.split(".")
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {section} is a value, not a section")
        node = child
    node[leaf] = value


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}{_suggest(key)}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing and has no default")
        elif item["type"] == "value_error":
            lines.append(str(item["ctx"]["error"]))
        else:
            lines.append(f"{key}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "configuration: " + "; ".join(lines)


def _suggest(key: str) -> str:
    keys = list(known_keys())
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    near = same_leaf or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        by_leaf = {k.rsplit(".", 1)[-1]: k for k in keys}
        near = [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)]
    return f"; did you mean {near[0]}?" if near else "; see `draftline config schema`"


class KeyHelp(BaseModel):
    """One line of the schema for people."""

    name: str
    type: str
    default: str
    meaning: str


def describe_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[KeyHelp]:
    """Every key with its type, default and meaning, in the order of the file."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from describe_keys(annotation, f"{prefix}{name}.")
            continue
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        default = (
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True))
        )
        yield KeyHelp(
            name=prefix + name,
            type=kind.replace("typing.", ""),
            default=default,
            meaning=field.description or "",
        )
