"""Which worker a run gets, in which shapes, and what the first drafter's scale is measured on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.data.packing import Pack
from draftline.errors import ConfigError
from draftline.model.drafter.init import measure_feature_scale
from draftline.train.features.cache import CachedFeatures, FeatureCache, measure
from draftline.train.features.forwards import TargetForwards
from draftline.train.plan.start import batch_table, feature_worker, first_drafter
from tests.support.tiny import CPU, build_samples, build_shape, build_target

LENGTHS = (9, 30, 4, 17, 25) * 20


def build(**changes: Any) -> tuple[Config, Any, Any]:
    values: dict[str, Any] = {
        "target": {"path": "x"},
        "data": {"train": ["x"], "max_length": 32},
        "train": {"steps": 1},
        "token_budget": 64,
        "max_anchors": 8,
        "block_size": 4,
    }
    target = build_target()
    inputs = SimpleNamespace(
        samples=tuple(build_samples(LENGTHS)), shape=build_shape(target), token_ids=None
    )
    return Config.model_validate(values | changes), inputs, target


def test_the_shapes_are_the_users_or_fit_the_data() -> None:
    config, inputs, _ = build()
    derived = batch_table(config, inputs.samples)
    assert derived.longest == 32
    assert derived.most_tokens <= 64
    config, _, _ = build(target={"path": "x", "batches": [[1, 32], [2, 32]]})
    assert batch_table(config, inputs.samples).shapes == ((2, 32), (1, 32))
    config, _, _ = build(target={"path": "x", "batches": [[1, 29]]})
    with pytest.raises(ConfigError, match=r"30 tokens and the longest shape 29"):
        batch_table(config, inputs.samples)


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_a_cache_needs_no_target(soft: float) -> None:
    config, inputs, target = build(loss={"soft_labels": soft})
    choices = Choices()
    online = feature_worker(config, inputs, target, None, CPU, choices)
    assert isinstance(online, TargetForwards)
    cache = FeatureCache(target, inputs.samples, last_hidden=soft > 0)
    cache.fill(lambda: online, None, "k", lambda *_: None)
    cached = feature_worker(config, inputs, None, cache, CPU, choices)
    assert isinstance(cached, CachedFeatures)
    assert online.width == cached.width == (3 if soft else 2) * target.hidden_size
    pack = Pack((1, 3), 47)
    for worker in (online, cached):
        worker.run(inputs.samples, pack)
        assert worker.row.shape[0] == 64
    torch.testing.assert_close(cached.row, online.row, rtol=1e-4, atol=1e-4)


def test_the_first_drafters_scale_is_of_the_taps_of_samples_from_everywhere() -> None:
    config, inputs, target = build(loss={"soft_labels": 0.5}, drafter={"feature_scale": True})
    choices = Choices()
    worker = feature_worker(config, inputs, target, None, CPU, choices)
    drafter = first_drafter(config, inputs, target, worker, choices)
    members = range(0, len(LENGTHS), 3)[:32]
    wanted = measure_feature_scale(measure(worker, inputs.samples, members, 2 * 32))
    assert torch.equal(drafter.feature_scale, wanted)
    plain, _, _ = build()
    other = first_drafter(plain, inputs, target, worker, choices)
    assert bool((other.feature_scale == 1).all())
