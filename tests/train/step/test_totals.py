"""Sums over steps and drafters, and the means that they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from draftline.model.drafter.losses import LossResult
from draftline.train.step.totals import Totals, summarize

CPU = torch.device("cpu")


def result(loss: float, correct: list[int], total: list[int], accepted: int) -> LossResult:
    return LossResult(
        total=torch.tensor(loss, requires_grad=True),
        weight=torch.tensor(1.0),
        slot_correct=torch.tensor(correct),
        slot_total=torch.tensor(total),
        accepted=torch.tensor(accepted),
        blocks=torch.tensor(total[0]),
    )


def read(totals: Totals) -> list[float]:
    totals.begin_read()
    return totals.finish_read()


def test_drafters_added_up_are_their_pooled_means() -> None:
    """Two drafters, three packs each, two steps: rates keep their denominators."""
    packs = [
        [
            (result(2.0, [3, 1], [4, 4], 4), 5),
            (result(1.0, [1, 0], [1, 0], 1), 1),
            (result(0.5, [0, 0], [9, 8], 0), 9),
        ],
        [
            (result(4.0, [2, 2], [2, 2], 4), 2),
            (result(1.5, [0, 0], [3, 1], 0), 3),
            (result(3.0, [5, 5], [6, 6], 9), 7),
        ],
    ]
    totals = [Totals(3, CPU), Totals(3, CPU)]
    for mine, each in zip(totals, packs, strict=True):
        for found, anchors in each:
            mine.add_pack(found, torch.tensor(anchors))
        for norm in (0.25, 0.75):
            mine.add_step(torch.tensor(norm))
    values = summarize([sum(column) for column in zip(*map(read, totals), strict=True)])
    pooled = [pack for each in packs for pack in each]
    assert values == {
        "loss": sum(r.loss.item() for r, _ in pooled) / 6,
        "accept_length_forced": 1 + 18 / 25,
        "accepted": 18,
        "blocks": 25,
        "anchors": 27 / 6,
        "grad_norm": 0.5,
        "bad_packs": 0,
        "bad_steps": 0,
        "slot_accuracy": [11 / 25, 8 / 21],
    }


def test_reading_begins_a_new_stretch_and_keeps_the_old_one() -> None:
    totals = Totals(3, CPU)
    totals.add_pack(result(2.0, [1, 1], [1, 1], 2), torch.tensor(1))
    totals.begin_read()
    totals.add_pack(result(8.0, [0, 0], [1, 1], 0), torch.tensor(1))
    assert summarize(totals.finish_read())["loss"] == 2.0
    assert summarize(read(totals))["loss"] == 8.0
    assert not any(read(totals))


def test_cleared_sums_are_zero() -> None:
    totals = Totals(3, CPU)
    totals.add_pack(result(2.0, [1, 1], [1, 1], 2), torch.tensor(1))
    totals.add_step(torch.tensor(math.nan))
    totals.clear()
    assert not any(read(totals))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_packs_and_steps_that_are_not_finite_are_counted(bad: float) -> None:
    totals = Totals(3, CPU)
    for loss in (1.0, bad, bad):
        totals.add_pack(result(loss, [0, 0], [1, 1], 0), torch.tensor(1))
    for norm in (1.0, bad):
        totals.add_step(torch.tensor(norm))
    values = summarize(read(totals))
    assert (values["bad_packs"], values["bad_steps"]) == (2, 1)
    assert not math.isfinite(values["loss"])  # type: ignore[arg-type]
    assert not math.isfinite(values["grad_norm"])  # type: ignore[arg-type]


def test_nothing_measured_is_nan() -> None:
    values = summarize(read(Totals(4, CPU)))
    assert math.isnan(values["accept_length_forced"])  # type: ignore[arg-type]
    assert len(values["slot_accuracy"]) == 3  # type: ignore[arg-type]
    assert all(math.isnan(v) for v in values["slot_accuracy"])  # type: ignore[union-attr]


def test_counts_stay_exact_over_a_long_stretch() -> None:
    """In float32 the sum would stand still at 2**24."""
    totals = Totals(2, CPU)
    for accepted in (2**24, 1, 1, 1):
        totals.add_pack(result(0.0, [accepted], [1], accepted), torch.tensor(1))
    assert summarize(read(totals))["accepted"] == 2**24 + 3
