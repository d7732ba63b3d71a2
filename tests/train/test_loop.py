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
from tensorboard.summary.writer.record_writer import RecordWriter

from draftline.checkpoint.restore import restore
from draftline.checkpoint.store import CheckpointWriter, checkpoint_paths
from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import CheckpointError, ConfigError, ResumeError, RunError, UserError
from draftline.train.loop import train
from draftline.train.plan.inputs import open_target, prepare
from draftline.train.save.saver import Saver
from draftline.train.step.step import TrainStep
from tests.checkpoint.test_store import reseal
from tests.support.runs import (
    CtrlC,
    after,
    assert_same,
    before,
    configured,
    events,
    metrics,
    tensors,
    worker_threads,
    write_talks,
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_talks(tmp_path / "talks.jsonl")


@pytest.fixture
def config(tmp_path: Path, data: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    def build(*overrides: str, run: str = "run") -> Config:
        return configured(tmp_path / run, target_dir("llama"), data, *overrides)

    return build


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Presses Ctrl-C right after step number `steps`."""
    press = CtrlC(monkeypatch)
    count = 0

    def updated(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == steps:
            press()

    after(monkeypatch, TrainStep, "update", updated)


def test_a_run_learns_and_logs(config: Callable[..., Config]) -> None:
    done = train(config("train.steps=160", "train.ema=null", "features.noise=0"))
    lines = metrics(done.run_dir)
    assert [x["step"] for x in lines] == list(range(2, 161, 2))
    last = lines[-10:]
    assert sum(x["loss"] for x in last) / len(last) < 0.75 * lines[0]["loss"]
    accepted, blocks = (sum(x[key] for x in last) for key in ("accepted", "blocks"))
    assert accepted / blocks > 0.15
    for line in lines:
        assert line["accept_length_forced"] == pytest.approx(1 + line["accepted"] / line["blocks"])
        assert line["drafters_waited_pct"] >= 0
    kinds = [e["event"] for e in events(done.run_dir)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"choice", "checkpoint", "device", "sealed", "first_step"} <= set(kinds)
    assert (done.run_dir / "config.yaml").exists()
    assert (done.step, done.total, done.interrupted) == (160, 160, False)
    assert not worker_threads()


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
    with monkeypatch.context() as patch:
        press = CtrlC(patch)
        after(patch, TrainStep, "capture", lambda *_: press())
        first = train(parts)
    assert (first.interrupted, first.step) == (True, 0)
    assert_same(whole.checkpoint, train(parts, resume=True).checkpoint)


def test_a_second_ctrl_c_stops_at_once(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    press = CtrlC(monkeypatch)

    def updated(*_: Any) -> None:
        press()
        os.kill(os.getpid(), signal.SIGINT)

    after(monkeypatch, TrainStep, "update", updated)
    settings = config()
    with pytest.raises(KeyboardInterrupt):
        train(settings)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not worker_threads()


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
        tensors(again.checkpoint)["drafter/fc.weight"], expected["drafter/fc.weight"]
    )


def test_a_used_directory_wants_resume_and_an_empty_one_begins(
    config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert train(config(), resume=True).step == 8
    assert "run holds no checkpoint, so this run starts from the beginning" in caplog.text
    with pytest.raises(ResumeError, match="--resume"):
        train(config())


def test_resume_begins_where_only_logs_were_left(config: Callable[..., Config]) -> None:
    Path(config().run.dir).mkdir(parents=True)
    (Path(config().run.dir) / "events.jsonl").write_text("")
    assert train(config("train.steps=1"), resume=True).step == 1


@pytest.mark.parametrize("override", ["train.steps=2", "train={epochs: 0.3, trackers: []}"])
def test_resuming_a_finished_run_says_so_and_loads_nothing(
    config: Callable[..., Config],
    override: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = train(config(override))
    written = (first.run_dir / "events.jsonl").read_bytes()
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        patch.setattr("draftline.train.loop.prepare", lambda *_: pytest.fail("it reads the data"))
        again = train(config(override), resume=True)
    assert "all steps are done" in caplog.text
    assert (again.step, again.total, again.checkpoint) == (
        first.step,
        first.total,
        first.checkpoint,
    )
    assert not again.interrupted
    assert (first.run_dir / "events.jsonl").read_bytes() == written
    # More steps are another matter.
    more = config("train.steps=4")
    assert train(more, resume=True, accept_changes=True).step == 4


@pytest.mark.parametrize(
    "override",
    [
        "target.tap_layers=[99]",
        "block_size=100",
        "data.train=[/no/where.jsonl]",
        "drafter.mask_token_id=100000",
    ],
)
def test_a_refused_run_leaves_no_directory(config: Callable[..., Config], override: str) -> None:
    settings = config("token_budget=600", override)
    with pytest.raises(UserError):
        train(settings)
    assert not Path(settings.run.dir).exists()


def test_a_refused_run_leaves_alone_what_was_there(config: Callable[..., Config]) -> None:
    kept = Path(config().run.dir) / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(UserError):
        train(config("data.max_length=16"))
    assert kept.read_text() == "mine"
    assert (kept.parent / "events.jsonl").is_file()


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


def test_a_key_that_a_later_release_added_is_no_change(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 2)
    path = train(config()).checkpoint
    assert path is not None
    state = json.loads((path / "state.json").read_text())
    del state["config"]["signal"], state["config"]["loss"]["soft_labels"]
    reseal(path, state)
    assert train(config(), resume=True).step == 8


@pytest.mark.parametrize("override", ["drafter.layers=2", "drafter.intermediate_size=24"])
def test_a_drafter_of_other_weights_is_not_continued(
    config: Callable[..., Config], override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 2)
    train(config())
    with pytest.raises(ResumeError, match=r"weights do not fit this one \((num_layers|inter\w+): "):
        train(config(override), resume=True, accept_changes=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    finish = Saver.finish

    def signalled(*arguments: Any) -> Path:
        signal.raise_signal(number)
        return finish(*arguments)

    monkeypatch.setattr(Saver, "finish", signalled)
    done = train(config("train.steps=1"))
    assert (done.step, done.interrupted) == (1, False)
    assert done.checkpoint is not None
    assert done.checkpoint.is_dir()


def test_a_signal_before_the_first_step_is_in_the_log(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "draftline.train.loop.prepare", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    with pytest.raises(KeyboardInterrupt):
        train(config())
    run_dir = Path(config().run.dir)
    last = (run_dir / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["error"].startswith("KeyboardInterrupt")
    assert not (run_dir / ".lock").exists()


def test_resume_refuses_other_data_behind_the_same_name(
    config: Callable[..., Config], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 2)
    train(config())
    data.write_text("\n".join(data.read_text().splitlines()[:-1]))
    with pytest.raises(ResumeError, match="other data"):
        train(config(), resume=True)


def test_resume_with_other_workers_wants_as_many_packs_a_step(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 2)
    train(config("train.steps=4"))
    more = config("train.steps=4", "topology.drafters=[cpu,cpu]")
    with pytest.raises(ResumeError, match=r"1 packs per step.*take 2.*packs_per_step=1"):
        train(more, resume=True)
    assert train(more, resume=True, accept_changes=True).step == 4


def test_a_non_finite_step_stops_the_run_and_keeps_the_last_checkpoint(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def staged(_: str, step: TrainStep, number: int) -> None:
        nonlocal count
        count += 1
        if count == 5:
            step.inputs.features.fill_(float("nan"))

    before(monkeypatch, TrainStep, "gradients", staged)
    settings = config()
    with pytest.raises(RunError, match=r"non-finite.*steps up to 6.*--resume"):
        train(settings)
    last = (Path(settings.run.dir) / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["event"] == "failed"
    assert "RunError: a non-finite loss" in json.loads(last)["error"]
    kept = checkpoint_paths(Path(settings.run.dir) / "checkpoints")
    assert "step-00000003" in [p.name for p in kept]
    for path in kept:
        assert all(bool(t.isfinite().all()) for t in tensors(path).values())


def test_a_full_disk_at_the_end_is_an_error_and_earlier_checkpoints_stay(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftline.checkpoint import store as checkpoint

    def save(_: str, tensors: Any, path: Path) -> None:
        if "00000008" in str(path):
            raise OSError(28, "No space left on device")

    before(monkeypatch, checkpoint, "save_file", save)
    settings = config()
    with pytest.raises(CheckpointError, match="No space left"):
        train(settings)
    paths = checkpoint_paths(Path(settings.run.dir) / "checkpoints")
    assert [p.name for p in paths] == ["step-00000006", "step-00000003"]


def test_a_terminated_run_saves_as_an_interrupted_one_does(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = CtrlC(monkeypatch)
    steps = 0

    def stepped(name: str, *_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.noticed()

    after(monkeypatch, TrainStep, "update", stepped)
    done = train(config())
    assert (done.interrupted, done.step) == (True, 4)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_mask_row_that_was_not_at_hand_before_is_checked_once_it_is_loaded(
    config: Callable[..., Config],
) -> None:
    settings = config()
    inputs = prepare(settings, Choices())
    target = open_target(settings, Choices())
    with torch.no_grad():
        target.embedding[inputs.shape.mask_token_id] = 0
    with pytest.raises(ConfigError, match="embedding row of zeros"):
        train(settings, inputs=inputs, target=target)


def test_a_second_training_of_a_directory_is_refused_and_the_first_untouched(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config(run="whole"))
    said: list[str] = []

    def second(*_: Any) -> None:
        if said:
            return
        for resume in (True, False):
            try:
                train(config("run.seed=4"), resume=resume)
            except ConfigError as error:
                said.append(str(error))

    with monkeypatch.context() as patch:
        before(patch, TrainStep, "update", second)
        first = train(config())
    assert len(said) == 2
    assert all(f"is being written by process {os.getpid()} on" in text for text in said)
    assert "run.dir=" in said[0]
    assert_same(whole.checkpoint, first.checkpoint)
    assert [e["event"] for e in events(first.run_dir)].count("start") == 1
    assert not (first.run_dir / ".lock").exists()


def test_a_run_is_read_while_it_trains(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def read(*_: Any) -> None:
        directory = Path(config().run.dir)
        if checkpoint_paths(directory / "checkpoints"):
            seen.append(restore(directory).step)

    with monkeypatch.context() as patch:
        before(patch, TrainStep, "update", read)
        train(config())
    assert seen
    assert set(seen) <= {3, 6}


@pytest.mark.parametrize("late", [False, True])
def test_a_tracker_on_a_full_disk_does_not_end_a_run(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    whole = train(config(run="whole"))
    if late:
        after(
            monkeypatch,
            CheckpointWriter,
            "save",
            lambda *_: monkeypatch.setattr(RecordWriter, "write", full),
        )
    else:
        monkeypatch.setattr(RecordWriter, "write", full)
    done = train(config("train.trackers=[tensorboard]"))
    assert (done.step, done.interrupted) == (8, False)
    assert_same(whole.checkpoint, done.checkpoint)
    assert [line["step"] for line in metrics(done.run_dir)] == [2, 4, 6, 8]
    assert "tracker_dropped" in [e["event"] for e in events(done.run_dir)]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_what_a_run_leaves_is_for_whom_the_umask_lets(
    config: Callable[..., Config], mask: int
) -> None:
    here = os.umask(mask)
    try:
        done = train(config("features.source=disk", "train.trackers=[tensorboard]"))
    finally:
        os.umask(here)
    for path in (done.run_dir, *done.run_dir.rglob("*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == wanted, path


@pytest.mark.parametrize("file", ["state.json", "state.json.sha256", "optimizer.safetensors"])
def test_one_changed_digit_is_passed_over_by_name(
    config: Callable[..., Config], caplog: pytest.LogCaptureFixture, file: str
) -> None:
    """Every digit of a state looks as good as another."""
    done = train(config())
    path = done.run_dir / "checkpoints" / "step-00000008" / file
    data = bytearray(path.read_bytes())
    digits = [at for at, byte in enumerate(data) if byte in b"12345"]
    at = digits[len(digits) // 2]
    data[at] += 1
    path.write_bytes(bytes(data))
    again = train(config(), resume=True)
    assert (again.step, again.interrupted) == (8, False)
    assert f"step-00000008 is damaged: {file.removesuffix('.sha256')} does not have" in caplog.text
    assert "falling back" in caplog.text
    assert_same(train(config(run="whole")).checkpoint, again.checkpoint)
