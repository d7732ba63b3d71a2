"""Every test on the GPU begins with what the tests before it held given back."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _given_back() -> None:
    # Graphs lie in cycles: freed by a later collection, their memory would move under a test.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
