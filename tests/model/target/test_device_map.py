"""Layers over devices: in order, balanced, and everything else on the first."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from accelerate.utils import check_device_map
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.errors import TargetError
from draftline.model.target.device_map import device_map, spread_layers
from tests.support.fakes import tiny_model

DEVICES = [torch.device("cuda", i) for i in range(3)]


def fullest(places: list[int], sizes: list[int], other: int, devices: int) -> int:
    used = [other] + [0] * (devices - 1)
    for place, size in zip(places, sizes, strict=True):
        used[place] += size
    return max(used)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(0, 90), st.integers(1, 4))
def test_no_other_cut_leaves_the_fullest_device_emptier(
    sizes: list[int], other: int, devices: int
) -> None:
    places = spread_layers(sizes, other, devices)
    assert places == sorted(places)
    assert places[-1] < devices
    cuts = combinations(range(len(sizes) + devices - 1), devices - 1)
    every = []
    for cut in cuts:
        edges = [-1, *cut, len(sizes) + devices - 1]
        runs = [after - before - 1 for before, after in pairwise(edges)]
        every.append([d for d, run in enumerate(runs) for _ in range(run)])
    best = min(fullest(p, sizes, other, devices) for p in every)
    assert fullest(places, sizes, other, devices) == best


def test_equal_layers_make_room_for_the_ends() -> None:
    assert spread_layers([10] * 8, 40, 2) == [0, 0] + [1] * 6
    assert spread_layers([10] * 8, 0, 2) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("family", ["llama", "tied_llama", "gemma3_with_vision", "qwen3_5"])
def test_a_map_covers_the_model_with_whole_layers(family: str) -> None:
    model = tiny_model(family)
    found = device_map(model, DEVICES)
    check_device_map(model, found)
    names = {id(module): name for name, module in model.named_modules()}
    layers = [names[id(layer)] for layer in model.get_decoder().layers]
    assert set(layers) <= set(found)
    assert [found[name].index for name in layers] == sorted(found[name].index for name in layers)
    assert {found[name] for name in layers} <= set(DEVICES)
    assert len(set(found.values())) > 1
    others = {device for name, device in found.items() if name not in layers}
    assert others == {DEVICES[0]}


def test_more_devices_than_layers_are_refused() -> None:
    many = [torch.device("cuda", i) for i in range(7)]
    with pytest.raises(TargetError, match=r"7 devices \(cuda:0.*6 decoder layers"):
        device_map(tiny_model(), many)
    with pytest.raises(TargetError, match=r"GPT2LMHeadModel.*has none"):
        device_map(tiny_model("gpt2"), DEVICES)
