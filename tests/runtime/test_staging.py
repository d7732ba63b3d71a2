"""A staged copy arrives, and the buffer can be filled again."""

from __future__ import annotations

import torch

from draftline.runtime.staging import Staging

CPU = torch.device("cpu")


def test_what_was_sent_stays_when_the_buffer_is_filled_again() -> None:
    staging = Staging((4, 2), torch.float32, CPU, depth=3)
    out = torch.zeros(8, 2)
    for i in range(4):
        buffer = staging.take()
        assert buffer.shape == (4, 2)
        buffer[:2] = float(i)
        staging.send(buffer[:2], out[2 * i : 2 * i + 2])
    assert out[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_cpu_needs_one_unpinned_buffer() -> None:
    staging = Staging((3,), torch.int64, CPU, depth=16)
    first = staging.take()
    staging.send(first, torch.zeros(3, dtype=torch.int64))
    assert staging.take().data_ptr() == first.data_ptr()
    assert first.dtype == torch.int64
    assert not first.is_pinned()
