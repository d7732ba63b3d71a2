"""The plan's numbers, and its refusals before anything is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.data.packing import Pack, PackPlan
from draftline.errors import ConfigError, DeviceError
from draftline.model.drafter.backbone import DrafterShape
from draftline.model.target.facts import read_facts
from draftline.runtime.devices import DeviceFacts, parse_devices
from draftline.train.plan.placement import Placement
from draftline.train.plan.plan import Plan, plan_run
from draftline.train.plan.work import pack_work
from tests.support.tiny import build_samples

PACKS = PackPlan((Pack((0, 1), 90), Pack((2,), 70)), 100, 4, 80.0, "tokens")
CPU = Placement(((torch.device("cpu"),),), (torch.device("cpu"),), (1,))


def config(tmp_path: Path, *overrides: str) -> Config:
    tree = {
        "run": {"dir": str(tmp_path / "deep" / "run")},
        "target": {"path": "x"},
        "token_budget": 100,
        "max_anchors": 8,
        "block_size": 4,
        "data": {"train": ["x"], "max_length": 100},
        "train": {"epochs": 2.5},
    }
    return build_config(tree, list(overrides))


@pytest.fixture
def inputs(target_dir: Callable[[str], Path]) -> Any:
    facts = read_facts(str(target_dir("llama")), taps=(1, 2))
    shape = DrafterShape(facts.hidden_size, 32, 1, 4, 2, 8, 2, 4, 3)
    samples = build_samples((60, 30, 70))
    return SimpleNamespace(
        facts=facts, shape=shape, token_ids=None, tokens=160, samples=samples, heldout=()
    )


def gpus(targets: int, drafters: int) -> Placement:
    devices = [torch.device("cuda", index) for index in range(targets + drafters)]
    return Placement(
        tuple((device,) for device in devices[:targets]),
        tuple(devices[targets:]),
        (2,) * drafters,
    )


def test_steps_come_from_epochs_and_bytes_from_shapes(tmp_path: Path, inputs: Any) -> None:
    plan = plan_run(config(tmp_path), inputs, PACKS, CPU, ())
    assert (plan.steps, plan.packs, plan.rows) == (5, 2, 32)
    assert (plan.epochs, plan.packs_per_step, plan.accumulate) == (2.5, 1, 1)
    assert plan.parameters == inputs.shape.num_parameters
    assert plan.cache_bytes == 0
    assert plan.checkpoint_bytes == 12 * plan.parameters
    assert plan.disk_bytes == 3 * plan.checkpoint_bytes
    cached = plan_run(config(tmp_path, "features.source=memory"), inputs, PACKS, CPU, ())
    assert cached.cache_bytes == 160 * 2 * inputs.facts.hidden_size * 4
    assert "feature cache" in "\n".join(cached.lines())
    text = "\n".join(plan.lines())
    assert "placement: 1 target(s) on cpu" in text
    assert "5 steps, 2.50 epochs of 2 packs, fill 80.0 %" in text
    assert "duration unknown here; draftline plan --time" in text
    assert "feature cache" not in text


def test_a_step_takes_packs_of_all_drafters_and_machines(tmp_path: Path, inputs: Any) -> None:
    available = parse_devices("4x141")
    long = config(tmp_path, "train.epochs=60")
    plan = plan_run(long, inputs, PACKS, gpus(1, 3), available)
    assert (plan.steps, plan.packs_per_step, plan.accumulate) == (40, 3, 1)
    assert plan.rows == 3 * 32
    both = config(tmp_path, "train.epochs=60", "train.packs_per_step=12")
    plan = plan_run(both, inputs, PACKS, gpus(1, 3), available, nodes=2)
    assert (plan.steps, plan.packs_per_step, plan.accumulate) == (10, 12, 2)
    assert plan.epochs == 60
    with pytest.raises(ConfigError, match="no multiple of the 6 drafters"):
        plan_run(config(tmp_path, "train.packs_per_step=4"), inputs, PACKS, gpus(1, 3), (), nodes=2)
    few = plan_run(config(tmp_path, "train.epochs=0.1"), inputs, PACKS, gpus(1, 3), available)
    assert few.steps == 1


def test_padding_is_that_of_the_targets_batches(tmp_path: Path, inputs: Any) -> None:
    given = config(tmp_path, "target.batches=[[1,80]]")
    plan = plan_run(given, inputs, PACKS, CPU, ())
    assert plan.padding_pct == pytest.approx(100 * (240 - 160) / 240)
    derived = plan_run(config(tmp_path), inputs, PACKS, CPU, ())
    assert 0 <= derived.padding_pct < plan.padding_pct
    with pytest.raises(ConfigError, match="longest conversation has 70 tokens"):
        plan_run(config(tmp_path, "target.batches=[[1,60]]"), inputs, PACKS, CPU, ())


def planned(tmp_path: Path, inputs: Any, devices: str, **options: Any) -> Plan:
    overrides = ("train.epochs=null", "train.steps=3600", "target.batches=[[1,80]]")
    placement = gpus(1, 2)
    return plan_run(
        config(tmp_path, *overrides), inputs, PACKS, placement, parse_devices(devices), **options
    )


def test_hours_come_from_a_rate_or_from_a_known_gpu(tmp_path: Path, inputs: Any) -> None:
    unknown = planned(tmp_path, inputs, "3x141").hours
    assert (unknown.hours, str(unknown)) == (
        None,
        ("unknown here; draftline plan --time measures a step, --rate takes what bench step did"),
    )
    # 32 rows per pack at 16 rows/s are 2 s; two drafters work at once, and take two packs per step.
    given = planned(tmp_path, inputs, "3x141", rate=16.0).hours
    assert given.hours == pytest.approx(2.0)
    assert str(given).startswith("2.0 hours (at 16 rows/s per drafter")
    known = planned(tmp_path, inputs, "3xH200").hours
    assert "estimated from matrix work, not measured" in str(known)
    work = pack_work(config(tmp_path), inputs.facts, inputs.shape)
    # 80 % of a pack are tokens and a third of what the target computes is padding.
    fed = work.target * 0.8 / (160 / 240)
    seconds = 2 * max(fed, work.drafter / 2) / (0.55 * 790e12)
    assert known.hours == pytest.approx(seconds)
    inputs.facts = replace(inputs.facts, trunk_flops=1e15)
    slow = planned(tmp_path, inputs, "3xH200", rate=16.0).hours
    assert slow.hours == pytest.approx(2 * 1e15 * 100 * 1.2 / (0.55 * 790e12))
    assert "target estimated, not measured" in str(slow)


def test_every_machine_takes_its_share_of_the_packs(tmp_path: Path, inputs: Any) -> None:
    one = planned(tmp_path, inputs, "3x141", rate=16.0)
    two = planned(tmp_path, inputs, "3x141", rate=16.0, nodes=2)
    assert two.packs_per_step == 2 * one.packs_per_step
    assert two.hours.hours == one.hours.hours


def test_the_plan_as_json_has_every_number(tmp_path: Path, inputs: Any) -> None:
    plan = planned(tmp_path, inputs, "3x141", rate=16.0)
    tree = json.loads(json.dumps(plan.to_dict()))
    assert tree["steps"] == 3600
    assert tree["hours"] == plan.hours.hours
    assert tree["placement"]["drafters"] == ["cuda:1", "cuda:2"]
    assert [row["device"] for row in tree["memory"]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert tree["memory"][1]["total_bytes"] == sum(tree["memory"][1]["parts"].values())


def test_a_device_too_small_is_refused(tmp_path: Path, inputs: Any) -> None:
    small = (DeviceFacts("tiny GPU", 2**20, 2**10),) * 2
    with pytest.raises(DeviceError, match=r"cuda:1 \(tiny GPU\) needs at least"):
        plan_run(config(tmp_path), inputs, PACKS, gpus(1, 1), small)


def test_a_disk_too_small_for_the_checkpoints_is_refused(
    tmp_path: Path, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"checkpoints need .* free"):
        plan_run(config(tmp_path), inputs, PACKS, CPU, ())


def test_more_steps_than_a_checkpoint_can_name_are_refused(tmp_path: Path, inputs: Any) -> None:
    many = replace(PACKS, packs=PACKS.packs * 60)
    with pytest.raises(ConfigError, match=r"train.epochs=1e\+06 are 120000000 steps .* 99999999"):
        plan_run(config(tmp_path, "train.epochs=1e6"), inputs, many, CPU, ())
    assert plan_run(config(tmp_path, "train.epochs=8e5"), inputs, many, CPU, ()).steps == 96_000_000


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000])
def test_a_directory_that_no_disk_can_name_is_refused(
    tmp_path: Path, inputs: Any, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"run.dir=.* cannot be used: File name too long"):
        plan_run(config(tmp_path, f"run.dir={name}"), inputs, PACKS, CPU, ())


def test_the_plan_says_how_much_of_the_data_the_anchors_reach(tmp_path: Path, inputs: Any) -> None:
    """All but the first three of a sample's tokens are answers, whose last begins no block."""
    possible = [57 - 1 + 27 - 1, 67 - 1]
    plan = plan_run(config(tmp_path), inputs, PACKS, CPU, ())
    assert (plan.anchors, plan.anchored_pct) == (8, pytest.approx(100 * 16 / sum(possible)))
    assert "8 anchors per pack, in an epoch at 11 % of the positions" in "\n".join(plan.lines())
    auto = plan_run(config(tmp_path, "max_anchors=null"), inputs, PACKS, CPU, ())
    assert (auto.anchors, auto.rows) == (16, 64)
    every = plan_run(config(tmp_path, "max_anchors=100"), inputs, PACKS, CPU, ())
    assert every.anchored_pct == 100


