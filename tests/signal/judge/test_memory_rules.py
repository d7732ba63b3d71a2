"""What a leak comes to, and what growth is none."""

from __future__ import annotations

import re

import numpy as np
import pytest

from draftline.signal.judge.memory_rules import leak
from tests.support.faulty_runs import MARKS, STEPS
from tests.support.judged import causes, seen, sentence
from tests.support.traces import (
    CONTEXT_MIB,
    FLOOR_MIB,
    RESERVED_MIB,
    TOTAL_MIB,
    Trace,
    run,
    saw,
    shot,
    stairs,
)

AT = np.arange(STEPS)


def figure(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found.group(1).replace(",", ""))


@pytest.mark.parametrize("per_step_mib", [0.05, 1.0, 7.5, 120.0])
@pytest.mark.parametrize("every", [1, 10])
def test_a_leak_is_measured_a_step(per_step_mib: float, every: int) -> None:
    count = 600
    trace = run(
        count,
        marks=MARKS,
        every=every,
        allocated=FLOOR_MIB + per_step_mib * np.arange(count),
        reserved=RESERVED_MIB + np.ceil(per_step_mib * np.arange(count) / 20) * 20,
        after_s=0.5,
    )
    assert causes(trace) == ["leak"]
    assert figure(sentence(trace), r"grows by ([\d.,]+) MiB per step") == pytest.approx(
        per_step_mib, rel=0.05, abs=0.005
    )
    held = RESERVED_MIB + per_step_mib * count + CONTEXT_MIB
    left = (TOTAL_MIB - held) / per_step_mib
    assert figure(sentence(trace), r"in about ([\d.,]+) steps") == pytest.approx(left, rel=0.05)


def test_a_leak_between_evaluations_is_measured_without_them() -> None:
    marks = [*MARKS, (49, "evaluate"), (50, "run"), (99, "evaluate"), (100, "run")]
    trace = run(
        marks=marks,
        allocated=FLOOR_MIB + 4.0 * AT + stairs(STEPS, [50, 100], 0.0, 900),
        reserved=3000.0,
        step_s={-1: 0.04, 50: 1.0, 100: 1.0},
    )
    assert causes(trace) == ["leak"]
    assert figure(sentence(trace), r"grows by ([\d.,]+) MiB") == pytest.approx(4.0, rel=0.05)


def test_a_leak_that_trembles_is_measured_all_the_same() -> None:
    noise = np.random.default_rng(7).uniform(-20, 20, STEPS)
    trace = run(marks=MARKS, allocated=FLOOR_MIB + 5.0 * AT + noise, reserved=2500.0)
    assert figure(sentence(trace), r"grows by ([\d.,]+) MiB") == pytest.approx(5.0, rel=0.05)


def test_a_floor_that_swings_or_settles_is_no_leak() -> None:
    for floor in (
        saw(STEPS, 4, 300, 700),
        saw(STEPS, 60, 300, 900),
        stairs(STEPS, [100], 300.0, 900),
        stairs(STEPS, range(4, 80, 4), 300.0, 20),
        np.random.default_rng(3).uniform(300, 700, STEPS),
    ):
        assert leak(seen(run(marks=MARKS, allocated=floor, reserved=2500.0))) is None


def test_a_leak_in_a_snapshot_names_the_largest_blocks() -> None:
    history = 1000 + saw(400, 20, 0, 300) + 10.0 * np.arange(400)
    found = leak(seen(Trace(snapshots=(shot(history),))))
    assert found is not None
    assert found.confidence == "medium"
    assert "9 MiB from train.py:7 step" in found.evidence


def test_snapshots_that_swing_stand_still_or_lack_a_history_show_no_leak() -> None:
    for history in (saw(400, 20, 900, 1900), np.full(400, 900.0), []):
        assert leak(seen(Trace(snapshots=(shot(history),)))) is None


def test_growth_that_tensors_fill_is_neither_fragments_nor_shapes() -> None:
    at = [28, 66, 103, 154]
    trace = run(
        marks=MARKS,
        reserved=stairs(STEPS, at, 2000.0, [100, 700, 90, 400]),
        allocated=stairs(STEPS, at, FLOOR_MIB, [90, 650, 80, 390]),
    )
    assert not {"fragmentation", "unbounded_shapes"} & set(causes(trace))
