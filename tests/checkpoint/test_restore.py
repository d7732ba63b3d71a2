"""A drafter read back from a run is the one that was saved, or an error says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.checkpoint.restore import restore
from draftline.checkpoint.store import load_checkpoint, save_checkpoint
from draftline.errors import CheckpointError, ConfigError, TargetError
from draftline.export.zlab import export_zlab
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.identity import target_digest
from draftline.model.target.target import Target
from tests.support.states import run_state
from tests.support.tiny import build_drafter, build_shape, build_target


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture
def drafter(target: Target) -> Drafter:
    return build_drafter(build_shape(target))


def save(run: Path, step: int, target: Target, drafter: Drafter, **changes: Any) -> Path:
    tensors: dict[str, Any] = {**drafter.state_dict(), "feature_scale": drafter.feature_scale}
    tensors |= changes.pop("tensors", {})
    known = {"shape": drafter.shape, "taps": target.taps, "num_target_layers": target.num_layers}
    state = run_state(step, **(known | changes))
    groups = {"drafter": tensors, "optimizer": {"step_count": torch.tensor(step)}}
    return save_checkpoint(run / "checkpoints", state, groups, keep=2)


@pytest.mark.parametrize("given", ["run", "checkpoint"])
def test_the_drafter_comes_back(
    tmp_path: Path, target: Target, drafter: Drafter, given: str
) -> None:
    save(tmp_path, 1, target, build_drafter(drafter.shape, seed=9))
    path = save(tmp_path, 2, target, drafter)
    restored = restore(tmp_path if given == "run" else path)
    assert restored.step == 2
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
    assert restore(path).step == 1


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
    with pytest.raises(ConfigError, match="none of these: a run directory, a checkpoint"):
        restore(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore(tmp_path)
    larger = replace(drafter.shape, intermediate_size=44)
    misfit = restore(save(tmp_path, 2, target, drafter, shape=larger))
    with pytest.raises(CheckpointError, match=r"(?s)step-00000002.*size mismatch"):
        misfit.drafter(torch.device("cpu"), torch.float32)
    extra = {"layers.9.self_attn.q_proj.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"(?s)step-00000003.*layers\.9"):
        restore(save(tmp_path, 3, target, drafter, tensors=extra)).drafter(
            torch.device("cpu"), torch.float32
        )


def test_of_a_checkpoint_the_drafter_alone_is_read(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    """An optimizer is as large as two drafters, and of no use to who evaluates or exports."""
    path = save(tmp_path, 1, target, drafter)
    (path / "optimizer.safetensors").write_bytes(b"cut")
    assert restore(path).step == restore(tmp_path).step == 1
    with pytest.raises(CheckpointError, match="optimizer"):
        load_checkpoint(path)


def test_a_drafter_in_the_z_lab_layout_is_opened_as_it_was_trained(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    out = export_zlab(drafter, target, target.taps, None, tmp_path / "out", dtype="float32")
    given = ["target.path=somewhere", "evaluate.limit=2", "data.max_length=16384"]
    opened = restore(out, given)
    assert (opened.path, opened.step, opened.taps) == (out, None, target.taps)
    assert opened.shape == drafter.shape
    assert (opened.config.target.path, opened.config.evaluate.limit) == ("somewhere", 2)
    assert opened.config.target.tap_layers == list(target.taps)
    opened.check_target(target)
    features = torch.randn(3, 2 * target.hidden_size)
    loaded = opened.drafter(torch.device("cpu"), torch.float32)
    torch.testing.assert_close(loaded.fuse(features), drafter.fuse(features))
    with pytest.raises(ConfigError, match=r"does not say where its target is.*target\.path="):
        restore(out)
    with pytest.raises(ConfigError, match=r"block_size=8: fixed"):
        restore(out, [*given, "block_size=8"])


def test_what_others_leave_out_of_the_layout_has_its_default(
    tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    out = export_zlab(drafter, target, target.taps, None, tmp_path / "out", dtype="float32")
    said = json.loads((out / "config.json").read_text())
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": said.pop("rope_theta")}
    del said["num_target_layers"], said["dflash_config"]["num_target_layers"], said["layer_types"]
    said |= {"sliding_window": 4096, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    (out / "config.json").write_text(json.dumps(said))
    (out / "dflash.py").write_text("")
    opened = restore(out, ["target.path=somewhere"])
    assert opened.shape == drafter.shape
    opened.check_target(target)
    said["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4}
    (out / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="rotation is of the kind yarn"):
        restore(out, ["target.path=somewhere"])


def test_a_folded_embedding_scale_is_unfolded(tmp_path: Path, drafter: Drafter) -> None:
    """What decodes here multiplies the embeddings, as the drafter saw them in training."""
    target = build_target()
    target.embed_scale = 12.0
    target._model.config.architectures = ["GraniteForCausalLM"]
    out = export_zlab(
        drafter, target, target.taps, None, tmp_path / "out", dtype="float32", engine="vllm"
    )
    opened = restore(out, ["target.path=somewhere"])
    assert opened.shape.rms_norm_eps == pytest.approx(drafter.shape.rms_norm_eps)
    loaded = opened.drafter(torch.device("cpu"), torch.float32).state_dict()
    for name, tensor in drafter.state_dict().items():
        wanted = tensor * drafter.feature_scale if name == "fc.weight" else tensor
        torch.testing.assert_close(loaded[name], wanted)


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
    assert restore(older).step == 1


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
