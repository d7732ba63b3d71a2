"""The sections that say where and how a run goes: its directory and devices, steps, signal, evaluation."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from draftline.config.section import MOST, MOST_STEPS, MOST_TOKENS, Section, expanded


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


class TrainSection(Section):
    steps: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="Optimizer steps; give this or epochs."
    )
    epochs: float | None = Field(
        None, gt=0, le=1e6, description="Passes over the data; or give steps."
    )
    packs_per_step: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Packs whose gradients one step averages, over all drafters and machines; null: "
        "one per drafter.",
    )
    learning_rate: float = Field(6e-4, gt=0, le=1e3, description="Peak learning rate of AdamW.")
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="Share of steps of linear warm-up.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Floor of the cosine, of the peak.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    weight_decay: float = Field(
        0.0, ge=0, le=1e3, description="AdamW weight decay (matrices only)."
    )
    clip: float | None = Field(
        1.0, gt=0, le=1e30, description="Global gradient norm; null: no clipping."
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of an average of the weights that is evaluated and "
        "exported instead of the last ones; null: no average.",
    )
    log_every: int = Field(10, ge=1, le=MOST, description="Steps between metrics.")
    eval_every: int = Field(
        500,
        ge=1,
        le=MOST,
        description="Steps between two measurements on data.heldout; the last step has one too.",
    )
    checkpoint_every: int = Field(500, ge=1, le=MOST, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=2, le=MOST, description="Newest checkpoints kept.")
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
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={list(self.betas)}: each is at least 0 and under 1")
        return self


class SignalSection(Section):
    launch_steps: int = Field(
        300,
        ge=1,
        le=MOST,
        description="Steps after the warm-up that belong to the launch: memory that moves in them means "
        "a broken launch.",
    )
    on_volatile: Literal["stop", "warn"] | None = Field(
        None,
        description="What follows when this program's memory is not flat; null: stop in the launch, "
        "warn later.",
    )
    hz: float = Field(
        5.0,
        ge=1e-3,
        le=100,
        description="Samples of device memory a second, by a thread of its own.",
    )
    notify: list[str] | None = Field(
        None,
        min_length=1,
        description="Program and arguments that get each finding about memory on standard input.",
    )


class EvaluateSection(Section):
    prompts: dict[str, str] = Field(
        default_factory=dict, description="Name -> prompt file (or builtin:demo-heldout)."
    )
    temperatures: list[float] = Field(
        default_factory=lambda: [0.0], description="0 is greedy; each has its rows in the table."
    )
    max_new_tokens: int = Field(
        256, ge=1, le=MOST_TOKENS, description="Tokens generated per prompt."
    )
    batch_size: int = Field(8, ge=1, le=MOST_TOKENS, description="Prompts decoded together.")
    limit: int | None = Field(
        None, ge=1, le=MOST, description="First prompts of each file; null: all."
    )
    plain: bool = Field(True, description="Also decode without the drafter: speed and identity.")

    _paths = field_validator("prompts")(expanded)

    @model_validator(mode="after")
    def _check(self) -> EvaluateSection:
        bad = [t for t in self.temperatures if not 0 <= t <= 1e6]
        if bad:
            raise ValueError(f"evaluate.temperatures={bad}: a temperature is 0 or more, to 1e6")
        return self
