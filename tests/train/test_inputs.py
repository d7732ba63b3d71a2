"""The key under which features are kept changes exactly when they would."""

from __future__ import annotations

from typing import Any

import torch

from draftline.config import Config
from draftline.config_file import build_config
from draftline.train.inputs import _key
from tests.tiny import build_samples, build_target


def config(path: str = "somewhere", **loss: Any) -> Config:
    return build_config(
        {
            "target": {"path": path},
            "data": {"train": ["data.jsonl"]},
            "train": {"steps": 1},
            "loss": loss,
        }
    )


def test_the_key_is_that_of_tokens_target_and_taps() -> None:
    samples = build_samples((9, 5))
    key = _key(config(), samples, build_target())
    assert key == _key(config(), build_samples((9, 5)), build_target())
    assert key == _key(config("moved"), samples, build_target()), "a target may move"
    assert key == _key(config(kind="dpace"), samples, build_target())
    others = [
        _key(config(), build_samples((9, 5), seed=1), build_target()),
        _key(config(), build_samples((5, 9)), build_target()),
        _key(config(), samples[::-1], build_target()),
        _key(config(soft_labels=0.5), samples, build_target()),
        _key(config(), samples, build_target(taps=(0, 1))),
        _key(config(), samples, build_target(dtype=torch.bfloat16)),
        _key(config(), samples, build_target(seed=1)),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_weights_that_changed_behind_the_same_path_are_another_target() -> None:
    samples = build_samples((9, 5))
    target = build_target()
    key = _key(config(), samples, target)
    layer = target.layers[1]
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1.001)
    assert _key(config(), samples, target) != key
