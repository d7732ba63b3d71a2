"""Whole runs on GPUs: captured, in flat memory by their own recording, and equal drafters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftline.cli.app import app
from draftline.runtime.reduce import Reducer
from draftline.signal.judge.verdict import judge
from draftline.signal.readers.read import read_trace
from draftline.train.loop import train
from draftline.train.run import Trained
from draftline.train.step.step import TrainStep
from tests.support.fakes import tiny_target_dir
from tests.support.gpu import needs_gpu, needs_two
from tests.support.runs import (
    CtrlC,
    after,
    before,
    configured,
    events,
    metrics,
    write_talks,
)

pytestmark = needs_gpu

# Until a recording says more than a glance: readings come five times a second.
RECORDED_S = 15.0
SETTINGS = (
    "run.device=auto",
    "target.dtype=bfloat16",
    "target.capture=always",
    "drafter.head_dim=64",
    "block_size=8",
    "token_budget=512",
    "max_batch_size=8",
    "max_anchors=64",
)
Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-runs")
    write_talks(folder / "talks.jsonl", 24)
    tiny_target_dir(
        folder / "target",
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        head_dim=64,
    )
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Train:
    """Trains with the overrides in a directory called `name`."""

    def go(name: str, targets: list[int], drafters: list[int], *overrides: str) -> Trained:
        config = configured(
            place / name,
            place / "target",
            place / "talks.jsonl",
            f"topology.targets={[f'cuda:{i}' for i in targets]}",
            f"topology.drafters={[f'cuda:{i}' for i in drafters]}",
            *SETTINGS,
            *overrides,
        )
        return train(config)

    return go


@pytest.fixture(scope="module")
def long(run: Train) -> Trained:
    """A run of one target and one drafter on one GPU, stopped by Ctrl-C after `RECORDED_S`."""
    with pytest.MonkeyPatch.context() as patch:
        press, began = CtrlC(patch), 0.0

        def updated(*_: Any) -> None:
            nonlocal began
            now = time.monotonic()
            began = began or now
            if now - began > RECORDED_S:
                began = now + 600
                press()

        after(patch, TrainStep, "update", updated)
        return run(
            "long",
            [0],
            [0],
            "train.steps=100000",
            "train.warmup_ratio=0.001",
            "train.learning_rate=1e-3",
            "train.log_every=50",
            "train.checkpoint_every=2000",
        )


def losses(done: Trained) -> list[float]:
    assert not done.interrupted
    return [line["loss"] for line in metrics(done.run_dir)]


def test_a_run_is_compiled_captured_and_sealed_before_its_first_step(long: Trained) -> None:
    assert long.interrupted
    assert long.step > 200
    named = [event["event"] for event in events(long.run_dir)]
    assert named.index("sealed") < named.index("first_step") < named.index("checkpoint")
    [sealed] = [event for event in events(long.run_dir) if event["event"] == "sealed"]
    warmed = {row["name"]: row["outcome"] for row in sealed["warmed"]}
    assert warmed["drafter-0 step"] == "captured"
    parts = {(row["name"], row["part"]) for row in sealed["compiled"]}
    assert {("drafter", "forward"), ("drafter", "backward"), ("update", "forward")} <= parts
    [forwards] = [e for e in events(long.run_dir) if e.get("what") == "target forwards"]
    assert forwards["got"] == "captured"


def test_a_run_asks_the_allocator_for_nothing(long: Trained) -> None:
    [memory] = [event for event in events(long.run_dir) if event["event"] == "memory"]
    assert memory["device"] == "cuda:0"
    for nothing in ("allocator_calls", "reserved_change_bytes", "device_allocations", "retries"):
        assert memory[nothing] == 0, nothing


def test_a_run_learns(long: Trained) -> None:
    logged = metrics(long.run_dir)
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"]
    assert logged[-1]["bad_steps"] == 0


def test_the_recording_of_a_run_is_judged_flat(long: Trained) -> None:
    verdict = judge(read_trace([long.run_dir / "signal.jsonl"]))
    assert verdict.verdict == "healthy", verdict.line
    [device] = verdict.devices
    assert (device.shape, device.allocator) == ("flat", "flat")
    done = CliRunner().invoke(app, ["diagnose", str(long.run_dir / "signal.jsonl")])
    assert done.exit_code == 0, done.output


def test_eval_in_float32_decodes_what_the_target_does_alone(long: Trained, place: Path) -> None:
    scores = {}
    for device in ("cuda:0", "cpu"):
        out = place / f"{device}.json"
        overrides = [
            f"evaluate.prompts={{talks: {place / 'talks.jsonl'}}}",
            "evaluate.limit=4",
            "evaluate.max_new_tokens=24",
            "target.dtype=float32",
            f"run.device={device}",
        ]
        arguments = ["eval", str(long.run_dir), *overrides, "--out", str(out)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        [scores[device]] = json.loads(out.read_text())["scores"]
    for score in scores.values():
        assert score["identical"] == score["compared"] == 4
        assert score["differences"] == []
    assert scores["cuda:0"]["committed_counts"] == scores["cpu"]["committed_counts"]


def test_two_drafters_of_a_gpu_train_what_one_does(run: Train) -> None:
    """They share its compiled functions, and add two gradients up in the same order."""
    settings = ("train.packs_per_step=2", "topology.check_every=1")
    one = run("one-of-two-packs", [0], [0], *settings)
    two = run("two-of-a-pack", [0, 0], [0, 0], *settings)
    assert losses(two) == pytest.approx(losses(one), rel=1e-2)


@needs_two
def test_a_target_and_a_drafter_on_a_gpu_each_train_as_on_one(run: Train) -> None:
    together, apart = run("together", [0], [0]), run("apart", [0], [1])
    # Each device chooses its own tiles for a kernel, so bits may differ.
    assert losses(apart) == pytest.approx(losses(together), rel=1e-2)
    memory = [event for event in events(apart.run_dir) if event["event"] == "memory"]
    assert [event["device"] for event in memory] == ["cuda:0", "cuda:1"]
    for event in memory:
        assert (event["allocator_calls"], event["reserved_change_bytes"]) == (0, 0)


@needs_two
@pytest.mark.parametrize("reduction", ["nccl", "ordered"])
def test_drafters_on_two_gpus_stay_equal_to_the_bit(
    run: Train, monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    """The run compares them after every step, and would end where they differ."""
    compared: list[str] = []
    before(monkeypatch, Reducer, "check_replicas", lambda thread, *_: compared.append(thread))
    done = run(
        reduction,
        [0],
        [0, 1],
        f"topology.reduction={reduction}",
        "topology.check_every=1",
        "train.steps=40",
    )
    assert done.step == 40
    assert compared.count("drafter-0") == compared.count("drafter-1") == 1 + 40
