"""A drafter read back from a run is the one that was saved, or an error says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.checkpoint.restore import restore
from draftline.checkpoint.store import save_checkpoint
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.identity import target_digest
from draftline.model.target.target import Target
from tests.support.tiny import build_drafter, build_shape, build_target

CONFIG: dict[str, Any] = {
    "run": {"dir": "somewhere"},
    "target": {"path": "somewhere"},
    "data": {"train": ["data.jsonl"]},
    "train": {"steps": 5},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return build_drafter(build_shape(target))


def save(run: Path, step: int, target: Target, drafter: Drafter, **changes: Any) -> Path:
    tensors: dict[str, Any] = {**drafter.state_dict(), "feature_scale": drafter.feature_scale}
    tensors |= changes.pop("tensors", {})
    state = {
        "config": CONFIG,
        "shape": drafter.shape.to_dict(),
        "taps": list(target.taps),
        "num_target_layers": target.num_layers,
    } | changes
    return save_checkpoint(run / "checkpoints", step, {"drafter": tensors}, state, keep=2)


@pytest.mark.parametrize("given", ["run", "checkpoint"])
def test_the_drafter_comes_back(
    tmp_path: Path, target: Target, drafter: Drafter, given: str
) -> None:
    save(tmp_path, 1, target, build_drafter(drafter.shape, seed=9))
    path = save(tmp_path, 2, target, drafter)
    restored = restore(tmp_path if given == "run" else path)
    assert restored.checkpoint.step == 2
    assert restored.shape == drafter.shape
    assert restored.taps == target.taps
    assert restored.num_target_layers == 4
    assert restored.token_ids is None
    loaded = restored.drafter(torch.device("cpu"), torch.float32)
    assert torch.equal(loaded.feature_scale, drafter.feature_scale)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not any(p.requires_grad for p in loaded.parameters())
    features = torch.randn(3, 2 * target.hidden_size)
    assert torch.equal(loaded.fuse(features), drafter.fuse(features))
    assert restored.drafter(torch.device("cpu"), torch.bfloat16).fc.weight.dtype == torch.bfloat16
    restored.check_target(target)


def test_another_target_of_the_same_shape_is_refused_unless_asked_for(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    key = f"{target_digest(target)}-0"
    path = save(tmp_path, 1, target, drafter, features=key)
    other = build_target(seed=1)
    assert restore(path).check_target(target) == ""
    assert restore(path).check_target(build_target(dtype=torch.bfloat16)) == ""
    with pytest.raises(TargetError, match=r"somewhere are not those .* trained with; restore them"):
        restore(path).check_target(other)
    warned = restore(path, ["target.path=elsewhere"]).check_target(other)
    assert "elsewhere are not those that the drafter was trained with" in warned
    assert restore(path, ["target.path=elsewhere"]).check_target(target) == ""


def test_an_older_checkpoint_can_be_named(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    path = save(tmp_path, 1, target, drafter)
    save(tmp_path, 2, target, drafter)
    assert restore(path).checkpoint.step == 1


def test_the_sub_vocabulary_comes_back(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    ids = torch.tensor([1, 5, 9])
    restored = restore(save(tmp_path, 1, target, drafter, tensors={"token_ids": ids}))
    assert restored.token_ids is not None
    assert restored.token_ids.tolist() == [1, 5, 9]
    restored.drafter(torch.device("cpu"), torch.float32)


def test_overrides_change_the_configuration(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    path = save(tmp_path, 1, target, drafter)
    assert restore(path).config.evaluate.batch_size == 8
    assert restore(path, ["evaluate.batch_size=3"]).config.evaluate.batch_size == 3
    with pytest.raises(ConfigError, match="batch_size"):
        restore(path, ["evaluate.bach_size=3"])


def test_what_cannot_be_restored_says_why(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    with pytest.raises(ConfigError, match="neither a run directory nor a checkpoint"):
        restore(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore(tmp_path)
    with pytest.raises(CheckpointError, match="another version"):
        restore(save(tmp_path, 1, target, drafter, shape={"hidden_size": 3}))
    with pytest.raises(CheckpointError, match="another version"):
        restore(save(tmp_path, 1, target, drafter, taps=None))
    larger = drafter.shape.to_dict() | {"intermediate_size": 44}
    misfit = restore(save(tmp_path, 2, target, drafter, shape=larger))
    with pytest.raises(CheckpointError, match=r"(?s)step-00000002.*size mismatch"):
        misfit.drafter(torch.device("cpu"), torch.float32)
    extra = {"layers.9.self_attn.q_proj.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"(?s)step-00000003.*layers\.9"):
        restore(save(tmp_path, 3, target, drafter, tensors=extra)).drafter(
            torch.device("cpu"), torch.float32
        )


def test_another_target_is_refused(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    restored = restore(save(tmp_path, 1, target, drafter))
    for other in (build_target(taps=(1, 2)), build_target(hidden=16), build_target(layers=5)):
        with pytest.raises(TargetError, match="trained for"):
            restored.check_target(other)


@pytest.mark.parametrize("file", ["state.json", "state.json.sha256", "drafter.safetensors"])
def test_a_damaged_checkpoint_is_refused_and_no_other_taken_for_it(
    tmp_path: Path, target: Target, drafter: Drafter, file: str
) -> None:
    older = save(tmp_path, 1, target, drafter)
    newer = save(tmp_path, 2, target, drafter)
    data = (newer / file).read_bytes()
    for content in (data[:-3] + b"0" + data[-2:], data[:10], None):
        (newer / file).unlink(missing_ok=True)
        if content is not None:
            (newer / file).write_bytes(content)
        with pytest.raises(CheckpointError, match="step-00000002 is damaged"):
            restore(newer)
        with pytest.raises(CheckpointError, match=rf"step-00000002 is damaged.*give {older}"):
            restore(tmp_path)
    assert restore(older).checkpoint.step == 1


def test_a_changed_rope_base_is_not_exported(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    """It has the same length and is as good JSON as before."""
    path = save(tmp_path, 1, target, drafter) / "state.json"
    text = path.read_text()
    assert text.count('"rope_theta": 10000.0') == 1
    path.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
    with pytest.raises(CheckpointError, match=r"state\.json does not have the hash"):
        restore(path.parent)


def test_what_is_no_directory_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give a run directory"):
        restore(tmp_path / "gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be read: Not a directory"):
        restore(tmp_path / "file")
