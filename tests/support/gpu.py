"""What the tests that need a GPU share: their marks, the device, and how far two results are apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

GPU = torch.device("cuda", 0)
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def apart(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference as a part of the norm of `wanted`, wherever the two lie."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm())


def gpus(*indices: int) -> tuple[torch.device, ...]:
    """Devices by index, there or not."""
    return tuple(torch.device("cuda", index) for index in indices)
