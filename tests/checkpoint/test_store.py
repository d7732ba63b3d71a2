"""Checkpoints: whole or not there, damage is seen and said, and training outlives a full disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.checkpoint import store as module
from draftline.checkpoint.store import (
    CheckpointWriter,
    checkpoint_paths,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from draftline.errors import CheckpointError
from tests.support.states import run_state

FILES = ["drafter.safetensors", "optimizer.safetensors", "state.json", "state.json.sha256"]


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
    return save_checkpoint(directory, run_state(step), tensors(step), keep)


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "new", 7)
    assert path == tmp_path / "new" / "step-00000007"
    assert names(path) == FILES
    loaded = load_checkpoint(path)
    assert (loaded.path, loaded.step) == (path, 7)
    assert loaded.state == run_state(7)
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
    save_checkpoint(tmp_path, run_state(5), tensors(6), 2)
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


@pytest.mark.parametrize("file", FILES)
def test_no_byte_of_a_checkpoint_is_outside_of_a_hash(tmp_path: Path, file: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    whole = path.read_bytes()
    places = range(len(whole)) if len(whole) < 100 else range(0, len(whole), len(whole) // 40)
    for at in (*places, len(whole) - 1):
        for bit in (0, 5):  # the 5th turns a into A
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(
                CheckpointError, match=r"step-00000002 is damaged: state\.json|drafter|opt"
            ):
                load_checkpoint(path.parent)
            assert latest_checkpoint(tmp_path).step == 1
    for longer_or_shorter in (whole + b"\n", whole[:-1], b""):
        path.write_bytes(longer_or_shorter)
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint(path.parent)
    path.write_bytes(whole)
    assert load_checkpoint(path.parent).step == 2


def test_the_files_of_two_checkpoints_are_no_checkpoint(tmp_path: Path) -> None:
    one, two = (save(tmp_path, step) for step in (1, 2))
    for file in FILES:
        mine = (two / file).read_bytes()
        (two / file).write_bytes((one / file).read_bytes())
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(two)
        (two / file).write_bytes(mine)
    assert load_checkpoint(two).step == 2


def test_a_checkpoint_under_another_steps_name_is_none(tmp_path: Path) -> None:
    """It would pass for the newest; any other name is the user's."""
    one = save(tmp_path, 1)
    shutil.copytree(one, tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="step-00000009 is damaged: it holds step 1"):
        load_checkpoint(tmp_path / "step-00000009")
    assert latest_checkpoint(tmp_path).path == one
    shutil.copytree(one, tmp_path / "best")
    assert load_checkpoint(tmp_path / "best").step == 1


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_gone_is_named(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 1)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=rf"step-00000001 is damaged.*{file}"):
        load_checkpoint(path)


def test_the_seal_is_what_sha256sum_reads(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    done = subprocess.run(
        ["sha256sum", "-c", "state.json.sha256"], cwd=path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "state.json: OK\n")


def reseal(path: Path, state: dict[str, Any]) -> None:
    text = json.dumps(state)
    (path / "state.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "state.json.sha256").write_text(f"{digest}  state.json\n")


def test_other_formats_are_refused_by_their_number(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    assert state["format"] == 2
    reseal(path, state | {"format": 3})
    with pytest.raises(CheckpointError, match="has format 3, this draftline reads 2"):
        load_checkpoint(path)
    (path / "state.json.sha256").unlink()
    del state["format"]
    state["provenance"] = {"commit": "abc123"}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"format 1.*no hash.*\(commit abc123\)"):
        load_checkpoint(path)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o027])
def test_files_are_for_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    """safetensors writes for its owner only, whatever the umask says."""
    before = os.umask(mask)
    try:
        path = save(tmp_path / "run", 1)
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in path.iterdir()} == dict.fromkeys(
        FILES, 0o666 & ~mask
    )
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o777 & ~mask


def as_nobody(call: Callable[[], object], shut: Path) -> str:
    """What `call` raises for a user who may not read `shut`, which is everybody but a superuser."""
    mode = shut.stat().st_mode
    shut.chmod(0)
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if uid == 0:
            os.seteuid(0)
        shut.chmod(mode)
    return "nothing"


@pytest.mark.parametrize("file", [*FILES, ""])
def test_what_may_not_be_read_is_not_called_damaged(file: str) -> None:
    # Not below pytest's own folder, which is its owner's alone.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        save(Path(folder), 1)
        path = save(Path(folder), 2)
        for call in (partial(load_checkpoint, path), partial(latest_checkpoint, path.parent)):
            said = as_nobody(call, path / file)
            assert said.startswith(f"ConfigError: checkpoint {path} cannot be read by user ")
            assert "Permission denied" in said
            assert "chmod" in said
        assert load_checkpoint(path).step == 2


def test_a_directory_that_may_not_be_listed_is_not_an_empty_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        directory = Path(folder) / "checkpoints"
        save(directory, 1)
        assert "Permission denied" in as_nobody(partial(checkpoint_paths, directory), directory)


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / ".step-00000007.tmp"
    left.mkdir()
    (left / "drafter.safetensors").write_bytes(b"half")
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


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
        writer.save(run_state(step), partial(tensors, step))
    writer.wait()
    assert writer.failure is None
    monkeypatch.setattr(module, "save_file", full)
    with caplog.at_level(logging.WARNING):
        writer.save(run_state(3), partial(tensors, 3))
        writer.wait()
    assert isinstance(writer.failure, CheckpointError)
    assert "No space left" in caplog.text
    assert "training goes on" in caplog.text
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "no half checkpoint stays"
    assert latest_checkpoint(tmp_path).step == 2
    assert writer.last == tmp_path / "step-00000002"
    monkeypatch.setattr(module, "save_file", plain)
    writer.save(run_state(4), partial(tensors, 4))
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
    writer.save(run_state(1, epoch=0), groups)
    assert checkpoint_paths(tmp_path) == []
    go.set()
    writer.wait()
    assert threads == ["checkpoint-writer"]
    loaded = latest_checkpoint(tmp_path)
    assert loaded.tensors["drafter"]["norm"].tolist() == [1, 1]
    assert loaded.state.epoch == 0


def test_checkpoints_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Their buffers are the same, so the second must not be asked for before the first is there."""
    writer = CheckpointWriter(tmp_path, keep=2)
    there: list[list[str]] = []

    def groups(step: int) -> dict[str, dict[str, Tensor]]:
        there.append([p.name for p in checkpoint_paths(tmp_path)])
        return tensors(step)

    for step in (1, 2):
        writer.save(run_state(step), partial(groups, step))
    writer.wait()
    assert there == [[], ["step-00000001"]]


def test_tensors_that_cannot_be_had_are_an_error_of_the_next_call(tmp_path: Path) -> None:
    def lost() -> dict[str, dict[str, Tensor]]:
        raise ValueError("the device is gone")

    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(run_state(1), lost)
    with pytest.raises(ValueError, match="the device is gone"):
        writer.save(run_state(2), partial(tensors, 2))
    assert checkpoint_paths(tmp_path) == []


def test_an_unexpected_failure_of_the_thread_is_not_lost(tmp_path: Path) -> None:
    """A programming error must not end as a run that believes in its checkpoints."""
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(run_state(1, provenance={"a": object()}), partial(tensors, 1))
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.wait()
    writer.save(run_state(2), partial(tensors, 2))
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
