"""Whatever the target does to embeddings and logits, a reader that behaves like vLLM drafts as we do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.checkpoint.zlab import fold_embedding_scale, load_zlab
from draftline.errors import ParityError
from draftline.export.zlab import export_zlab
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.masks import draft_masks
from draftline.model.head import Head
from draftline.model.target.target import Target
from tests.support.tiny import build_drafter, build_shape, build_target
from tests.support.vllm_reader import vllm_logits

IDS = torch.tensor([0, 2, 5, 9, 17, 18, 31, 40, 55, 63])
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_layers": 3, "sliding_layers": 2, "sliding_window": 6, "block_size": 5},
    {"sliding_layers": 2, "sliding_window": 3, "num_kv_heads": 1},
]
CONTEXT = 11


def unusual(scale: float, multiplier: float = 1.0) -> Target:
    """A tiny target whose embeddings and logits are multiplied; one masked row is very small."""
    target = build_target()
    target.embed_scale = scale
    target.head = Head(target.head.weight, multiplier=multiplier)
    with torch.no_grad():
        target.embedding[7] *= 1e-3
    return target


def ours(
    drafter: Drafter, target: Target, features: Tensor, anchor: int, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """States `[block, hidden]` and draft logits `[block - 1, draft vocabulary]`, in the drafter's dtype."""
    size = drafter.shape.block_size
    block = torch.tensor([anchor] + [drafter.shape.mask_token_id] * (size - 1))
    context = torch.arange(len(features))
    positions = len(features) + torch.arange(size)
    full, sliding = draft_masks(
        torch.tensor([len(features)]),
        positions[None],
        torch.cat([context, positions]),
        drafter.shape.sliding_window,
    )
    states = drafter(
        features, target.embed(block).to(features.dtype), context, positions, full, sliding
    )
    head = target.head if ids is None else target.head.restricted(ids)
    return states, states[1:] @ head.weight.to(states.dtype).T * head.multiplier


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("scale", "multiplier"), [(1.0, 1.0), (12.0, 0.125), (73.3, 1.0), (0.25, 3.0)]
)
@pytest.mark.parametrize("vocab", [False, True])
def test_drafts_of_the_export_are_ours(
    tmp_path: Path, shape: dict[str, Any], scale: float, multiplier: float, vocab: bool
) -> None:
    target = unusual(scale, multiplier)
    ids = IDS if vocab else None
    drafter = build_drafter(build_shape(target, **shape))
    out = export_zlab(drafter, target, target.taps, ids, tmp_path / "out", dtype="float32")
    random = torch.Generator().manual_seed(3)
    for anchor in (8, 20, 33):
        features = torch.randn(CONTEXT, 2 * target.hidden_size, generator=random)
        states, logits = ours(drafter, target, features, anchor, ids)
        theirs, theirs_logits = vllm_logits(
            out, target.embedding, target.head.weight, features, anchor
        )
        torch.testing.assert_close(theirs, states, rtol=2e-5, atol=2e-5)
        if ids is None:
            torch.testing.assert_close(theirs_logits, logits, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(theirs_logits[:, ids], logits, rtol=1e-4, atol=1e-4)
            assert int(theirs_logits.isfinite().sum()) == logits.numel()
            assert torch.equal(theirs_logits.argmax(-1), ids[logits.argmax(-1)])


@torch.no_grad()
@pytest.mark.parametrize("scale", [12.0, 73.3, 1e-2])
def test_folding_is_exact_and_not_only_up_to_eps(tmp_path: Path, scale: float) -> None:
    """In float64 what is left is rounding, with embeddings so small that eps decides the norms."""
    target = unusual(scale)
    drafter = build_drafter(build_shape(target)).double()
    features = torch.randn(CONTEXT, 2 * target.hidden_size, dtype=torch.float64)
    target.embedding.mul_(0.01)
    states, _ = ours(drafter, target, features, 20, None)
    bare = target.embedding.double()
    folded = Drafter(build_shape(target, rms_norm_eps=1e-6 / scale**2)).double()
    folded.load_state_dict(fold_embedding_scale(dict(drafter.state_dict()), scale))
    folded.feature_scale.copy_(drafter.feature_scale)
    target.embed_scale = 1.0
    again, _ = ours(folded, target, features, 20, None)
    # float32 rotations and the rounding of `embed` are all that differs.
    torch.testing.assert_close(again, states, rtol=1e-6, atol=1e-6)
    kept = Drafter(build_shape(target)).double()
    kept.load_state_dict(folded.state_dict())
    kept.feature_scale.copy_(drafter.feature_scale)
    coarse, _ = ours(kept, target, features, 20, None)
    assert float((coarse - states).abs().max()) > 1e-3
    assert bare.dtype == torch.float64


@torch.no_grad()
def test_without_the_head_or_the_folding_drafts_are_others(tmp_path: Path) -> None:
    """The two faults that serving hides: this reader shows them, so it is one that can fail."""
    target = unusual(12.0)
    drafter = build_drafter(build_shape(target))
    features = torch.randn(CONTEXT, 2 * target.hidden_size)
    states, logits = ours(drafter, target, features, 20, IDS)

    def read(out: Path) -> tuple[Tensor, Tensor]:
        return vllm_logits(out, target.embedding, target.head.weight, features, 20)

    plain = export_zlab(
        drafter, target, target.taps, None, tmp_path / "a", dtype="float32", engine="dflash"
    )
    assert float((read(plain)[0] - states).abs().max()) > 0.1
    headless = export_zlab(drafter, target, target.taps, IDS, tmp_path / "b", dtype="float32")
    tensors = load_file(headless / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, headless / "model.safetensors")
    assert not torch.equal(read(headless)[1].argmax(-1), IDS[logits.argmax(-1)])
    with pytest.raises(ParityError, match=r"lm_head\.weight.*export the drafter again"):
        load_zlab(headless)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_folded_form_survives_every_dtype(tmp_path: Path, dtype: str) -> None:
    target = unusual(12.0, 0.125)
    drafter = build_drafter(build_shape(target))
    for name in ("first", "again"):  # the same drafter exported once more is the same
        export_zlab(drafter, target, target.taps, IDS, tmp_path / name, dtype=dtype)
    first, again = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert config["dflash_config"]["embedding_scale_folded"] == 12.0
    assert "input_embedding_scale" not in config["dflash_config"]
    assert config["rms_norm_eps"] == pytest.approx(1e-6 / 144)
    assert config["logit_scale"] == config["dflash_config"]["output_multiplier"] == 0.125
    features = torch.randn(CONTEXT, 2 * target.hidden_size)
    states, _ = ours(drafter, target, features, 20, IDS)
    theirs, _ = vllm_logits(tmp_path / "first", target.embedding, target.head.weight, features, 20)
    tolerance = {"float32": 2e-5, "bfloat16": 0.2, "float16": 0.02}[dtype]
    torch.testing.assert_close(theirs, states, rtol=tolerance, atol=tolerance)
    loaded, _, token_ids = load_zlab(tmp_path / "first")
    assert token_ids is not None
    target.embed_scale = 1.0  # what was folded takes bare rows
    back, _ = ours(loaded, target, features, 20, token_ids)
    torch.testing.assert_close(back, theirs, rtol=2e-5, atol=2e-5)


def test_a_scale_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    target = unusual(1e6)
    drafter = build_drafter(build_shape(target))
    with pytest.raises(ParityError, match=r"loses \d+\.\d % of its norm in float16.*bfloat16"):
        export_zlab(drafter, target, target.taps, None, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    export_zlab(drafter, target, target.taps, None, tmp_path / "out", dtype="bfloat16")
