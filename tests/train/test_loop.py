"""Whole training runs on tiny targets: resume, interruption, damage, changed configurations."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.config import Config
from draftline.config_file import build_config
from draftline.errors import CheckpointError, ResumeError, RunError
from draftline.train import loop
from draftline.train.checkpoint import checkpoint_paths, load_checkpoint
from draftline.train.loop import train

WORDS = [
    "hello",
    "there",
    "what",
    "is",
    "a",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "ran",
    "away",
    "again",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    with path.open("w") as file:
        for n in range(12):
            words = [WORDS[(n * 5 + i * (n + 1)) % len(WORDS)] for i in range(30)]
            turns = [
                {"role": "user", "content": " ".join(words[:4])},
                {"role": "assistant", "content": " ".join(words)},
            ]
            file.write(json.dumps({"id": str(n), "messages": turns}) + "\n")
    return path


@pytest.fixture
def config(tmp_path: Path, data: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    def build(*overrides: str, run: str = "run") -> Config:
        tree: dict[str, Any] = {
            "run": {"dir": str(tmp_path / run), "device": "cpu", "seed": 3},
            "target": {"path": str(target_dir("llama")), "tap_layers": [1, 2]},
            "drafter": {"layers": 1},
            "block_size": 4,
            "token_budget": 160,
            "max_batch_size": 4,
            "max_anchors": 8,
            "data": {"train": [str(data)], "max_length": 128},
            "features": {"noise": 0.1},
            "train": {
                "steps": 8,
                "learning_rate": 1e-2,
                "ema": 0.9,
                "log_every": 2,
                "checkpoint_every": 3,
                "trackers": [],
            },
        }
        return build_config(tree, list(overrides))

    return build


def tensors(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    return load_checkpoint(checkpoint).tensors


def assert_same(left: Path, right: Path) -> None:
    a, b = tensors(left), tensors(right)
    assert a.keys() == b.keys()
    for group in a:
        assert a[group].keys() == b[group].keys()
        for name in a[group]:
            assert torch.equal(a[group][name], b[group][name]), (group, name)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Sends SIGINT to this process right after step number `steps`."""
    original = loop.TrainStep.__call__
    count = 0

    def step(self: Any, pack: Any) -> None:
        nonlocal count
        original(self, pack)
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.TrainStep, "__call__", step)


def test_a_run_learns_and_logs(config: Callable[..., Config]) -> None:
    done = train(config("train.steps=120", "train.ema=null", "features.noise=0"))
    lines = [json.loads(x) for x in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(2, 121, 2))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    assert lines[-1]["accept_length_forced"] > 1.3
    for line in lines:
        assert line["accept_length_forced"] == pytest.approx(1 + line["accepted"] / line["blocks"])
    events = [json.loads(x) for x in (done.run_dir / "events.jsonl").read_text().splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"choice", "checkpoint", "device"} <= set(kinds)
    assert (done.run_dir / "config.yaml").exists()
    assert (done.step, done.total, done.interrupted) == (120, 120, False)


def test_equal_configurations_give_equal_weights(config: Callable[..., Config]) -> None:
    assert_same(train(config(run="a")).checkpoint, train(config(run="b")).checkpoint)


@pytest.mark.parametrize("source", ["online", "memory", "disk"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    whole = train(config(f"features.source={source}", run="whole"))
    parts = config(f"features.source={source}", run="parts")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        first = train(parts)
    assert (first.interrupted, first.step) == (True, 4)
    second = train(parts, resume=True)
    assert (second.interrupted, second.step) == (False, 8)
    assert_same(whole.checkpoint, second.checkpoint)


def test_interruption_before_the_first_step_is_saved_and_resumed(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config(run="whole"))
    parts = config(run="parts")
    original = loop._Run._warm

    def warm(self: Any) -> None:
        original(self)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_warm", warm)
        first = train(parts)
    assert (first.interrupted, first.step) == (True, 0)
    assert_same(whole.checkpoint, train(parts, resume=True).checkpoint)


def test_a_second_ctrl_c_stops_at_once(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.TrainStep.__call__

    def step(self: Any, pack: Any) -> None:
        original(self, pack)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.TrainStep, "__call__", step)
    with pytest.raises(KeyboardInterrupt):
        train(config())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_checkpoint_cut_in_half_falls_back_to_the_one_before(
    config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(config(run="run"))
    newest, older = checkpoint_paths(whole.run_dir / "checkpoints")
    expected = tensors(newest)
    file = newest / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again = train(config(run="run"), resume=True)
    assert older.name == "step-00000006"
    assert "falling back" in caplog.text
    assert str(newest) in caplog.text
    assert torch.equal(
        tensors(again.checkpoint)["drafter"]["fc.weight"], expected["drafter"]["fc.weight"]
    )


def test_a_used_directory_wants_resume_and_an_empty_one_refuses_it(
    config: Callable[..., Config],
) -> None:
    with pytest.raises(ResumeError, match="holds no checkpoint"):
        train(config(), resume=True)
    train(config())
    with pytest.raises(ResumeError, match="--resume"):
        train(config())


def test_resume_names_the_keys_that_differ(config: Callable[..., Config]) -> None:
    train(config())
    changed = config("train.learning_rate=0.5", "loss.gamma=3", "train.log_every=1")
    with pytest.raises(ResumeError) as caught:
        train(changed, resume=True)
    message = str(caught.value)
    assert "train.learning_rate: 0.01 -> 0.5" in message
    assert "loss.gamma: None -> 3.0" in message
    assert "log_every" not in message
    assert train(changed, resume=True, accept_changes=True).step == 8


def test_resume_refuses_other_data_behind_the_same_name(
    config: Callable[..., Config], data: Path
) -> None:
    train(config())
    data.write_text("\n".join(data.read_text().splitlines()[:-1]))
    with pytest.raises(ResumeError, match="other data"):
        train(config(), resume=True)


def test_a_non_finite_step_stops_the_run_and_keeps_the_last_checkpoint(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.TrainStep.__call__
    count = 0

    def step(self: Any, pack: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            pack.features.fill_(float("nan"))
        original(self, pack)

    monkeypatch.setattr(loop.TrainStep, "__call__", step)
    settings = config()
    with pytest.raises(RunError, match="non-finite"):
        train(settings)
    kept = checkpoint_paths(Path(settings.run.dir) / "checkpoints")
    assert [p.name for p in kept] == ["step-00000006", "step-00000003"]
    for path in kept:
        assert all(bool(t.isfinite().all()) for t in tensors(path)["drafter"].values())


def test_a_full_disk_at_the_end_is_an_error_and_earlier_checkpoints_stay(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftline.train import checkpoint

    original = checkpoint.save_file

    def save(tensors: Any, path: Path) -> None:
        if "00000008" in str(path):
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save)
    settings = config()
    with pytest.raises(CheckpointError, match="No space left"):
        train(settings)
    paths = checkpoint_paths(Path(settings.run.dir) / "checkpoints")
    assert [p.name for p in paths] == ["step-00000006", "step-00000003"]
