"""Where workers go: what was named, what is chosen, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import ConfigError, DeviceError
from draftline.model.target.facts import TargetFacts, read_facts
from draftline.runtime.devices import DeviceFacts, parse_devices
from draftline.train.plan.placement import Placement, accumulation, device_type, place, target_spans
from tests.support.gpu import gpus

CPU = torch.device("cpu")
EIGHT = parse_devices("8x141")


def config(*overrides: str) -> Config:
    tree = {
        "target": {"path": "x"},
        "token_budget": 100,
        "max_anchors": 8,
        "block_size": 4,
        "data": {"train": ["x"], "max_length": 100},
        "train": {"steps": 3},
    }
    return build_config(tree, list(overrides))


@pytest.fixture
def facts(target_dir: Callable[[str], Path]) -> TargetFacts:
    return read_facts(str(target_dir("llama")), taps=(1, 2), device_type="cuda")


def put(
    facts: TargetFacts, available: Sequence[DeviceFacts], *overrides: str, **options: Any
) -> tuple[Placement, Choices]:
    choices = Choices()
    return place(config(*overrides), facts, available, choices, **options), choices


def weighted(facts: TargetFacts, target: float) -> TargetFacts:
    """As if a pack took `target` times the work in the target that it takes in a drafter."""
    from draftline.model.drafter.init import build_shape
    from draftline.train.plan.work import pack_work

    work = pack_work(config(), facts, build_shape(config(), facts, 0))
    return replace(facts, trunk_flops=facts.trunk_flops * target * work.drafter / work.target)


def test_one_device_takes_both(facts: TargetFacts) -> None:
    for available, overrides, device, why in (
        ((), (), CPU, "no CUDA device is visible"),
        (EIGHT[:1], (), *gpus(0), "one GPU is visible"),
        (EIGHT, ("run.device=cuda:3",), *gpus(3), "run.device=cuda:3"),
        (EIGHT, ("run.device=cpu",), CPU, "run.device=cpu"),
    ):
        placement, choices = put(facts, available, *overrides)
        assert placement == Placement(((device,),), (device,), (1,))
        assert placement.shared == placement.devices == (device,)
        [entry] = choices.entries
        assert (entry.what, entry.reason) == ("topology", why)
        assert f"1 target(s) on {device}; 1 drafter(s) on {device}" in entry.got


@pytest.mark.parametrize(
    ("ratio", "targets", "drafters"),
    [(1.0, 4, 4), (5 / 3, 5, 3), (0.01, 1, 7), (100.0, 7, 1), (3.0, 6, 2)],
)
def test_gpus_are_split_so_that_neither_side_waits(
    facts: TargetFacts, ratio: float, targets: int, drafters: int
) -> None:
    placement, choices = put(weighted(facts, ratio), EIGHT)
    assert placement.targets == tuple((device,) for device in gpus(*range(targets)))
    assert placement.drafters == gpus(*range(targets, 8))
    assert len(placement.drafters) == drafters
    assert placement.shared == ()
    assert placement.slots == (2,) * drafters
    reason = choices.entries[0].reason
    assert reason.startswith("a pack is")
    assert "100 %" in reason


def test_packs_a_step_limit_the_drafters(facts: TargetFacts) -> None:
    drafting = weighted(facts, 0.01)
    assert len(put(drafting, EIGHT, "train.packs_per_step=12")[0].drafters) == 6
    two, _ = put(drafting, EIGHT, "train.packs_per_step=12", nodes=4)
    assert len(two.drafters) == 3
    assert len(two.targets) == 1, "a second target would only wait"


def test_a_target_too_large_for_one_gpu_spans_several(facts: TargetFacts) -> None:
    large = replace(weighted(facts, 1.0), total_bytes=200 * 2**30)
    placement, _ = put(large, EIGHT)
    assert placement.targets == (gpus(0, 1), gpus(2, 3))
    assert placement.drafters == gpus(4, 5), "a third drafter would only wait"
    huge = replace(large, total_bytes=9000 * 2**30)
    placement, _ = put(huge, EIGHT)
    assert placement.targets == (gpus(*range(7)),)
    assert placement.drafters == gpus(7)
    cached, _ = put(large, EIGHT[:5], "features.source=disk")
    assert cached.targets == (gpus(0, 1), gpus(2, 3))
    assert cached.drafters == gpus(0, 1, 2, 3, 4)


def test_a_target_that_works_alone_spans_what_it_spans_in_training(facts: TargetFacts) -> None:
    large = replace(facts, total_bytes=200 * 2**30)

    def spans(
        available: Sequence[DeviceFacts], *overrides: str, of: TargetFacts = large
    ) -> tuple[torch.device, ...]:
        return target_spans(config(*overrides), available, lambda: of)

    assert spans(EIGHT) == gpus(0, 1)
    assert spans(EIGHT, of=facts) == gpus(0)
    assert spans(EIGHT, "topology.targets=[cuda:2+cuda:3,cuda:4+cuda:5]", of=facts) == gpus(2, 3)
    # A single device may be another one here than in training, and one GPU needs no look at the target.
    assert spans(EIGHT[:1], "topology.targets=[cuda:5]") == spans(EIGHT[:1]) == spans(()) == ()
    with pytest.raises(DeviceError, match="cuda:1: no such GPU"):
        spans(EIGHT[:1], "topology.targets=[cuda:0+cuda:1]")


def test_cached_features_let_every_gpu_draft(facts: TargetFacts) -> None:
    for source in ("memory", "disk"):
        placement, choices = put(facts, EIGHT[:2], f"features.source={source}")
        assert placement.targets == ((gpus(0)), (gpus(1)))
        assert placement.drafters == placement.shared == gpus(0, 1)
        assert placement.slots == (2, 2)
        assert f"features.source={source}" in choices.entries[0].reason


def test_named_devices_are_taken_as_they_are(facts: TargetFacts) -> None:
    placement, choices = put(
        facts,
        EIGHT,
        "topology.targets=[cuda:0+cuda:1,cuda:2]",
        "topology.drafters=[cuda:2,cuda:5,cuda:5]",
    )
    assert placement.targets == (gpus(0, 1), gpus(2))
    assert placement.drafters == gpus(2, 5, 5)
    assert placement.devices == gpus(0, 1, 2, 5)
    assert placement.shared == gpus(2)
    assert placement.slots == (2, 2, 2)
    assert choices.entries == []
    text = "\n".join(placement.lines())
    assert "2 target(s) on cuda:0+cuda:1, cuda:2; 3 drafter(s) on cuda:2, cuda:5, cuda:5" in text
    assert "on cuda:2, cuda:5 the workers take turns" in text
    assert put(facts, EIGHT, "topology.slots=5")[0].slots[0] == 5


def test_the_side_that_is_not_named_gets_the_rest(facts: TargetFacts) -> None:
    placement, choices = put(facts, EIGHT[:4], "topology.drafters=[cuda:1]")
    assert placement.targets == ((gpus(0)), (gpus(2)), (gpus(3)))
    assert len(choices.entries) == 1
    placement, _ = put(facts, EIGHT[:4], "topology.targets=[cuda:1+cuda:2]")
    assert placement.drafters == gpus(0, 3)
    placement, _ = put(facts, EIGHT[:2], "topology.targets=[cuda:0,cuda:1]")
    assert placement.drafters == gpus(0, 1)
    placement, _ = put(facts, EIGHT, "topology.targets=[cuda:1]", "run.device=cuda:4")
    assert placement.drafters == gpus(4)
    placement, _ = put(facts, EIGHT, "topology.drafters=[cpu,cpu]")
    assert (placement.targets, placement.drafters) == (((CPU,),), (CPU, CPU))
    large = replace(facts, total_bytes=200 * 2**30)
    placement, _ = put(large, EIGHT[:4], "topology.drafters=[cuda:3]")
    assert placement.targets == (gpus(0, 1),)


@pytest.mark.parametrize(
    ("overrides", "error", "reason"),
    [
        (
            ["topology.targets=[cuda:2]"],
            DeviceError,
            "topology.targets=cuda:2: no such GPU; visibl",
        ),
        (["topology.drafters=[cuda:0,cuda:9]"], DeviceError, "cuda:0 GPU of 141 GiB, cuda:1"),
        (["topology.targets=[cuda:0+cuda:4]"], DeviceError, "topology.targets=cuda:4"),
        (["run.device=cuda:7"], DeviceError, "run.device=cuda:7: no such GPU"),
        (["topology.drafters=[cpu,cuda:0]"], ConfigError, "mix cpu and cuda"),
        (["topology.targets=[cpu]", "topology.drafters=[cuda:0]"], ConfigError, "mix cpu and cuda"),
        (["topology.targets=[cuda:0+cuda:0]"], ConfigError, "names a device twice"),
        (
            ["topology.drafters=[cuda:0,cuda:0]", "topology.reduction=nccl"],
            ConfigError,
            "nccl needs a GPU for each drafter",
        ),
        (["topology.drafters=[cpu,cpu]", "topology.reduction=nccl"], ConfigError, "nccl needs"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    facts: TargetFacts, overrides: list[str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        put(facts, EIGHT[:2], *overrides)


def test_a_gpu_on_a_machine_without_any(facts: TargetFacts) -> None:
    for override in ("run.device=cuda", "topology.targets=[cuda:0]"):
        with pytest.raises(DeviceError, match="no CUDA device is visible"):
            put(facts, (), override)


def test_the_kind_of_device() -> None:
    assert device_type(config(), ()) == "cpu"
    assert device_type(config(), EIGHT) == "cuda"
    assert device_type(config("run.device=cpu"), EIGHT) == "cpu"
    assert device_type(config("topology.drafters=[cpu]"), EIGHT) == "cpu"


def test_packs_a_step_are_shared_out_evenly() -> None:
    assert accumulation(config(), 3) == accumulation(config(), 3, 2) == 1
    assert accumulation(config("train.packs_per_step=12"), 3) == 4
    assert accumulation(config("train.packs_per_step=12"), 3, 2) == 2
    with pytest.raises(ConfigError, match=r"=7 is no multiple of the 6 drafters .* use 6 or 12"):
        accumulation(config("train.packs_per_step=7"), 3, 2)
    with pytest.raises(ConfigError, match=r"=1 is no multiple of the 3 drafters .* use 3 or 6"):
        accumulation(config("train.packs_per_step=1"), 3)


def test_the_slowest_device_sets_the_pace() -> None:
    def placement(targets: Any, drafters: Any) -> Placement:
        return Placement(targets, drafters, (1,) * len(drafters))

    assert placement((gpus(0),), gpus(0)).pack_time(3, 4) == 7, "they take turns"
    assert placement((gpus(0),), gpus(1)).pack_time(3, 4) == 4
    assert placement((gpus(0), gpus(1)), gpus(2)).pack_time(12, 4) == 6
    assert placement((gpus(0), gpus(1)), gpus(0, 1)).pack_time(12, 4) == 8
    assert placement((gpus(0, 1),), gpus(2)).pack_time(12, 4) == 12, "parts of a target wait"
    assert placement((gpus(0),), gpus(1, 1)).pack_time(1, 4) == 4, "two drafters on one GPU"
