"""Metrics reach the JSONL file, TensorBoard, and a terminal that is none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from draftline.errors import ConfigError
from draftline.runlog import RunLog
from draftline.train.report.trackers import TerminalProgress, Trackers
from tests.support.runs import events
from tests.support.timing import Clock

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
    assert lines(capsys) == ["step 1/100  14.00 s per step  ETA 23.1 min"]
    for step in range(2, 10):
        clock.now += 1
        shown.reached(step)
    assert lines(capsys) == []
    clock.now += 2
    shown.reached(10)
    assert lines(capsys) == ["step 10/100  2.40 s per step  ETA 3.6 min"]
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
    assert lines(capsys) == ["step 41/60  3.00 s per step  ETA 0.9 min"]


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
    assert shown._progress.tasks[0].fields["text"] == "1.00 s per step"


def test_a_terminal_that_is_gone_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with RunLog(tmp_path) as runlog, Trackers(runlog, [], {}, total=4) as trackers:
        monkeypatch.setattr(TerminalProgress, "reached", gone)
        trackers.reached(1)
        trackers.reached(2)


class FullDisk:
    """What a tracker's file does on a disk without room, from its `after`-th call on."""

    def __init__(self, after: int) -> None:
        self.calls, self.after = 0, after

    def __call__(self, *_: object, **__: object) -> None:
        self.calls += 1
        if self.calls > self.after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run(directory: Path, names: list[str]) -> list[int]:
    """The steps in metrics.jsonl after three lines of metrics."""
    with RunLog(directory) as runlog, Trackers(runlog, names, {}, total=3, quiet=True) as trackers:
        for step in (1, 2, 3):
            trackers.metrics(step, VALUES)
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_full_disk_drops_tensorboard_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    after: int,
) -> None:
    monkeypatch.setattr(RecordWriter, "write", disk := FullDisk(after))
    assert run(tmp_path, ["tensorboard"]) == [1, 2, 3]
    assert disk.calls == after + 1
    [warning] = [r.getMessage() for r in caplog.records]
    assert "tensorboard failed (No space left on device); the run goes on" in warning
    assert [e["tracker"] for e in events(tmp_path)] == ["tensorboard"]
    assert "Traceback" not in capfd.readouterr().err
    assert "event" not in " ".join(t.name.lower() for t in threading.enumerate())


def test_a_really_full_disk_drops_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    plain = Path.open

    def full(path: Path, *args: Any, **kwargs: Any) -> Any:
        tracker = path.parent.name == "tensorboard"
        return plain(Path("/dev/full") if tracker else path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    assert run(tmp_path, ["tensorboard"]) == [1, 2, 3]
    assert caplog.text.count("No space left on device") == 1


class Wandb(types.ModuleType):
    """The package, with a run whose calls fail from the `after`-th on."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__("wandb")
        self.error, self.left = error, after
        self.ended: list[int] = []

    def init(self, **_: object) -> Wandb:
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.mark.parametrize("error", [ConnectionError("the server is gone"), RuntimeError("no file")])
def test_a_lost_service_drops_wandb_and_keeps_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(error, 1))
    assert run(tmp_path, ["wandb", "tensorboard"]) == [1, 2, 3]
    assert caplog.text.count("wandb failed") == 1
    written = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in written.Scalars("loss")] == [1, 2, 3]


def test_a_tracker_that_cannot_end_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Wandb(OSError(), 9)
    monkeypatch.setattr(service, "finish", FullDisk(0))
    monkeypatch.setitem(sys.modules, "wandb", service)
    assert run(tmp_path, ["wandb"]) == [1, 2, 3]
    assert "wandb failed (No space left on device)" in caplog.text


def test_a_tracker_that_cannot_begin_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Wandb(OSError(), 9)
    monkeypatch.setattr(service, "init", FullDisk(0))
    monkeypatch.setitem(sys.modules, "wandb", service)
    with RunLog(tmp_path) as runlog:
        with pytest.raises(ConfigError, match=r"wandb cannot be started .*wandb login"):
            Trackers(runlog, ["wandb"], {}, total=1, quiet=True)
        (tmp_path / "tensorboard").write_text("in the way")
        with pytest.raises(ConfigError, match=r"tensorboard cannot be written .*trackers=\[\]"):
            Trackers(runlog, ["tensorboard"], {}, total=1, quiet=True)


def test_the_outcome_of_the_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Wandb(OSError(), 9)
    monkeypatch.setitem(sys.modules, "wandb", service)
    assert run(tmp_path, ["wandb"]) == [1, 2, 3]
    trackers = Trackers(RunLog(tmp_path), ["wandb"], {}, total=1, quiet=True)
    with pytest.raises(ValueError, match="the run"), trackers:
        raise ValueError("the run")
    assert service.ended == [0, 1]


def test_a_terminal_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `draftline train 2>&1 | head` the right side ends first."""
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", gone)
    with RunLog(tmp_path) as runlog, Trackers(runlog, [], {}, total=3) as trackers:
        for step in (1, 2, 3):
            trackers.metrics(step, VALUES)
    with contextlib.suppress(OSError):
        gone.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert [e["tracker"] for e in events(tmp_path)] == ["the terminal"]
