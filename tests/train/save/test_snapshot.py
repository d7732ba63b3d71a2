"""A snapshot holds the state of the moment it was begun, and the state comes back from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftline.checkpoint.store import load_checkpoint, save_checkpoint
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.target import Target
from draftline.train.save.snapshot import Snapshot, load_state
from draftline.train.step.optim import MasterAdamW
from tests.support.states import run_state
from tests.support.tiny import build_drafter, build_shape, build_target, step_spec

Groups = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


def build(
    target: Target, dtype: torch.dtype, ema: float | None, seed: int = 0
) -> tuple[Drafter, MasterAdamW]:
    drafter = build_drafter(build_shape(target), seed=seed)
    spec = step_spec(budget=8, max_anchors=2, ema=ema)
    return drafter, MasterAdamW(drafter, spec.optimizer, working_dtype=dtype)


def update(optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.add(
            [torch.randn(p.shape, generator=generator).to(p.dtype) for p in optimizer.parameters]
        )
        optimizer.update()


def copied(groups: Groups) -> Groups:
    return {stem: {n: t.clone() for n, t in group.items()} for stem, group in groups.items()}


def check(groups: Groups, wanted: Groups) -> None:
    assert groups.keys() == wanted.keys()
    for stem, group in groups.items():
        assert group.keys() == wanted[stem].keys()
        for name, tensor in group.items():
            assert tensor.dtype == wanted[stem][name].dtype, name
            assert torch.equal(tensor, wanted[stem][name]), name


CASES = pytest.mark.parametrize(
    ("dtype", "ema"),
    [
        (torch.float32, None),
        (torch.float32, 0.9),
        (torch.bfloat16, None),
        (torch.bfloat16, 0.9),
    ],
)


@CASES
def test_the_groups_are_the_files_of_a_checkpoint(
    target: Target, dtype: torch.dtype, ema: float | None
) -> None:
    drafter, optimizer = build(target, dtype, ema)
    update(optimizer, range(2))
    ids = torch.tensor([1, 5])
    snapshot = Snapshot(optimizer, {"feature_scale": drafter.feature_scale, "token_ids": ids})
    snapshot.begin()
    groups = snapshot.groups()
    masters = optimizer.named(optimizer.master)
    best = masters if optimizer.average is None else optimizer.named(optimizer.average)
    moments = {
        f"{key}.{name}": tensor
        for key in ("exp_avg", "exp_avg_sq")
        for name, tensor in optimizer.named(optimizer.buffers()[key]).items()
    }
    assert masters.keys() == dict(drafter.named_parameters()).keys()
    wanted = {
        "drafter": {**best, "feature_scale": drafter.feature_scale, "token_ids": ids},
        "optimizer": {**moments, "step_count": torch.tensor(2)},
    }
    # What is evaluated and exported is the average; training goes on from the masters.
    check(groups, wanted if ema is None else wanted | {"masters": masters})


@CASES
def test_later_updates_do_not_reach_a_snapshot(
    target: Target, dtype: torch.dtype, ema: float | None
) -> None:
    drafter, optimizer = build(target, dtype, ema)
    update(optimizer, range(2))
    snapshot = Snapshot(optimizer, {"feature_scale": drafter.feature_scale})
    snapshot.begin()
    before = copied(snapshot.groups())
    update(optimizer, range(2, 4))
    check(snapshot.groups(), before)
    snapshot.begin()
    after = snapshot.groups()
    assert int(after["optimizer"]["step_count"]) == 4
    for stem, group in before.items():
        for name, tensor in group.items():
            assert torch.equal(tensor, after[stem][name]) == (name == "feature_scale"), name


@CASES
def test_training_goes_on_from_a_written_snapshot_bit_for_bit(
    target: Target, tmp_path: Path, dtype: torch.dtype, ema: float | None
) -> None:
    """Through a file: views of one buffer are written whole and once."""
    _, optimizer = build(target, dtype, ema)
    update(optimizer, range(3))
    snapshot = Snapshot(optimizer, {})
    snapshot.begin()
    path = save_checkpoint(tmp_path, run_state(3), snapshot.groups(), keep=1)
    total = sum(f.stat().st_size for f in path.glob("*.safetensors"))
    elements = sum(p.numel() for p in optimizer.parameters)
    assert total < 4 * elements * len(optimizer.buffers()) + 2**15
    other, restored = build(target, dtype, ema, seed=5)
    update(restored, range(7, 8))
    load_state(restored, load_checkpoint(path).tensors)
    for both in (optimizer, restored):
        update(both, range(3, 6))
    assert int(restored.step_count) == 6
    assert torch.equal(restored.working, optimizer.working)
    for name, buffer in optimizer.buffers().items():
        assert torch.equal(restored.buffers()[name], buffer), name
    assert {p.dtype for p in other.parameters()} == {dtype}


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_average_may_be_switched_at_a_resume(target: Target, ema: float | None) -> None:
    _, optimizer = build(target, torch.float32, ema)
    update(optimizer, range(3))
    snapshot = Snapshot(optimizer, {})
    snapshot.begin()
    _, restored = build(target, torch.float32, 0.9 if ema is None else None)
    load_state(restored, snapshot.groups())
    assert torch.equal(restored.master, optimizer.master)
    assert torch.equal(restored.exp_avg, optimizer.exp_avg)
    if restored.average is not None:
        assert torch.equal(restored.average, optimizer.master)
