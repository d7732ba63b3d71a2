"""A drafter's shape and first weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import ConfigError, TargetError
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.init import build_shape, init_drafter, measure_feature_scale
from draftline.model.target.target import Target
from tests.support.fakes import tiny_model, tiny_tokenizer


def config(*overrides: str) -> Config:
    tree: dict[str, Any] = {
        "target": {"path": "unused"},
        "data": {"train": ["unused"], "max_length": 64},
        "train": {"steps": 1},
        "drafter": {"layers": 2},
        "block_size": 4,
    }
    return build_config(tree, overrides)


def target(family: str = "qwen3", **changes: Any) -> Target:
    return Target(tiny_model(family, **changes), tiny_tokenizer(), taps=(1, 3))


def drafter_of(target: Target, init: str, *overrides: str, seed: int = 0) -> tuple[Drafter, Any]:
    choices = Choices()
    shape = build_shape(config(*overrides), target, 3)
    return init_drafter(shape, target, init=init, seed=seed, choices=choices), choices


# Shape


def test_a_shape_copies_the_target_unless_told() -> None:
    shape = build_shape(config(), target(), 3)
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers) == (32, 48, 2)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.num_taps, shape.block_size, shape.mask_token_id) == (2, 4, 3)
    told = build_shape(
        config(
            "drafter.num_heads=6",
            "drafter.num_kv_heads=3",
            "drafter.head_dim=8",
            "drafter.intermediate_size=20",
            "drafter.rope_theta=77.0",
            "drafter.sliding_layers=1",
            "drafter.sliding_window=9",
        ),
        target(),
        3,
    )
    assert (told.num_heads, told.num_kv_heads, told.head_dim) == (6, 3, 8)
    assert (told.intermediate_size, told.rope_theta) == (20, 77.0)
    assert (told.sliding_layers, told.sliding_window) == (1, 9)


def fake_target(**text: Any) -> Any:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return SimpleNamespace(text_config=SimpleNamespace(**shape | text), hidden_size=32, taps=(1, 3))


def test_a_null_head_size_is_the_targets_whatever_the_number_of_heads() -> None:
    assert build_shape(config("drafter.num_heads=2"), fake_target(), 3).head_dim == 8
    assert build_shape(config("drafter.num_heads=2"), fake_target(head_dim=None), 3).head_dim == 8


def test_heads_that_clash_with_the_targets_name_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"drafter.num_heads=3 .*drafter.num_kv_heads=2"):
        build_shape(config("drafter.num_heads=3"), fake_target(), 3)


@pytest.mark.parametrize("width", [None, [48, 64]])
def test_a_target_without_one_mlp_width_needs_the_key(width: Any) -> None:
    with pytest.raises(TargetError, match=r"set drafter\.intermediate_size"):
        build_shape(config(), fake_target(intermediate_size=width), 3)
    told = build_shape(
        config("drafter.intermediate_size=20"), fake_target(intermediate_size=width), 3
    )
    assert told.intermediate_size == 20


@pytest.mark.parametrize(
    ("text", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}}, 2e6),
        # The flat one is stale.
        ({"rope_parameters": {"rope_theta": 2e6}, "rope_theta": 1e4}, 2e6),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4}, 1e4),
        # The drafter's context is not a window.
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 1e4},
                    "full_attention": {"rope_theta": 1e6},
                }
            },
            1e6,
        ),
        ({"rope_parameters": {"global": {"rope_theta": 3e4}}}, 3e4),
        ({}, 1e6),
        ({"rope_parameters": None, "rope_theta": None}, 1e6),
    ],
)
def test_the_rope_base_nested_and_flat(text: dict[str, Any], theta: float) -> None:
    assert build_shape(config(), fake_target(**text), 3).rope_theta == theta


@pytest.mark.parametrize(("family", "theta"), [("qwen3_5", 5e6), ("gemma3", 1e6), ("llama", 1e4)])
def test_the_rope_base_of_real_configurations(family: str, theta: float) -> None:
    assert build_shape(config(), target(family), 3).rope_theta == theta


# First weights


def test_equal_seeds_give_equal_drafters_whatever_the_global_state() -> None:
    of = target()
    torch.manual_seed(1)
    first, _ = drafter_of(of, "scratch", seed=5)
    torch.manual_seed(2)
    second, _ = drafter_of(of, "scratch", seed=5)
    other, _ = drafter_of(of, "scratch", seed=6)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
        if tensor.ndim > 1:
            assert not torch.equal(tensor, other.state_dict()[name]), name


def test_scratch_is_small_normal_matrices_and_norms_of_one_but_the_last() -> None:
    drafter, choices = drafter_of(target(), "scratch")
    for name, tensor in drafter.named_parameters():
        assert tensor.dtype == torch.float32
        if tensor.ndim > 1:
            assert 0.016 < float(tensor.detach().std()) < 0.024, name
        elif name == "norm.weight":
            sizes = tensor.detach().abs()
            assert torch.equal(sizes, sizes[:1].expand_as(sizes))
        else:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
    assert choices.entries == []


def test_init_from_the_target_copies_its_last_layers_and_final_norm() -> None:
    of = target()
    scratch, _ = drafter_of(of, "scratch")
    drafter, choices = drafter_of(of, "target")
    for layer, source in zip(drafter.layers, [of.layers[4], of.layers[5]], strict=True):
        theirs = dict(source.named_parameters())
        for name, tensor in layer.named_parameters():
            assert torch.equal(tensor, theirs[name]), name
    assert of.final_norm is not None
    assert torch.equal(drafter.norm.weight, of.final_norm.weight)
    assert torch.equal(drafter.fc.weight, scratch.fc.weight)
    assert torch.equal(drafter.hidden_norm.weight, scratch.hidden_norm.weight)
    [entry] = choices.entries
    assert entry.got == "23 of 23 tensors copied"
    assert not entry.fallback
    # A copy, not the target's own tensors, and trainable although those are frozen.
    with torch.no_grad():
        drafter.norm.weight.zero_()
    assert bool(of.final_norm.weight.any())
    assert all(p.requires_grad for p in drafter.parameters())


def test_tensors_of_another_shape_stay_from_scratch_and_are_counted() -> None:
    of = target()
    drafter, choices = drafter_of(of, "target", "drafter.intermediate_size=20")
    scratch, _ = drafter_of(of, "scratch", "drafter.intermediate_size=20")
    assert choices.entries[0].got == "17 of 23 tensors copied"
    ours, start = drafter.layers[0], scratch.layers[0]
    assert torch.equal(ours.mlp.up_proj.weight, start.mlp.up_proj.weight)
    assert torch.equal(ours.self_attn.k_norm.weight, of.layers[4].self_attn.k_norm.weight)


def test_a_drafter_deeper_than_its_target_aligns_the_last_layers() -> None:
    of = target("llama")
    drafter, choices = drafter_of(of, "target", "drafter.layers=8")
    scratch, _ = drafter_of(of, "scratch", "drafter.layers=8")
    for index in (0, 1):
        up, start = drafter.layers[index].mlp.up_proj, scratch.layers[index].mlp.up_proj
        assert torch.equal(up.weight, start.weight)
    for index in range(2, 8):
        theirs = of.layers[index - 2].mlp.up_proj.weight
        assert torch.equal(drafter.layers[index].mlp.up_proj.weight, theirs)
    # Nine tensors a Llama layer, the drafter's two head norms have no counterpart.
    assert choices.entries[0].got.startswith(f"{6 * 9 + 1} of {8 * 11 + 1}")


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("gemma3", [("input_layernorm",) * 2, ("self_attn.q_norm",) * 2]),
        ("gemma3", [("post_attention_layernorm", "pre_feedforward_layernorm")]),
        ("qwen3_5", [("input_layernorm",) * 2, ("post_attention_layernorm",) * 2]),
        ("qwen3", [("input_layernorm",) * 2, ("self_attn.q_norm",) * 2]),
    ],
)
def test_a_copied_norm_does_what_the_targets_does(
    family: str, norms: list[tuple[str, str]]
) -> None:
    """Gemma and Qwen3.5 store a norm's gain less one; Gemma has two norms around the MLP."""
    of = target(family)
    drafter, _ = drafter_of(of, "target")
    assert of.final_norm is not None
    pairs: list[tuple[nn.Module, nn.Module]] = [(drafter.norm, of.final_norm)]
    for ours, theirs in norms:
        pairs.append((drafter.layers[-1].get_submodule(ours), of.layers[-1].get_submodule(theirs)))
    for ours_norm, their_norm in pairs:
        states = torch.randn(5, ours_norm.weight.shape[0], generator=torch.Generator())
        torch.testing.assert_close(ours_norm(states), their_norm(states), rtol=1e-4, atol=1e-4)
        assert ours_norm.weight.mean() > 0.5


