"""The target on a GPU: its captured forwards, and decoding with and without a drafter."""

from __future__ import annotations

import copy

import pytest
import torch

from draftline.model.target.target import Target
from draftline.runtime.graphs import Replayed
from draftline.runtime.memory import MemoryBaseline
from tests.support.gpu import GPU, apart, needs_gpu
from tests.support.runs import before
from tests.support.tiny import (
    build_drafter,
    build_forwards,
    build_samples,
    build_shape,
    build_target,
    decode,
    teach,
    whole_pack,
)

pytestmark = needs_gpu

BUDGET = 256
PROMPTS = [s.input_ids.tolist() for s in build_samples((5, 17, 1, 9, 30), seed=1)]
NEW = 40


def test_captured_forwards_give_the_cpu_s_features_and_take_no_memory() -> None:
    samples = build_samples((60, 50, 44, 40, 30))
    pack = whole_pack(samples)
    own = build_forwards(build_target(hidden=64), samples, BUDGET, soft=True)
    own.run(samples, pack)
    target = build_target(hidden=64, device=GPU)
    there = build_forwards(target, samples, BUDGET, soft=True, capture="always")
    there.warm()
    there.run(samples, pack)
    torch.cuda.synchronize()
    baseline = MemoryBaseline([GPU])
    for _ in range(10):
        there.run(samples, pack)
    torch.cuda.synchronize()
    (change,) = baseline.changes()
    assert (change.allocator_calls, change.reserved_change_bytes) == (0, 0)
    assert apart(there.row, own.row) < 1e-4


@pytest.mark.parametrize("draft_vocabulary", [None, 32], ids=["whole", "half"])
def test_captured_decoding_is_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, draft_vocabulary: int | None
) -> None:
    """Token for token in float32: speculative and plain on the GPU, and plain on the CPU."""
    own: Target = build_target(stop=())
    shape = build_shape(own, block_size=6, sliding_layers=1, sliding_window=8)
    drafter = teach(own, build_drafter(shape), PROMPTS, new=NEW, steps=80)
    wanted = decode(own, None, PROMPTS, NEW)
    captured: list[bool] = []
    before(monkeypatch, Replayed, "__call__", lambda _, round_: captured.append(round_.captured))
    target = build_target(stop=(), device=GPU)
    ids = None
    if draft_vocabulary is not None:
        everyday = {token for tokens in wanted.tokens for token in tokens}
        ids = torch.tensor(sorted(everyday)[:draft_vocabulary], device=GPU)
    there = copy.deepcopy(drafter).to(GPU)
    decoded = decode(target, there, PROMPTS, NEW, token_ids=ids)
    assert decode(target, None, PROMPTS, NEW).tokens == wanted.tokens
    assert decoded.tokens == wanted.tokens
    assert captured
    assert all(captured)
    # Long and short rounds both occur, so the caches were rewound.
    assert decoded.rounds < 0.9 * wanted.rounds
    assert sum(count > 0 for count in decoded.committed_counts) > 2
