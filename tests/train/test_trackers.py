"""Metrics reach the JSONL file, TensorBoard, and a terminal that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftline.errors import ConfigError
from draftline.runlog import RunLog
from draftline.train.trackers import TerminalProgress, Trackers

VALUES = {
    "loss": 2.5,
    "accept_length_forced": float("nan"),
    "tokens_per_s": 10.0,
    "rows_per_s": 20.0,
    "eta_s": 90.0,
    "slot_accuracy": [0.5, float("nan")],
}


def test_metrics_are_written_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path) as runlog, Trackers(runlog, ["tensorboard"], {}, total=40) as trackers:
        for step in range(1, 41):
            trackers.metrics(step, VALUES)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == list(range(1, 41))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == [2.5] * 40
    assert "slot_accuracy/1" in events.Tags()["scalars"]
    # What was not measured is left out rather than drawn as a number.
    assert "accept_length_forced" not in events.Tags()["scalars"]
    shown = [x for x in capsys.readouterr().err.splitlines() if x.startswith("step ")]
    assert shown[-1].startswith("step 40/40  loss 2.500")
    assert "ETA 1.5 min" in shown[-1]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_progress_moves_from_the_first_step_and_then_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    shown = TerminalProgress(100, clock)
    shown.reached(0)
    clock.now += 12
    shown.reached(0)
    assert lines(capsys) == ["step 0/100  the first step is under way, 12 s"]
    clock.now += 2
    shown.reached(1)
    assert lines(capsys) == ["step 1/100  14.00 s a step  ETA 23.1 min"]
    for step in range(2, 10):
        clock.now += 1
        shown.reached(step)
    assert lines(capsys) == []
    clock.now += 2
    shown.reached(10)
    assert lines(capsys) == ["step 10/100  2.40 s a step  ETA 3.6 min"]
    clock.now += 10
    shown.update(10, VALUES)
    assert lines(capsys) == [
        "step 10/100  loss 2.500  accept nan  10 tok/s  20 rows/s  ETA 1.5 min"
    ]
    clock.now += 11
    shown.reached(11)
    assert lines(capsys)[0].startswith("step 11/100  loss 2.500  accept nan")


def test_a_resumed_run_counts_its_rate_from_where_it_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    shown = TerminalProgress(60, clock)
    shown.reached(40)
    clock.now += 3
    shown.reached(41)
    assert lines(capsys) == ["step 41/60  3.00 s a step  ETA 0.9 min"]


def test_a_bar_on_a_terminal_follows_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock = Clock()
    shown = TerminalProgress(10, clock)
    assert shown._progress is not None
    seen = []
    for step in (0, 1, 2, 3):
        clock.now += 1
        shown.reached(step)
        seen.append(shown._progress.tasks[0].completed)
    assert seen == [0, 1, 2, 3]
    assert shown._progress.tasks[0].fields["text"] == "1.00 s a step"


def test_a_terminal_that_is_gone_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with RunLog(tmp_path) as runlog, Trackers(runlog, [], {}, total=4) as trackers:
        monkeypatch.setattr(TerminalProgress, "reached", gone)
        trackers.reached(1)
        trackers.reached(2)


def test_a_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with RunLog(tmp_path) as runlog, pytest.raises(ConfigError, match=r"draftline\[wandb\]"):
        Trackers(runlog, ["wandb"], {}, total=1)