def test_the_plan_counts_what_measuring_costs(
    tmp_path: Path, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_run(config(tmp_path), inputs, PACKS, CPU, ()).heldout is None
    inputs.heldout = tuple(build_samples((50, 40, 30)))
    settings = config(tmp_path, "train.epochs=null", "train.steps=9", "train.eval_every=4")
    plan = plan_run(settings, inputs, PACKS, CPU, ())
    cost = plan.heldout
    assert cost is not None
    # Packs of 100 tokens hold two of the three; their 120 - 9 - 3 positions come 8 at a time.
    assert (cost.conversations, cost.positions) == (3, 108)
    assert 14 <= cost.passes <= 15
    assert cost.measurements == 3
    assert cost.work_pct == pytest.approx(100 * cost.passes * 3 / 3 / 9)
    features = 100 * 2 * inputs.facts.hidden_size * 4
    assert cost.host_bytes == 2 * (features + 18 * 100)
    assert plan.memory[0].parts["held-out"] == cost.host_bytes
    assert f"{cost.passes} forward passes every 4 steps" in "\n".join(plan.lines())
    assert ": 1 forward pass every 4 steps" in replace(cost, passes=1).line()
    assert plan.to_dict()["heldout"]["positions"] == 108  # type: ignore[index]
    monkeypatch.setattr("draftline.train.plan.plan.free_host_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"held-out features need .* of host memory"):
        plan_run(settings, inputs, PACKS, CPU, ())