def test_nothing_to_copy_is_a_fallback() -> None:
    of = target("llama")
    of.layers = nn.ModuleList(nn.Identity() for _ in of.layers)
    of.final_norm = None
    _, choices = drafter_of(of, "target")
    assert choices.entries[0].fallback


# Feature scale


def test_the_feature_scale_brings_every_channel_to_unit_size() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.01, 1.0, 300.0, 7.0])
    features = torch.randn(4000, 4, generator=generator) * sizes
    scale = measure_feature_scale(features.bfloat16())
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale * sizes, torch.ones(4), rtol=0.05, atol=0)


def test_a_dead_channel_gets_the_largest_scale_of_the_others() -> None:
    features = torch.tensor([[0.0, 2.0, -8.0], [0.0, -2.0, 8.0]])
    assert measure_feature_scale(features).tolist() == [0.5, 0.5, 0.125]
    assert measure_feature_scale(torch.zeros(5, 3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_drafter_of_a_loaded_target_runs(family: str, target_dir: Callable[[str], Path]) -> None:
    from draftline.model.target.target import load_target

    of = load_target(str(target_dir(family)), device=torch.device("cpu"), taps=(1, 3))
    drafter, _ = drafter_of(of, "target")
    features, _ = of.features(torch.arange(4, 12)[None])
    mask = torch.ones(1, 1, 4, 12, dtype=torch.bool)
    states = drafter(
        features[0], of.embed(torch.arange(4, 8)), torch.arange(8), torch.arange(8, 12), mask
    )
    assert states.shape == (4, 32)
    assert bool(of.head.logits(states).isfinite().all())
