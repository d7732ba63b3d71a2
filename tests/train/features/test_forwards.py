"""A pack's features from fixed shapes are the target's own, whatever ran before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.batches import BatchTable
from draftline.data.packing import Pack
from draftline.data.store import Sample
from draftline.errors import FallbackError, RunError
from draftline.model.target.target import Target
from draftline.runtime.graphs import Replayed
from draftline.train.features.forwards import TargetForwards, Timing, decide, should_capture
from tests.support.tiny import build_samples, build_target

LENGTHS = (9, 30, 4, 17, 4, 25, 1)
PACKS = [Pack((1, 3), 47), Pack((6,), 1), Pack((0, 2, 4, 5), 42), Pack((5, 0), 34)]
TABLE = BatchTable(((1, 32), (4, 12), (2, 20), (1, 12)))
BUDGET = 48


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return build_samples(LENGTHS)


def forwards(
    target: Target, table: BatchTable = TABLE, choices: Choices | None = None, **changes: Any
) -> TargetForwards:
    settings: dict[str, Any] = {"last_hidden": True, "token_budget": BUDGET, "capture": "auto"}
    return TargetForwards(target, table, choices=choices or Choices(), **settings | changes)


def padded(target: Target, samples: list[Sample], pack: Pack, table: BatchTable) -> Tensor:
    """The pack's row out of plain forwards of the same padded batches."""
    lengths = [len(samples[m].input_ids) for m in pack.members]
    found: dict[int, Tensor] = {}
    for batch in table.split(lengths):
        ids = np.zeros(batch.shape, np.int64)
        for place, index in enumerate(batch.members):
            ids[place, : lengths[index]] = samples[pack.members[index]].input_ids
        taps, last = target.features(torch.from_numpy(ids), last_hidden=True)
        assert last is not None
        both = torch.cat([taps, last], -1)
        found |= {i: both[place, : lengths[i]] for place, i in enumerate(batch.members)}
    rows = torch.cat([found[i] for i in range(len(lengths))])
    return torch.cat([rows, rows.new_zeros(BUDGET - len(rows), rows.shape[1])])


def alone(target: Target, sample: Sample) -> Tensor:
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    taps, last = target.features(ids, last_hidden=True)
    assert last is not None
    return torch.cat([taps, last], -1)[0]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("table", [TABLE, BatchTable(((8, 33),)), BatchTable(((1, 30), (3, 9)))])
def test_rows_are_those_of_plain_forwards(
    target: Target, samples: list[Sample], table: BatchTable, warm: bool
) -> None:
    worker = forwards(target, table)
    if warm:
        worker.warm()
    row = worker.row
    # Twice, so that every pack also comes after a fuller and an emptier one.
    for pack in [*PACKS, *PACKS[::-1]]:
        worker.run(samples, pack)
        assert worker.row is row
        assert torch.equal(row, padded(target, samples, pack, table))
        begin = 0
        for member in pack.members:
            own = alone(target, samples[member])
            torch.testing.assert_close(row[begin : begin + len(own)], own, rtol=1e-4, atol=1e-4)
            begin += len(own)
        assert not row[begin:].any()
    assert row.shape == (BUDGET, worker.width)
    assert worker.taps_width == 2 * target.hidden_size == worker.width - target.hidden_size


def test_a_full_pack_fills_the_row_to_its_end(target: Target) -> None:
    samples = build_samples((20, 28))
    worker = forwards(target)
    worker.run(samples, Pack((0, 1), BUDGET))
    torch.testing.assert_close(worker.row[20:], alone(target, samples[1]), rtol=1e-4, atol=1e-4)


def test_without_the_last_hidden_state_only_the_trunk_runs_and_only_in_known_shapes(
    target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[int, ...], bool]] = []
    plain = Target.features

    def counted(self: Target, ids: Tensor, *, last_hidden: bool = False) -> Any:
        calls.append((tuple(ids.shape), last_hidden))
        return plain(self, ids, last_hidden=last_hidden)

    monkeypatch.setattr(Target, "features", counted)
    lean = forwards(target, last_hidden=False)
    lean.row.fill_(3.0)
    lean.warm()
    # On a CPU there is nothing to warm, and no row was touched.
    assert not calls
    assert bool((lean.row == 3.0).all())
    for pack in PACKS:
        lean.run(samples, pack)
    assert {shape for shape, _ in calls} <= set(TABLE.shapes)
    assert {last for _, last in calls} == {False}
    full = forwards(target)
    full.run(samples, PACKS[-1])
    assert lean.row.shape == (BUDGET, 2 * target.hidden_size)
    assert torch.equal(lean.row, full.row[:, : lean.width])


