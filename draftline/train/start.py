"""What a run starts from: its feature source and its first drafter."""

from __future__ import annotations

from draftline.choices import Choices
from draftline.config import Config
from draftline.model.drafter import Drafter
from draftline.model.init import init_drafter, measure_feature_scale
from draftline.train.features import FeatureSource
from draftline.train.inputs import Inputs

# Conversations on which the feature scale is measured.
_SCALE_SAMPLES = 32


def feature_source(config: Config, inputs: Inputs) -> FeatureSource:
    """The source of features that `config` asks for, not yet filled."""
    return FeatureSource(
        inputs.target,
        last_hidden=config.loss.soft_labels > 0,
        batch_tokens=config.token_budget,
        most=config.max_batch_size,
    )


def first_drafter(
    config: Config, inputs: Inputs, source: FeatureSource, choices: Choices
) -> Drafter:
    """The drafter that a run of `config` starts from: float32, feature scale measured."""
    drafter = init_drafter(
        inputs.shape,
        inputs.target,
        init=config.drafter.init,
        seed=config.run.seed,
        choices=choices,
    )
    if config.drafter.feature_scale:
        spread = inputs.samples[:: max(1, len(inputs.samples) // _SCALE_SAMPLES)]
        features = source.measure(spread[:_SCALE_SAMPLES])
        drafter.feature_scale.copy_(measure_feature_scale(features))
    return drafter
