"""The bytes of every device, and the refusal that names the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import DeviceError
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.target.facts import read_facts
from draftline.runtime.devices import DeviceFacts
from draftline.train.plan.memory import check_memory, device_memory, memory_table
from draftline.train.plan.placement import Placement
from tests.support.gpu import gpus

SHAPE = DrafterShape(32, 48, 2, 4, 2, 8, 2, 4, 3)
GPUS = (DeviceFacts("GPU", 2**40, 2**40),) * 4
CPU = torch.device("cpu")


def config(*overrides: str) -> Config:
    tree = {
        "target": {"path": "x"},
        "token_budget": 100,
        "max_anchors": 8,
        "block_size": 4,
        "data": {"train": ["x"], "max_length": 50},
        "train": {"steps": 3},
    }
    return build_config(tree, list(overrides))


@pytest.fixture
def inputs(target_dir: Callable[[str], Path]) -> Any:
    facts = read_facts(str(target_dir("llama")), taps=(1, 2), device_type="cuda")
    return SimpleNamespace(facts=facts, shape=SHAPE, token_ids=None, heldout=())


def rows(
    inputs: Any, targets: Any, drafters: Any, *overrides: str, slots: int = 2
) -> list[dict[str, int]]:
    placement = Placement(targets, drafters, (slots,) * len(drafters))
    memory = device_memory(config(*overrides), inputs, placement, GPUS)
    assert [row.device for row in memory] == list(placement.devices)
    assert all(row.total == sum(row.parts.values()) for row in memory)
    return [row.parts for row in memory]


def test_a_target_and_a_drafter_apart(inputs: Any) -> None:
    facts, count = inputs.facts, sum(p.numel() for p in Drafter(SHAPE).parameters())
    held, drafted = rows(inputs, (gpus(0),), gpus(1))
    pack = 100 * 2 * 32 * 2
    assert {k: v for k, v in held.items() if v} == {"target": facts.total_bytes, "features": pack}
    assert drafted == {
        "target": 0,
        "features": 0,
        "weights": 2 * count,
        "gradients": 2 * count,
        "masters": 4 * count,
        "moments": 8 * count,
        "average": 0,
        "ends": facts.embedding_bytes + facts.head_bytes,
        "ring": 3 * (pack + 18 * 100),
        # Layers keep 6 hidden and 3 MLP widths a row; a chunk's logits and gradient; d(hidden).
        "step": 32 * 2 * (6 * 32 + 3 * 48) * 2 + 2 * 2 * 32 * facts.vocab_size + 32 * 32 * 2,
    }
    averaged = rows(inputs, (gpus(0),), gpus(1), "train.ema=0.9")[1]
    assert averaged == drafted | {"average": 4 * count}
    chunked = rows(inputs, (gpus(0),), gpus(1), "loss.chunk_rows=8")[1]
    assert drafted["step"] - chunked["step"] == 2 * 2 * 24 * facts.vocab_size


def test_with_a_cache_one_target_comes_and_goes_before_the_drafters(inputs: Any) -> None:
    facts = inputs.facts
    inputs.tokens = 1000
    pack = 100 * 2 * 32 * 2
    first, second = rows(inputs, (gpus(0), gpus(1)), gpus(0, 1), "features.source=disk")
    ends = facts.embedding_bytes + facts.head_bytes
    for parts in (first, second):
        assert parts["ends"] == ends, "the target that lent them is gone"
        assert parts["target"] == 0, "the drafter takes more than the target did"
    big = replace(facts, total_bytes=10 * sum(first.values()))
    inputs.facts = big
    first, second = rows(inputs, (gpus(0), gpus(1)), gpus(0, 1), "features.source=disk")
    assert sum(first.values()) == big.total_bytes + pack
    assert second["target"] == 0


def test_float32_weights_are_their_own_masters(inputs: Any) -> None:
    inputs.facts = replace(inputs.facts, dtype=torch.float32)
    [row] = rows(inputs, ((CPU,),), (CPU,), slots=1)
    assert row["masters"] == 0
    assert row["weights"] == row["gradients"] == 4 * SHAPE.num_parameters
    assert row["ends"] == 0
    mask = 32 * (100 + 32)
    assert row["step"] == mask + 4 * (32 * 2 * 336 + 2 * 32 * inputs.facts.vocab_size + 32 * 32)


def test_workers_on_one_device_share_what_they_can(inputs: Any) -> None:
    [one] = rows(inputs, (gpus(0),), gpus(0))
    [two] = rows(inputs, (gpus(0), gpus(0)), gpus(0, 0))
    assert one["ends"] == two["ends"] == 0, "a target that is there lends its own"
    assert two["target"] == one["target"]
    for part in ("features", "weights", "moments", "ring", "step"):
        assert two[part] == 2 * one[part], part


def test_a_spanning_target_is_parted_and_its_first_device_has_the_ends(inputs: Any) -> None:
    total = inputs.facts.total_bytes
    first, second, third = rows(inputs, (gpus(0, 1), gpus(0, 1), gpus(2)), gpus(0, 1, 2))
    assert first["target"] == second["target"] == 2 * (total // 2), "each loads its own"
    assert third["target"] == total
    assert (first["features"] > 0, second["features"]) == (True, 0)
    assert (first["ends"], third["ends"]) == (0, 0)
    assert second["ends"] == inputs.facts.embedding_bytes + inputs.facts.head_bytes


def test_a_draft_vocabulary_is_a_smaller_head_of_its_own(inputs: Any) -> None:
    whole = rows(inputs, (gpus(0),), gpus(1))[1]
    inputs.token_ids = torch.arange(10)
    small = rows(inputs, (gpus(0),), gpus(1))[1]
    assert small["ends"] - whole["ends"] == 10 * 32 * 2
    assert whole["step"] - small["step"] == 2 * 2 * 32 * (inputs.facts.vocab_size - 10)
    soft = rows(inputs, (gpus(0),), gpus(1), "loss.soft_labels=0.5")[1]
    assert soft["step"] - small["step"] == 2 * 32 * 10
    assert soft["ring"] - small["ring"] == 3 * 100 * 32 * 2, "the last hidden states come too"


def refusal(inputs: Any, gpus: int, free: int, placement: Placement, *overrides: str) -> str:
    available = (DeviceFacts("GPU X", 2**40, free),) * gpus
    memory = device_memory(config(*overrides), inputs, placement, available)
    with pytest.raises(DeviceError) as error:
        check_memory(memory, config(*overrides), inputs, placement, available)
    return str(error.value)


@pytest.mark.parametrize(
    ("shape", "overrides", "knob"),
    [
        ({}, ["max_anchors=100", "loss.chunk_rows=4"], "max_anchors=50"),
        ({}, ["token_budget=100000", "topology.slots=1"], "token_budget=50000"),
        (
            {"num_layers": 1, "intermediate_size": 1},
            ["max_anchors=100", "loss.chunk_rows=200"],
            "loss.chunk_rows=100",
        ),
    ],
)
def test_the_refusal_names_the_knob_that_lowers_most(
    inputs: Any, shape: dict[str, int], overrides: list[str], knob: str
) -> None:
    inputs.shape = replace(SHAPE, **shape)
    if "chunk" in knob:
        inputs.facts = replace(inputs.facts, vocab_size=100_000)
    text = refusal(inputs, 2, 1000, Placement((gpus(0),), gpus(1), (1,)), *overrides)
    assert text.startswith("cuda:1 (GPU X) needs at least")
    assert f"{knob} would lower it most" in text
    assert "not enough alone" in text


def test_slots_can_be_what_lowers_most(inputs: Any) -> None:
    text = refusal(inputs, 2, 1000, Placement((gpus(0),), gpus(1), (9,)))
    assert "topology.slots=1 would lower it most" in text
    placement = Placement((gpus(0),), gpus(1), (900,))
    row = device_memory(config(), inputs, placement, GPUS)[1]
    text = refusal(inputs, 2, row.total - 1, placement)
    assert "(enough)" in text
    assert "its largest part is ring" in text


def test_a_shared_device_could_be_parted_where_there_are_others(inputs: Any) -> None:
    placement = Placement((gpus(0),), gpus(0), (1,))
    assert "topology.targets" in refusal(inputs, 2, 1000, placement)
    assert "topology.targets" not in refusal(inputs, 1, 1000, placement)
    held = refusal(inputs, 2, 1000, Placement((gpus(0),), gpus(1), (1,)))
    assert "topology.targets" not in held


def test_where_only_weights_lie_no_knob_helps(inputs: Any) -> None:
    text = refusal(inputs, 3, 1000, Placement((gpus(0, 1),), gpus(2), (1,)))
    assert "would lower it most" in text
    available = tuple(DeviceFacts("GPU", 2**40, free) for free in (2**40, 1000, 2**40))
    placement = Placement((gpus(0, 1),), gpus(2), (1,))
    memory = device_memory(config(), inputs, placement, available)
    with pytest.raises(DeviceError, match=r"cuda:1 .*part is target .*let it span devices"):
        check_memory(memory, config(), inputs, placement, available)


def test_what_fits_exactly_is_allowed_and_a_cpu_is_not_judged(inputs: Any) -> None:
    placement = Placement((gpus(0),), gpus(0), (1,))
    [row] = device_memory(config(), inputs, placement, GPUS)
    exact = (DeviceFacts("GPU", 2**40, row.total),)
    memory = device_memory(config(), inputs, placement, exact)
    check_memory(memory, config(), inputs, placement, exact)
    refusal(inputs, 1, row.total - 1, placement)
    cpu = Placement(((CPU,),), (CPU,), (1,))
    check_memory(device_memory(config(), inputs, cpu, ()), config(), inputs, cpu, ())


def test_the_table_groups_equal_devices_and_drops_empty_parts(inputs: Any) -> None:
    placement = Placement((gpus(0), gpus(1)), gpus(2), (2,))
    heading, targets, drafter = memory_table(device_memory(config(), inputs, placement, GPUS))
    assert heading.split()[:4] == ["GiB", "per", "device", "target"]
    assert "average" not in heading
    assert targets.startswith("cuda:0 to 1 ")
    assert drafter.startswith("cuda:2 ")
    assert drafter.endswith("1024.00")
    assert len(targets) == len(drafter) == len(heading)
