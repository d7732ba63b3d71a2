"""The sections that say on what: the conversations, and the features that the target gives of them."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftline.config.section import MOST_TOKENS, Section, expanded


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


class FeatureSection(Section):
    source: Literal["online", "memory", "disk"] = Field(
        "online",
        description="online runs the target every step; memory and disk compute every feature once.",
    )
    dir: str | None = Field(None, description="Folder of the disk cache; null: inside run.dir.")
    noise: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Deviation of Gaussian noise on features: absolute, or in units of each "
        "channel's scale with drafter.feature_scale.",
    )

    _paths = field_validator("dir")(expanded)

    @model_validator(mode="after")
    def _check(self) -> FeatureSection:
        if self.dir is not None and self.source != "disk":
            raise ValueError(
                f"features.dir={self.dir} clashes with features.source={self.source}: only the "
                "disk cache has a folder"
            )
        return self
