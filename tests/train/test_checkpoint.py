"""Checkpoints: whole or not there, damage is seen and said, and training outlives a full disk."""

from __future__ import annotations

import json
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.errors import CheckpointError
from draftline.train import checkpoint as module
from draftline.train.checkpoint import (
    CheckpointWriter,
    checkpoint_paths,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def tensors(value: float) -> dict[str, dict[str, Tensor]]:
    return {
        "drafter": {"fc.weight": torch.full((3, 4), value), "norm": torch.full((2,), value)},
        "optimizer": {
            "step_count": torch.tensor(int(value)),
            "transposed": torch.arange(6.0).view(2, 3).t() + value,
            "half": torch.full((5,), value, dtype=torch.bfloat16),
        },
    }


def save(directory: Path, step: int, keep: int = 2) -> Path:
    return save_checkpoint(directory, step, tensors(step), {"epoch": 1, "config": {"a": 2}}, keep)


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "new", 7)
    assert path == tmp_path / "new" / "step-00000007"
    assert names(path) == ["drafter.safetensors", "optimizer.safetensors", "state.json"]
    loaded = load_checkpoint(path)
    assert (loaded.path, loaded.step) == (path, 7)
    assert loaded.state["epoch"] == 1
    assert loaded.state["config"] == {"a": 2}
    for stem, group in tensors(7).items():
        assert loaded.tensors[stem].keys() == group.keys()
        for name, wanted in group.items():
            assert loaded.tensors[stem][name].dtype == wanted.dtype
            assert torch.equal(loaded.tensors[stem][name], wanted)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (90, 100, 1000, 20_000):
        save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint_paths(tmp_path)] == ["step-00020000", "step-00001000"]
    assert latest_checkpoint(tmp_path).step == 20_000
    assert checkpoint_paths(tmp_path / "nowhere") == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save_checkpoint(tmp_path, 5, tensors(6), {}, 2)
    assert float(latest_checkpoint(tmp_path).tensors["drafter"]["norm"][0]) == 6


def test_half_a_write_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the tensors, before the rename: only the older one counts."""
    save(tmp_path, 1)

    def killed(_self: Path, _target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert names(tmp_path) == [".step-00000002.tmp", "step-00000001"]
    assert latest_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["drafter.safetensors", "optimizer.safetensors"])
def test_a_damaged_file_falls_back_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, file: str
) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2) / file)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path).step == 1
    assert "step-00000002" in caplog.text
    assert file in caplog.text
    assert "falling back" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"sha256": {}}', '{"sha256": [], "step": 1}', "\udcff"]
)
def test_a_damaged_state_is_damage_too(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    state = save(tmp_path, 2) / "state.json"
    state.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(state.parent)
    assert latest_checkpoint(tmp_path).step == 1


def test_nothing_whole_is_an_error_that_names_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        latest_checkpoint(tmp_path)
    for step in (1, 2):
        cut(save(tmp_path, step) / "drafter.safetensors")
    with pytest.raises(CheckpointError, match="no whole checkpoint") as caught:
        latest_checkpoint(tmp_path)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


def test_a_full_disk_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    plain = module.save_file

    def full(group: dict[str, Tensor], path: Path) -> None:
        plain(group, path)
        if path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")

    for step in (1, 2):
        writer.save(step, partial(tensors, step), {})
    writer.wait()
    assert writer.failure is None
    monkeypatch.setattr(module, "save_file", full)
    with caplog.at_level(logging.WARNING):
        writer.save(3, partial(tensors, 3), {})
        writer.wait()
    assert isinstance(writer.failure, CheckpointError)
    assert "No space left" in caplog.text
    assert "training goes on" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "no half checkpoint stays"
    assert latest_checkpoint(tmp_path).step == 2
    assert writer.last == tmp_path / "step-00000002"
    monkeypatch.setattr(module, "save_file", plain)
    writer.save(4, partial(tensors, 4), {})
    writer.wait()
    assert writer.failure is None
    assert latest_checkpoint(tmp_path).step == 4


def test_the_writer_waits_for_the_tensors_and_writes_behind_training(tmp_path: Path) -> None:
    """What is on its way from a device must not be waited for by who trains."""
    go = threading.Event()
    threads: list[str] = []

    def groups() -> dict[str, dict[str, Tensor]]:
        threads.append(threading.current_thread().name)
        assert go.wait(10)
        return tensors(1)

    writer = CheckpointWriter(tmp_path, keep=2)
    state = {"epoch": 0}
    writer.save(1, groups, state)
    state["epoch"] = 5  # the next step trains on
    assert checkpoint_paths(tmp_path) == []
    go.set()
    writer.wait()
    assert threads == ["checkpoint-writer"]
    loaded = latest_checkpoint(tmp_path)
    assert loaded.tensors["drafter"]["norm"].tolist() == [1, 1]
    assert loaded.state["epoch"] == 0


def test_checkpoints_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Their buffers are the same, so the second must not be asked for before the first is there."""
    writer = CheckpointWriter(tmp_path, keep=2)
    there: list[list[str]] = []

    def groups(step: int) -> dict[str, dict[str, Tensor]]:
        there.append([p.name for p in checkpoint_paths(tmp_path)])
        return tensors(step)

    for step in (1, 2):
        writer.save(step, partial(groups, step), {})
    writer.wait()
    assert there == [[], ["step-00000001"]]


def test_tensors_that_cannot_be_had_are_an_error_of_the_next_call(tmp_path: Path) -> None:
    def lost() -> dict[str, dict[str, Tensor]]:
        raise ValueError("the device is gone")

    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(1, lost, {})
    with pytest.raises(ValueError, match="the device is gone"):
        writer.save(2, partial(tensors, 2), {})
    assert checkpoint_paths(tmp_path) == []


def test_an_unexpected_failure_of_the_thread_is_not_lost(tmp_path: Path) -> None:
    """A programming error must not end as a run that believes in its checkpoints."""
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(1, partial(tensors, 1), {"config": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.wait()
    writer.save(2, partial(tensors, 2), {})
    writer.wait()
    assert latest_checkpoint(tmp_path).step == 2


def test_damaged_newer_checkpoints_do_not_push_out_the_new_one(tmp_path: Path) -> None:
    """After a fall-back the run stands before steps that it already saved once."""
    save(tmp_path, 100, keep=3)
    for step in (200, 300):
        cut(save(tmp_path, step, keep=3) / "drafter.safetensors")
    assert latest_checkpoint(tmp_path).step == 100
    path = save(tmp_path, 150, keep=2)
    assert path.exists()
    assert latest_checkpoint(tmp_path).step == 150


def test_state_is_plain_json(tmp_path: Path) -> None:
    state = json.loads((save(tmp_path, 3) / "state.json").read_text())
    assert state["step"] == 3
    assert sorted(state["sha256"]) == ["drafter.safetensors", "optimizer.safetensors"]
