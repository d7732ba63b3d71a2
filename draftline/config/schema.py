"""The typed, strict configuration of a run.

Unknown keys are errors that name the nearest right key; the keys themselves are described in
`model.py`, `data.py` and `running.py`.
"""

from __future__ import annotations

import hashlib
import json
import math

import yaml
from pydantic import Field, model_validator

from draftline.config.data import DataSection, FeatureSection
from draftline.config.model import DrafterSection, LossSection, TargetSection
from draftline.config.running import (
    EvaluateSection,
    RunSection,
    SignalSection,
    TopologySection,
    TrainSection,
)
from draftline.config.section import MOST_TOKENS, Section

# Rows of a tile of the block mask (model/drafter/masks.py, which a configuration does not import).
_TILE_ROWS = 128


class Config(Section):
    """The whole configuration. The four top keys carry the reference set-up's names."""

    run: RunSection = Field(default_factory=RunSection)
    topology: TopologySection = Field(default_factory=TopologySection)
    target: TargetSection
    drafter: DrafterSection = Field(default_factory=DrafterSection)
    block_size: int = Field(
        16, ge=2, le=4096, description="Tokens of a block, the anchor included."
    )
    token_budget: int = Field(
        8192, ge=2, le=MOST_TOKENS, description="Tokens of a pack: the step's fixed length."
    )
    max_batch_size: int = Field(
        64, ge=1, le=MOST_TOKENS, description="Most conversations in a pack."
    )
    max_anchors: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="Anchor slots of a pack: the step's fixed width. null: a sixth of token_budget, in "
        "whole tiles and loss chunks.",
    )
    loss: LossSection = Field(default_factory=LossSection)
    data: DataSection
    features: FeatureSection = Field(default_factory=FeatureSection)
    train: TrainSection
    signal: SignalSection = Field(default_factory=SignalSection)
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
        if self.max_anchors is not None and self.max_anchors > self.token_budget:
            raise ValueError(
                f"max_anchors={self.max_anchors} clashes with token_budget={self.token_budget}: "
                "there are not that many positions"
            )
        return self

    @property
    def anchors(self) -> int:
        """Anchor slots of a pack: `max_anchors`, or a sixth of the budget.

        That is the 512 for 3,072 tokens of the paper (DFlash, arXiv 2602.06036, App. A.1), rounded
        down so that rows fill whole tiles of the mask and blocks divide into equal loss chunks.
        """
        if self.max_anchors is not None:
            return self.max_anchors
        tile = _TILE_ROWS // math.gcd(_TILE_ROWS, self.block_size)
        per_chunk = max(1, self.loss.chunk_rows // (self.block_size - 1))
        anchors = max(1, self.token_budget // 6)
        # Fewer anchors may need fewer chunks, which then divide other numbers.
        while rest := anchors % (tile * -(-anchors // per_chunk)):
            if rest == anchors:
                break  # less than one unit: as it is
            anchors -= rest
        return anchors

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
