"""What a configuration names is looked for before anything is loaded."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import ConfigError
from draftline.train.plan.named import check_named, find_faults

Build = Callable[..., Config]


@pytest.fixture
def config(tmp_path: Path, target_dir: Callable[[str], Path]) -> Build:
    (tmp_path / "talks.jsonl").write_text("{}\n")
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "runs" / "new")},
        "target": {"path": str(target_dir("llama")), "num_taps": 1},
        "data": {"train": [str(tmp_path / "talks.jsonl")]},
        "train": {"steps": 1},
        "evaluate": {"prompts": {"talks": str(tmp_path / "talks.jsonl")}},
    }
    return lambda *overrides: build_config(tree, overrides)


def test_a_tracker_that_is_not_installed_is_named_with_the_rest(
    config: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = config("train.trackers=[tensorboard, wandb]", "target.path=/no/model")
    assert [fault.partition(":")[0] for fault in find_faults(wanted)] == [
        "target.path=/no/model",
        "train.trackers names wandb, which is not installed",
    ]
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert len(find_faults(wanted)) == 1


def test_what_is_there_is_no_fault_and_nothing_is_made(config: Build, tmp_path: Path) -> None:
    assert find_faults(config()) == []
    assert find_faults(config("data.train=['builtin:demo-train']")) == []
    assert find_faults(config(f"data.train=['{tmp_path}/*.jsonl']")) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("target.path=/no/model", "target.path=/no/model: no such directory"),
        ("target.path=/no/model.gguf", "target.path=/no/model.gguf: no such file"),
        ("target.path=TMP", "TMP: the directory has no config.json"),
        ("target.path=TMP/talks.jsonl", "talks.jsonl is a file"),
        ("target.path=owner/name", "target.path=owner/name: no such directory here"),
        ("target.path=builtin:none", "the only embedded target is"),
        ("data.train=[TMP/gone.jsonl]", "data.train: TMP/gone.jsonl does not exist"),
        ("data.train=[TMP]", "data.train: TMP is a directory; name its files"),
        ("data.train=['TMP/*.parquet']", "data.train: TMP/*.parquet matches no file"),
        ("data.train=['builtin:none']", "data.train: builtin:none is not embedded"),
        ("data.heldout=[TMP/gone.jsonl]", "data.heldout: TMP/gone.jsonl does not exist"),
        ("data.heldout=[TMP]", "data.heldout: TMP is a directory; name its files"),
        ("evaluate.prompts.math=TMP/gone", "evaluate.prompts.math: TMP/gone does not exist"),
        ("target.num_taps=5", "target.num_taps is at most 3 here"),
        ("target.tap_layers=[5]", "names the last layer"),
        ("run.dir=/sys/kernel/x", "run.dir=/sys/kernel/x: /sys/kernel cannot be written ("),
        ("run.dir=TMP/talks.jsonl", "run.dir=TMP/talks.jsonl: TMP/talks.jsonl is a file"),
        ("run.dir=TMP/talks.jsonl/a/b", "TMP/talks.jsonl is a file; choose another with run.dir="),
        ("features={source: disk, dir: TMP/talks.jsonl}", "features.dir=TMP/talks.jsonl"),
    ],
)
def test_what_is_not_there_is_named(
    config: Build, tmp_path: Path, override: str, fault: str
) -> None:
    [found] = find_faults(config(override.replace("TMP", str(tmp_path))))
    assert fault.replace("TMP", str(tmp_path)) in found


def test_everything_is_named_at_once(config: Build) -> None:
    with pytest.raises(ConfigError) as caught:
        check_named(
            config(
                "target.path=/no/model",
                "data.train=[/no/a.jsonl, /no/b.jsonl]",
                "evaluate.prompts.x=/no/x",
                "run.dir=/dev/null/x",
            )
        )
    message = str(caught.value)
    for part in ("/no/model", "/no/a.jsonl", "/no/b.jsonl", "/no/x", "/dev/null is a file"):
        assert part in message


def test_training_does_not_ask_for_prompts(config: Build) -> None:
    check_named(config("evaluate.prompts.x=/no/x"), prompts=False)
    with pytest.raises(ConfigError):
        check_named(config("evaluate.prompts.x=/no/x"))


def test_what_may_not_be_read_or_written_is_named(
    config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser, as whom tests may run, may do anything."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = find_faults(config())
    assert f"data.train: {tmp_path}/talks.jsonl cannot be read by this user" in found
    assert f"run.dir={tmp_path}/runs/new: {tmp_path} cannot be written" in found[-1]
