"""What a message advises is accepted when it is followed, with the flags that the message names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.config.running import SignalSection
from draftline.config.schema import Config
from draftline.errors import ResumeError, RunError
from draftline.runlog import RunLog
from draftline.train.loop import train
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.step.step import TrainStep
from tests.support.runs import before, configured, write_talks

# What a user makes of each key that a message says to lower.
LOWERED = {
    "max_anchors": "max_anchors=4",
    "token_budget": "token_budget=128",
    "loss.chunk_rows": "loss.chunk_rows=8",
    "topology.slots": "topology.slots=1",
    "train.learning_rate": "train.learning_rate=0.001",
}
KEYS = r"\b(?:max_anchors|token_budget|(?:loss|topology|train|signal)\.\w+)\b"


@pytest.fixture
def config(tmp_path: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    data = write_talks(tmp_path / "talks.jsonl")

    def build(*overrides: str) -> Config:
        return configured(tmp_path / "run", target_dir("llama"), data, *overrides)

    return build


def failing(monkeypatch: pytest.MonkeyPatch, fault: Callable[[TrainStep], None]) -> None:
    """Has `fault(step)` happen once, after the checkpoint of the third step."""
    calls = iter(range(1000))

    def staged(_: str, step: TrainStep, *__: Any) -> None:
        if next(calls) == 5:
            fault(step)

    before(monkeypatch, TrainStep, "gradients", staged)


def follow(message: str, config: Callable[..., Config], *more: str) -> int:
    """Does all that `message` says, one key at a time; returns how many there were."""
    keys = dict.fromkeys(re.findall(KEYS, message))
    assert keys.keys() <= LOWERED.keys()
    assert "--resume --accept-changes" in message
    for steps, key in enumerate(keys, start=9):
        changed = config(LOWERED[key], f"train.steps={steps}", *more)
        if key != "topology.slots":
            with pytest.raises(ResumeError, match="--accept-changes"):
                train(changed, resume=True)
        done = train(changed, resume=True, accept_changes=True)
        assert (done.step, done.interrupted) == (steps, False)
    return len(keys)


def test_what_a_full_device_advises(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: TrainStep) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    failing(monkeypatch, full)
    with pytest.raises(RunError, match="out of memory") as caught:
        train(config())
    assert follow(str(caught.value), config) == 4


def test_what_a_non_finite_step_advises(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda step: step.inputs.features.fill_(float("nan")))
    with pytest.raises(RunError, match="non-finite") as caught:
        train(config())
    assert follow(str(caught.value), config) == 1


def test_what_a_stop_by_the_signal_advises(config: Callable[..., Config], tmp_path: Path) -> None:
    """What is watched changes nothing that is computed, so no flag is needed."""
    first = train(config("train.steps=4"))
    with RunLog(tmp_path / "log") as runlog:
        watch = MemoryWatch(SignalSection(), runlog, "cpu", Choices())
        verdict: Any = SimpleNamespace(verdict="fault", line="", devices=())
        watch._end_run(verdict, "cuda:0: leak: it grows.", launching=False)
    advised = re.findall(r"signal\.\w+=\w+", str(watch.stopped))
    assert advised == ["signal.on_volatile=warn"]
    assert "with --resume where" in str(watch.stopped)
    others = ("signal.hz=2", "signal.notify=[cat]", "signal.launch_steps=5")
    for more in (
        advised,
        others,
        ("run.strict_choices=true",),
        ("features.source=memory", "target.capture=never"),
    ):
        assert train(config("train.steps=4", *more), resume=True).checkpoint == first.checkpoint


def test_a_smaller_pack_goes_on_where_an_epoch_has_more_of_them(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a larger one where the epoch has fewer than were already taken."""
    failing(monkeypatch, lambda step: step.inputs.features.fill_(float("nan")))
    with pytest.raises(RunError):
        train(config())
    for steps, budget in ((9, 128), (12, 640), (14, 1280)):
        changed = config(f"token_budget={budget}", f"train.steps={steps}", "max_batch_size=12")
        assert train(changed, resume=True, accept_changes=True).step == steps
