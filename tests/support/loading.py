"""Targets loaded as a run loads them, and refused as a plan refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.errors import TargetError
from draftline.model.target.facts import read_facts
from draftline.model.target.target import Target, load_target

TAPS = (0, 2, 3)


def load(path: Path, **options: Any) -> Target:
    return load_target(str(path), device=torch.device("cpu"), taps=TAPS, **options)


def refusal(path: Path) -> str:
    """Why `path` is refused, which a plan says as loading does."""
    with pytest.raises(TargetError) as planned:
        read_facts(str(path), taps=TAPS)
    with pytest.raises(TargetError) as loaded:
        load(path)
    assert str(planned.value) == str(loaded.value)
    assert str(path) in str(planned.value)
    return str(planned.value)
