"""What a block sees in training is what it sees when decoding, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.model.attention import dense_attention
from draftline.model.drafter.anchors import Anchors
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.drafter.masks import dense_mask, draft_masks
from draftline.model.kv_cache import StaticKV
from draftline.runtime.compile.gate import CompileGate
from tests.support.tiny import build_drafter

LENGTHS = (9, 14, 6)
SHAPE = DrafterShape(
    hidden_size=20,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_taps=2,
    block_size=4,
    mask_token_id=7,
    rope_theta=1e4,
)
SLIDING = [(0, None), (2, 3), (3, 1), (2, 6), (1, 100)]


@dataclass
class Packed:
    """A pack of three conversations with five anchors, the last of them dropped."""

    shape: DrafterShape
    features: Tensor
    blocks: Tensor
    position: Tensor
    anchors: Anchors

    def forward(self, drafter: Drafter, features: Tensor | None = None) -> Tensor:
        context, block = len(self.position), self.shape.block_size
        sliding = None
        if self.shape.sliding_layers:
            sliding = dense_mask(self.anchors, context, block, self.shape.sliding_window)
        offset = torch.arange(block)
        hidden = drafter(
            self.features if features is None else features,
            self.blocks.flatten(0, 1),
            self.position,
            (self.position[self.anchors.position][:, None] + offset).flatten(),
            dense_mask(self.anchors, context, block),
            sliding,
        )
        return hidden.view(-1, block, self.shape.hidden_size)


def build(sliding_layers: int = 0, window: int | None = None) -> tuple[Packed, Drafter]:
    values = SHAPE.to_dict() | {"sliding_layers": sliding_layers, "sliding_window": window}
    shape = DrafterShape(**values)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(3)
    total = sum(LENGTHS) + 3
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)[:3]
    anchor = torch.tensor([4, 8, 9 + 6, 9 + 14 + 2, 0])
    start = starts[torch.searchsorted(starts, anchor, right=True) - 1]
    position = torch.cat([torch.arange(n) for n in (*LENGTHS, 3)])
    packed = Packed(
        shape,
        torch.randn(total, 2 * shape.hidden_size, generator=random),
        torch.randn(5, shape.block_size, shape.hidden_size, generator=random),
        position,
        Anchors(anchor, start, torch.tensor([True] * 4 + [False])),
    )
    return packed, build_drafter(shape)


def decoded(
    packed: Packed, drafter: Drafter, block: int, pieces: list[int], slots: int = 24
) -> Tensor:
    """The block's states by the decode path, its context handed over in `pieces` of tokens."""
    anchor, start = int(packed.anchors.position[block]), int(packed.anchors.start[block])
    cache = StaticKV(1, slots, torch.device("cpu"))
    length = anchor - start

    def extend(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(keys, values, layer)

    # Rewinding must cost nothing: slots at and after the anchor hold what an earlier round left.
    cache.begin_prefill(slots)
    drafter.context(torch.full((1, slots, packed.features.shape[1]), 5.0),
                    torch.arange(slots)[None], extend)  # fmt: skip
    done = 0
    for piece in [*pieces, length]:
        positions = torch.arange(done, min(done + piece, length))[None]
        if positions.numel():
            cache.begin(positions, slots)
            drafter.context(packed.features[start + positions], positions, extend)
        done += positions.shape[1]
    positions = length + torch.arange(packed.shape.block_size)[None]
    cache.begin(positions, slots)
    full, sliding = draft_masks(
        torch.tensor([length]), positions, torch.arange(slots), drafter.shape.sliding_window
    )
    return drafter.draft(packed.blocks[block][None], positions, extend, full, sliding)[0]


@pytest.mark.parametrize(("layers", "window"), SLIDING)
def test_training_forward_is_the_decode_path(layers: int, window: int | None) -> None:
    packed, drafter = build(layers, window)
    trained = packed.forward(drafter)
    for block in range(4):
        for pieces in ([100], [1, 2, 1]):
            torch.testing.assert_close(
                trained[block], decoded(packed, drafter, block, pieces), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(("layers", "window"), SLIDING)
def test_a_block_depends_on_features_before_its_anchor_only(
    layers: int, window: int | None
) -> None:
    packed, drafter = build(layers, window)
    drafter.requires_grad_(False)
    features = packed.features.clone().requires_grad_()
    hidden = packed.forward(drafter, features)
    for block in range(4):
        (gradient,) = torch.autograd.grad(hidden[block].square().sum(), features, retain_graph=True)
        reached = gradient.abs().sum(1).nonzero().flatten().tolist()
        anchor, start = int(packed.anchors.position[block]), int(packed.anchors.start[block])
        first = start
        if layers == packed.shape.num_layers and window is not None:
            # Context keys do not pass through layers, so depth does not widen the window.
            first = max(start, anchor + 1 - window)
        assert reached == list(range(first, anchor))


@pytest.mark.parametrize(("layers", "window"), SLIDING[:3])
def test_the_compiled_forward_is_the_plain_one(layers: int, window: int | None) -> None:
    """Rotations are handed over and part of the MLP is computed again in the backward pass."""
    packed, drafter = build(layers, window)
    drafter.requires_grad_(True)
    parameters = list(drafter.parameters())
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def states(drafter: Drafter, *arguments: Any) -> Tensor:
        return drafter.states(*arguments)

    anchors, offset = packed.anchors, torch.arange(4)
    positions = (packed.position[anchors.position][:, None] + offset).flatten()
    arguments = (
        packed.features,
        packed.blocks.flatten(0, 1),
        drafter.rope(packed.position[None], torch.float32),
        drafter.rope(positions[None], torch.float32),
        dense_mask(anchors, len(packed.position), 4),
        dense_mask(anchors, len(packed.position), 4, window) if layers else None,
    )
    with CompileGate(Choices(), backend=backend, device_types=("cpu",)) as gate:
        compiled = gate.compile(states, "drafter", torch.device("cpu"))
        mine = compiled(drafter, *arguments)
        gradients = torch.autograd.grad(mine.square().sum(), parameters)
    assert len(graphs) == 1
    assert "checkpoint" in graphs[0].print_readable(print_output=False)
    theirs = packed.forward(drafter)
    torch.testing.assert_close(mine.view(theirs.shape), theirs)
    wanted = torch.autograd.grad(theirs.square().sum(), parameters)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def test_later_and_foreign_features_change_nothing_at_all() -> None:
    packed, drafter = build(1, 5)
    before = packed.forward(drafter)
    changed = packed.features.clone()
    changed[4:9] = 100.0  # from the first anchor on
    changed[9:] = -100.0  # and every other conversation
    assert torch.equal(packed.forward(drafter, changed)[0], before[0])
    assert not torch.equal(packed.forward(drafter, changed)[1], before[1])


@pytest.mark.parametrize(("layers", "window"), SLIDING)
def test_blocks_do_not_see_one_another(layers: int, window: int | None) -> None:
    packed, drafter = build(layers, window)
    blocks = packed.blocks.clone().requires_grad_()
    packed.blocks = blocks
    hidden = packed.forward(drafter)
    for block in range(4):
        for slot in range(4):
            (gradient,) = torch.autograd.grad(
                hidden[block, slot].square().sum(), blocks, retain_graph=True
            )
            reached = (gradient.abs().sum(2) > 0).nonzero().tolist()
            seen = range(4)
            if layers == packed.shape.num_layers:
                # Through a stack of causal windowed layers each slot reaches further back.
                assert window is not None
                seen = range(max(0, slot - layers * (window - 1)), slot + 1)
            assert reached == [[block, other] for other in seen]


def test_a_dropped_anchor_sees_nothing_and_its_gradient_is_finite() -> None:
    packed, drafter = build(1, 3)
    drafter.requires_grad_(True)
    hidden = packed.forward(drafter)
    assert bool(torch.isfinite(hidden).all())
    hidden.square().sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
    features = packed.features.clone().requires_grad_()
    drafter.requires_grad_(False)
    packed.forward(drafter, features)[4].sum().backward()
    assert features.grad is not None
    assert not features.grad.any()


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_dense_attention_is_the_textbook_formula(heads: int) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 3, 4, generator=random)
    key, value = (torch.randn(2, 2, 5, 4, generator=random) for _ in range(2))
    mask = torch.rand(2, 1, 3, 5, generator=random) < 0.6
    mask[0, 0, 1] = False
    for scale in (None, 0.3):
        output = dense_attention(query, key, value, mask, scale)
        for row in range(2):
            for head in range(heads):
                shared = head // (heads // 2)
                for q in range(3):
                    seen = mask[row, 0, q]
                    if not seen.any():
                        assert not output[row, head, q].any()
                        continue
                    scores = key[row, shared, seen] @ query[row, head, q] * (scale or 0.5)
                    wanted = torch.softmax(scores, 0) @ value[row, shared, seen]
                    torch.testing.assert_close(output[row, head, q], wanted)


def test_parameters_are_counted_by_formula() -> None:
    for shape in (SHAPE, build(2, 3)[0].shape):
        drafter = Drafter(shape)
        assert shape.num_parameters == sum(p.numel() for p in drafter.parameters())
        assert len(list(drafter.parameters())) == 11 * shape.num_layers + 3
        assert "feature_scale" not in drafter.state_dict()
    # The published Qwen3-4B drafter.
    published = DrafterShape(2560, 9728, 5, 32, 8, 128, 5, 16, 151669)
    assert published.num_parameters == pytest.approx(537.4e6, rel=1e-4)


def test_the_feature_scale_multiplies_features() -> None:
    packed, drafter = build()
    scaled = packed.features * drafter.feature_scale
    context = drafter.fuse(packed.features)
    drafter.feature_scale.fill_(1.0)
    torch.testing.assert_close(drafter.fuse(scaled), context)


def test_rope_turns_halves_by_position() -> None:
    drafter = build()[1]
    cos, sin = drafter.rope(torch.tensor([[0, 1, 300]]), torch.float32)
    assert cos.shape == sin.shape == (1, 1, 3, 3)
    for pair in range(3):
        angle = 300 * 1e4 ** (-2 * pair / 6)
        assert float(cos[0, 0, 2, pair]) == pytest.approx(
            torch.tensor(angle).cos().item(), abs=1e-4
        )
        assert float(sin[0, 0, 2, pair]) == pytest.approx(
            torch.tensor(angle).sin().item(), abs=1e-4
        )
    assert cos[0, 0, 0].tolist() == [1, 1, 1]
