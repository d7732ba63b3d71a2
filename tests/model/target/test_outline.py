"""An outline says of a target what the loaded target says, and no layer is read for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.config.model import TargetSection
from draftline.model.target import loading, outline
from draftline.model.target.outline import TargetOutline, read_outline
from draftline.model.target.target import Target, load_target
from draftline.train.plan.inputs import open_outline
from tests.model.target.test_target import SUPPORTED

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", SUPPORTED)
def test_an_outline_says_what_the_loaded_target_says(
    family: str, target_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(target_dir(family))
    target = load_target(path, device=CPU, dtype="float32", taps=(1, 2))
    monkeypatch.setattr(loading, "load_weights", None)
    told = read_outline(TargetSection(path=path, tap_layers=[1, 2]), with_head=True)
    assert told is not None
    for name in ("architecture", "taps", "hidden_size", "num_layers", "vocab_size"):
        assert getattr(told, name) == getattr(target, name), name
    assert told.embed_scale == pytest.approx(target.embed_scale, rel=1e-4)
    assert told.head.multiplier == pytest.approx(target.head.multiplier, rel=1e-3)
    assert told.head.softcap == target.head.softcap
    assert torch.equal(told.head.weight, target.head.weight)
    assert told.text_config.eos_token_id == target.text_config.eos_token_id


def test_a_target_whose_files_do_not_tell_is_loaded_and_that_is_said(
    target_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(target_dir("llama"))
    config = build_config(
        {"target": {"path": path, "tap_layers": [1, 2]}, "run": {"device": "cpu"}}
        | {"data": {"train": ["x"]}, "train": {"steps": 1}}
    )
    choices = Choices()
    assert isinstance(open_outline(config, choices, with_head=True), TargetOutline)
    assert not choices.entries
    # As a quantised head would be.
    monkeypatch.setattr(outline, "_PLAIN", ())
    assert isinstance(open_outline(config, choices, with_head=False), TargetOutline)
    assert isinstance(open_outline(config, choices, with_head=True), Target)
    assert choices.entries[0].got == "loaded whole"

    def needs_its_layers(*_: object) -> None:
        raise KeyError("router_logits")

    monkeypatch.setattr(outline, "_measure", needs_its_layers)
    assert isinstance(open_outline(config, choices, with_head=False), Target)
