"""The kernel that trains on a GPU, compiled for this CPU: BlockMask in, dense attention out."""

from __future__ import annotations

import shutil

import pytest
import torch

from draftline.model.attention import dense_attention, fused_attention
from draftline.model.drafter.anchors import Anchors
from draftline.model.drafter.masks import block_mask, dense_mask


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")),
    reason="compiling for a CPU needs a C++ compiler",
)
@torch.no_grad()
def test_compiled_flex_attention_equals_dense_attention() -> None:
    # 350 context tokens in two conversations; rows 10 x 16 = 160: two row tiles, five key tiles,
    # with full, partial and empty ones; the last anchor is dropped.
    position = torch.tensor([40, 120, 129, 135, 138, 200, 261, 300, 349, 0])
    start = torch.where(position >= 130, 130, 0)
    anchors = Anchors(position, start, torch.arange(10) < 9)
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 160, 16, generator=random)
    key, value = (torch.randn(1, 2, 510, 16, generator=random) for _ in range(2))
    compiled = torch.compile(fused_attention, fullgraph=True, dynamic=False)
    fused = compiled(query, key, value, block_mask(anchors, 350, 16))
    dense = dense_attention(query, key, value, dense_mask(anchors, 350, 16))
    torch.testing.assert_close(fused, dense, rtol=1e-4, atol=1e-5)
    assert not fused[:, :, -16:].any(), "a row that sees nothing gets 0"
