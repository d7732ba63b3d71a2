"""Metrics reach the JSONL file, TensorBoard, and a terminal that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftline.errors import ConfigError
from draftline.runlog import RunLog
from draftline.train.trackers import Trackers

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
    assert 15 <= len(shown) <= 25
    assert "ETA 1.5 min" in shown[-1]


def test_a_missing_wandb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with RunLog(tmp_path) as runlog, pytest.raises(ConfigError, match=r"draftline\[wandb\]"):
        Trackers(runlog, ["wandb"], {}, total=1)
