"""Dense attention over grouped heads against the textbook, and the target's refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draftline.errors import TargetError
from draftline.model.attention import dense_attention, target_attention


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def textbook(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num() @ value


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask_rows", [1, 3])
@pytest.mark.parametrize("value_dim", [8, 5])
def test_grouped_heads_see_what_the_mask_shows(
    kv_heads: int, mask_rows: int, value_dim: int
) -> None:
    query = random(3, 4, 5, 8, seed=0)
    key, value = random(3, kv_heads, 7, 8, seed=1), random(3, kv_heads, 7, value_dim, seed=2)
    mask = random(mask_rows, 1, 5, 7, seed=3) > 0
    mask[..., 2, :] = False  # a query that sees nothing
    output = dense_attention(query, key, value, mask)
    torch.testing.assert_close(output, textbook(query, key, value, mask, 8**-0.5))
    assert output.shape == (3, 4, 5, value_dim)
    assert not output[:, :, 2].any()
    scaled = dense_attention(query, key, value, mask, 0.7)
    torch.testing.assert_close(scaled, textbook(query, key, value, mask, 0.7))


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_without_a_mask_a_target_is_causal_inside_its_window(window: int | None) -> None:
    query, key, value = (random(2, heads, 9, 8, seed=heads) for heads in (4, 2, 2))
    output, weights = target_attention(
        nn.Module(), query, key, value, None, 0.5, sliding_window=window
    )
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = (distance >= 0) & (distance < (window or 9))
    wanted = textbook(query, key, value, mask[None, None], 0.5)
    torch.testing.assert_close(output, wanted.transpose(1, 2))
    assert output.is_contiguous()
    assert weights is None


def test_scores_that_are_capped_or_drained_are_refused_with_the_modules_name() -> None:
    states = random(1, 2, 3, 4, seed=0)
    with pytest.raises(TargetError, match="Linear uses attention score soft-capping"):
        target_attention(nn.Linear(1, 1), states, states, states, None, softcap=50.0)
    with pytest.raises(TargetError, match="Linear uses attention sinks"):
        target_attention(nn.Linear(1, 1), states, states, states, None, s_aux=torch.zeros(2))