def test_workers_of_one_device_do_not_share_buffers(target: Target, samples: list[Sample]) -> None:
    one, two = forwards(target), forwards(target.replica(target.device))
    one.run(samples, PACKS[0])
    before = one.row.clone()
    two.run(samples, PACKS[2])
    assert torch.equal(one.row, before)


def test_a_target_in_bfloat16_gives_bfloat16(samples: list[Sample]) -> None:
    low = build_target(dtype=torch.bfloat16)
    worker = forwards(low)
    worker.run(samples, PACKS[0])
    assert worker.row.dtype == worker.dtype == torch.bfloat16
    assert torch.equal(worker.row, padded(low, samples, PACKS[0], TABLE))


# Capture


def test_graphs_are_worth_it_when_launches_cost_more_than_a_seventh() -> None:
    assert not should_capture(1.4, 10.0)
    assert should_capture(1.6, 10.0)
    fast, slow = Timing(1.0, 100.0), Timing(20.0, 100.0)
    assert decide("auto", fast) == (False, "host 1.0 ms of 100.0 ms per forward")
    assert decide("auto", slow) == (True, "host 20.0 ms of 100.0 ms per forward")
    assert decide("always", fast)[0]
    waiting = Timing(math.nan, math.nan, "called a synchronizing CUDA operation")
    captured, reason = decide("auto", waiting)
    assert not captured
    assert "makes the host wait (called a synchronizing" in reason
    with pytest.raises(RunError, match=r"capture=always.*synchronizing.*set target.capture=auto"):
        decide("always", waiting)


@pytest.mark.parametrize(
    ("capture", "host_ms", "got"),
    [("auto", 50.0, "captured"), ("auto", 5.0, "eager"), ("always", 5.0, "captured")],
)
def test_on_cuda_the_largest_shape_decides_for_all(
    target: Target, monkeypatch: pytest.MonkeyPatch, capture: str, host_ms: float, got: str
) -> None:
    """A worker that believes it is on a GPU; only the capture itself is left out."""
    captured: list[Replayed] = []
    timed: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = []
    plain = Target.features

    def counted(self: Target, ids: Tensor, *, last_hidden: bool = False) -> Any:
        shapes.append(tuple(ids.shape))
        return plain(self, ids, last_hidden=last_hidden)

    def measure(forward: Any, device: torch.device) -> Timing:
        forward()
        timed.append(shapes[-1])
        assert device == torch.device("cuda", 1)
        return Timing(host_ms, 100.0)

    monkeypatch.setattr(Target, "features", counted)
    monkeypatch.setattr(Replayed, "warm", lambda self: (captured.append(self), self()))
    choices = Choices()
    worker = forwards(target, choices=choices, capture=capture)
    worker.device = torch.device("cuda", 1)
    worker.warm(measure)
    assert timed == [(4, 12)]
    assert set(shapes) == set(TABLE.shapes)
    areas = [math.prod(shape) for shape in shapes]
    assert areas == sorted(areas, reverse=True), "the largest shape takes the memory of all"
    assert len(set(captured)) == (len(TABLE.shapes) if got == "captured" else 0)
    (choice,) = choices.entries
    assert (choice.what, choice.wanted, choice.got) == ("target forwards", capture, got)
    assert choice.reason == f"host {host_ms:.1f} ms of 100.0 ms per forward on cuda:1"
    assert not choice.fallback


def test_a_target_that_spans_devices_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = build_target()
    target.devices = (torch.device("cuda", 0), torch.device("cuda", 1))
    choices = Choices()
    worker = forwards(target, choices=choices)
    worker.device = torch.device("cuda", 0)
    worker.warm(lambda *_: pytest.fail("nothing is to be measured"))
    assert choices.entries[0].reason == "the target spans 2 devices"


def test_on_a_cpu_nothing_is_captured_and_that_is_said_once(target: Target) -> None:
    choices = Choices()
    for _ in range(2):
        forwards(target, choices=choices).warm()
    (choice,) = choices.entries
    assert (choice.wanted, choice.got, choice.fallback) == ("auto", "eager", False)
    assert "no graphs on cpu" in choice.reason
    forwards(target, choices=choices, capture="never").warm()
    assert not choices.entries[-1].fallback
    with pytest.raises(FallbackError, match=r"wanted always, could only get eager"):
        forwards(target, choices=Choices(strict=True), capture="always").warm()
