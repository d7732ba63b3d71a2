"""An outline says of a target what the loaded target says, and no layer is read for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftline.config.sections import TargetSection
from draftline.model.target import loading
from draftline.model.target.outline import read_outline
from draftline.model.target.target import load_target
from tests.model.target.test_target import SUPPORTED

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", SUPPORTED)
def test_an_outline_says_what_the_loaded_target_says(
    family: str, target_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(target_dir(family))
    target = load_target(path, device=CPU, dtype="float32", taps=(1, 2))
    monkeypatch.setattr(loading, "load_weights", None)
    outline = read_outline(TargetSection(path=path, tap_layers=[1, 2]), with_head=True)
    assert outline is not None
    for name in ("architecture", "taps", "hidden_size", "num_layers", "vocab_size"):
        assert getattr(outline, name) == getattr(target, name), name
    assert outline.embed_scale == pytest.approx(target.embed_scale, rel=1e-4)
    assert outline.head.multiplier == pytest.approx(target.head.multiplier, rel=1e-3)
    assert outline.head.softcap == target.head.softcap
    assert torch.equal(outline.head.weight, target.head.weight)
    assert outline.text_config.to_dict() == target.text_config.to_dict() or family
