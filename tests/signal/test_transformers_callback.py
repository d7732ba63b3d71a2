"""The callback in a real Trainer on a tiny model, and what it does at each of the Trainer's events."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftline.signal import monitor, transformers_callback
from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.signal.transformers_callback import WARM_STEPS, SignalCallback
from tests.support.recordings import read_rows


def phases_of(path: Path) -> list[str]:
    return [line["phase"] for line in read_rows(path) if line["kind"] == "phase"]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Output directory of a run of 14 steps that evaluates at 12 and saves at 13."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    rows = [{"input_ids": [i % 30 + 1] * 8, "labels": [i % 30 + 1] * 8} for i in range(28)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=14,
        eval_strategy="steps",
        eval_steps=12,
        save_steps=13,
        logging_steps=5,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen="all",
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[SignalCallback()],
    )
    trainer.train()
    assert not any("signal" in key for entry in trainer.state.log_history for key in entry)
    return tmp_path / "out"


def test_a_run_of_the_trainer_is_recorded(trained: Path) -> None:
    lines = read_rows(trained / "signal.jsonl")
    assert lines[0]["kind"] == "start"
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 15))
    assert {step["tokens"] for step in steps} == {16}
    assert steps[0]["wall_ms"] is None
    assert all(step["wall_ms"] > 0 for step in steps[1:])
    # At the end the Trainer evaluates and saves once more.
    assert phases_of(trained / "signal.jsonl") == [
        "warm",
        "run",
        "evaluate",
        "run",
        "checkpoint",
        "run",
        "evaluate",
        "checkpoint",
        "end",
    ]
    phase_times = [line["time_s"] for line in lines if line["kind"] == "phase"]
    assert steps[WARM_STEPS - 1]["time_s"] <= phase_times[1] <= steps[WARM_STEPS]["time_s"]


def quiet() -> SimpleNamespace:
    return SimpleNamespace(should_evaluate=False, should_save=False)


def arguments(folder: Path, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(output_dir=str(folder), process_index=rank)


def verdict(cause: str, shape: str = "flat") -> Verdict:
    found = Cause(cause, "high", "it grows", "do this")
    return Verdict((DeviceVerdict("0", shape, "words", (), (found,)),))


def run_steps(callback: SignalCallback, count: int, args: SimpleNamespace) -> None:
    for number in range(1, count + 1):
        state = SimpleNamespace(global_step=number, num_input_tokens_seen=0)
        callback.on_step_begin(args, state, quiet())
        callback.on_step_end(args, state, quiet())


def test_a_verdict_that_is_not_flat_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = verdict("leak", "slope")
    monkeypatch.setattr(monitor, "judge", lambda trace: now)
    monkeypatch.setattr(transformers_callback, "_JUDGE_S", 0.0)
    callback, args = SignalCallback(), arguments(tmp_path)
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    with caplog.at_level(logging.INFO, logger="draftline.signal"):
        callback.on_train_begin(args, state, quiet())
        run_steps(callback, 2 * WARM_STEPS - 1, args)
        callback.on_log(args, state, quiet(), logs={})
        assert caplog.messages == []  # too early to judge
        run_steps(callback, 1, args)
        callback.on_log(args, state, quiet(), logs={})
        callback.on_log(args, state, quiet(), logs={})
        callback.on_train_end(args, state, quiet())
    assert caplog.messages == [f"memory: {now.line} (recorded in {tmp_path / 'signal.jsonl'})"]


@pytest.mark.parametrize("found", [verdict("healthy"), verdict("unknown"), Verdict(())])
def test_other_verdicts_are_not_said(
    found: Verdict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(monitor, "judge", lambda trace: found)
    callback, args = SignalCallback(), arguments(tmp_path)
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    callback.on_train_begin(args, state, quiet())
    run_steps(callback, 3, args)
    callback.on_train_end(args, state, quiet())
    assert caplog.messages == []


def test_a_judge_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(trace: object) -> None:
        raise ValueError("no such column")

    monkeypatch.setattr(monitor, "judge", judge)
    callback, args = SignalCallback(), arguments(tmp_path)
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    callback.on_train_begin(args, state, quiet())
    callback.on_train_end(args, state, quiet())
    assert caplog.messages == ["the program's memory cannot be judged"]


def test_ranks_and_a_given_path_have_files_of_their_own(tmp_path: Path) -> None:
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    for callback, rank in ((SignalCallback(), 1), (SignalCallback(tmp_path / "mine.jsonl"), 0)):
        callback.on_train_begin(arguments(tmp_path, rank), state, quiet())
        callback.on_train_end(arguments(tmp_path, rank), state, quiet())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.jsonl", "signal-rank1.jsonl"]


def test_a_run_after_one_that_was_broken_off_begins_a_recording_of_its_own(tmp_path: Path) -> None:
    callback, args = SignalCallback(), arguments(tmp_path)
    state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    for _ in range(2):  # the first one never sees on_train_end
        callback.on_train_begin(args, state, quiet())
        run_steps(callback, 2, args)
    callback.on_train_end(args, state, quiet())
    kinds = [line["kind"] for line in read_rows(tmp_path / "signal.jsonl")]
    # What this process compiled before is told as events.
    kinds = [kind for kind in kinds if kind in ("start", "phase", "step")]
    assert kinds == ["start", "phase", "step", "step"] * 2 + ["phase"]


def test_every_event_of_the_trainer_is_answered() -> None:
    from transformers import TrainerCallback

    callback = SignalCallback()
    for name in dir(TrainerCallback):
        if name.startswith("on_"):
            assert callable(getattr(callback, name))
    assert callback.on_push_begin(None, None, None, model=None) is None
    with pytest.raises(AttributeError):
        _ = callback.no_such_thing
