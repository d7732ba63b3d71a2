"""What a drafter borrows of its target: logits, block inputs, and no memory of its own."""

from __future__ import annotations

import torch

from draftline.model.head import Head, TargetEnds


def test_the_head_caps_after_multiplying_and_restricts_in_the_given_order() -> None:
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    head = Head(torch.eye(4) * 3, multiplier=2.0, softcap=5.0)
    torch.testing.assert_close(head.logits(hidden), 5 * torch.tanh(hidden * 6 / 5))
    part = head.restricted(torch.tensor([3, 1]))
    assert torch.equal(part.logits(hidden), head.logits(hidden)[:, [3, 1]])


def test_ends_embed_with_the_scale_and_know_their_head() -> None:
    ends = TargetEnds(torch.arange(12.0).view(4, 3), 2.5, Head(torch.ones(7, 3)))
    embedded = ends.embed(torch.tensor([[2, 0]]))
    assert embedded.tolist() == [[[15.0, 17.5, 20.0], [0.0, 2.5, 5.0]]]
    assert (ends.vocab_size, ends.dtype, ends.device.type) == (7, torch.float32, "cpu")


def test_ends_share_memory_on_their_device_and_are_copied_elsewhere() -> None:
    rows = torch.ones(4, 3)
    loose = TargetEnds(rows, 2.0, Head(torch.ones(5, 3), 3.0, 4.0))
    here = loose.on(torch.device("cpu"))
    assert here.embedding.data_ptr() == rows.data_ptr()
    assert here.head.weight.data_ptr() == loose.head.weight.data_ptr()
    away = loose.on(torch.device("meta"))
    assert {away.embedding.device.type, away.head.weight.device.type} == {"meta"}
    assert away.embedding is not away.head.weight
    assert (away.embed_scale, away.head.multiplier, away.head.softcap) == (2.0, 3.0, 4.0)
    tied = TargetEnds(rows, 1.0, Head(rows)).on(torch.device("meta"))
    assert tied.head.weight is tied.embedding
