"""Metrics as they are written: shares of time, rates, and the end at a bad loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.runtime.memory import MemoryBaseline
from draftline.train.report.reporter import Reporter, Scale
from draftline.train.report.trackers import Trackers

SUMS = [2.0, 6.0, 1.0, 4.0, 8.0, 0.0, 2.0, 3.0, 0.0, 1.0, 2.0]


class Meter:
    """Waits that are known."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def read(self) -> float:
        return self.seconds.pop(0) if self.seconds else 0.0


@pytest.fixture
def run(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path)


def reporter(waits: dict[str, Any]) -> Reporter:
    made = Reporter(
        Scale(rows=10, tokens=100, steps=8),
        rate_at=lambda step: step / 10,
        epoch_at=lambda step: step // 4,
        spent_before_s=0.0,
        first_step=0,
    )
    made.begin(MemoryBaseline([]), waits)  # type: ignore[arg-type]
    return made


def written(run: RunLog) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (run.directory / "metrics.jsonl").read_text().splitlines()]


def test_a_wait_longer_than_the_stretch_it_ends_in_fills_the_next_one(run: RunLog) -> None:
    made = reporter({"targets": [Meter(0.0, 3.0, 0.0, 0.0), Meter()]})
    with Trackers(run, (), {}, 8, quiet=True) as trackers:
        for step in (2, 4, 6):
            # Stretches of one second: of two workers' two seconds, three were waits.
            made.put(step, SUMS, made._began + step / 2)
        made.drain(trackers)
    assert [line["targets_waited_pct"] for line in written(run)] == pytest.approx([100, 50, 0])


def test_rates_are_those_of_the_stretch(run: RunLog) -> None:
    made = reporter({})
    with Trackers(run, (), {}, 8, quiet=True) as trackers:
        made.put(2, SUMS, made._began + 1.0)
        made.put(6, SUMS, made._began + 2.0)
        made.drain(trackers)
    first, second = written(run)
    assert (first["rows_per_s"], second["rows_per_s"]) == pytest.approx((20, 40))
    assert (second["step_ms"], second["eta_s"]) == pytest.approx((250, 0.5))
    assert (second["learning_rate"], second["epoch"]) == (0.5, 1)
    assert second["loss"] == 3.0


@pytest.mark.parametrize("bad", [5, 8])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(run: RunLog, bad: int) -> None:
    made = reporter({})
    sums = [*SUMS]
    sums[bad] = 1.0
    with Trackers(run, (), {}, 8, quiet=True) as trackers:
        made.put(2, sums, made._began + 1)
        with pytest.raises(RunError, match="non-finite loss or gradient in the 2 steps up to 2"):
            made.drain(trackers)
    [line] = written(run)
    assert line["bad_packs"] + line["bad_steps"] == 1, "the stretch is worth reading"
