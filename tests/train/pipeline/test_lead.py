"""The step boundary: what is due after which step, in which order, and a disk that is slow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from draftline.train.pipeline.lead import Lead, Schedule

SCHEDULE = Schedule(total=12, log_every=3, eval_every=4, check_every=2, checkpoint_every=6)


class Boundary:
    """A lead whose collaborators say what they are asked to do."""

    def __init__(self, schedule: Schedule, *, deadline_s: float = 60.0) -> None:
        self.said: list[str] = []
        self.disk_is_free = True
        self.worker: Any = SimpleNamespace(
            doing=lambda what, step: self.said.append(f"{what} {step}"),
            check=lambda: None,
            waiting=lambda what: contextlib.nullcontext(),
            wait_until=lambda condition, ready, what: None,
        )
        totals = SimpleNamespace(
            begin_read=self.say("begin read"), finish_read=lambda: [1.0, 2.0], clear=None
        )
        self.lead = Lead(
            schedule,
            [SimpleNamespace(totals=totals, optimizer=SimpleNamespace(working=None))],  # type: ignore[list-item]
            first_step=0,
            tokens_per_step=10,
            position=lambda step: f"position {step}",  # type: ignore[arg-type, return-value]
            interrupted=threading.Event(),
            heldout=SimpleNamespace(measure=lambda turn, progress: self.measured(progress)),  # type: ignore[arg-type]
            reducer=SimpleNamespace(check_replicas=self.say("compare")),  # type: ignore[arg-type]
            reporter=SimpleNamespace(put=self.put, seconds=1.5),  # type: ignore[arg-type]
            saver=SimpleNamespace(ready=lambda seconds: self.disk_is_free, save=self.saved),  # type: ignore[arg-type]
            nodes=None,
            gate=SimpleNamespace(check=lambda: None),  # type: ignore[arg-type]
            watch=SimpleNamespace(
                step=lambda step, tokens: self.said.append(f"finished {step}"),
                phase=lambda name: contextlib.nullcontext(),
            ),  # type: ignore[arg-type]
            runlog=SimpleNamespace(event=lambda kind, fields: self.said.append(kind)),  # type: ignore[arg-type]
            began=0.0,
            deadline_s=deadline_s,
        )

    def say(self, what: str) -> Callable[..., None]:
        return lambda *_: self.said.append(what)

    def measured(self, progress: Callable[[], None]) -> str:
        progress()
        return f"score {self.lead.done}"

    def put(self, step: int, sums: list[float], at: float, score: object) -> None:
        self.said.append(f"put {step} {sums} {score}")

    def saved(self, step: int, position: object, seconds: float) -> None:
        self.said.append(f"save {step} at {position}")

    def cross(self, step: int) -> list[str]:
        self.said.clear()
        self.lead.cross(0, self.worker, step, contextlib.nullcontext)
        return list(self.said)


def test_everything_happens_in_one_order() -> None:
    boundary = Boundary(SCHEDULE)
    boundary.cross(11)
    assert boundary.cross(12) == [
        "step boundary 12",
        "finished 12",
        "held-out measurement 12",
        "begin read",
        "comparison of the drafters 12",
        "compare",
        "checkpoint 12",
        "save 12 at position 12",
    ]
    assert (boundary.lead.done, boundary.lead.score) == (12, "score 12")
    boundary.said.clear()
    boundary.lead.leave(0, boundary.worker)
    assert boundary.said == ["report 12", "put 12 [1.0, 2.0] score 12"]


def test_totals_are_reported_a_boundary_later_with_what_was_measured_after_them() -> None:
    boundary = Boundary(SCHEDULE)
    assert "begin read" in boundary.cross(4)
    said = boundary.cross(5)
    assert said == [
        "step boundary 5",
        "finished 5",
        "report 4",
        "put 4 [1.0, 2.0] score 4",
    ]
    assert "report 5" not in boundary.cross(6)


def test_an_ordinary_step_is_labelled_with_nothing_that_it_does_not_do() -> None:
    """It was called a checkpoint, whatever failed in it."""
    boundary = Boundary(SCHEDULE)
    boundary.cross(1)
    assert boundary.cross(5)[0] == "step boundary 5"
    assert not any(said.startswith("checkpoint") for said in boundary.said)


def test_what_is_due_follows_from_the_schedule() -> None:
    every = range(1, 13)
    assert [s for s in every if SCHEDULE.measures(s)] == [4, 8, 12]
    assert [s for s in every if SCHEDULE.reports(s)] == [3, 4, 6, 8, 9, 12]
    assert [s for s in every if SCHEDULE.compares(s)] == [2, 4, 6, 8, 10, 12]
    assert [s for s in every if SCHEDULE.saves(s)] == [6, 12]
    short = Schedule(total=7, log_every=5, eval_every=None, check_every=9, checkpoint_every=9)
    assert [s for s in range(1, 8) if short.reports(s)] == [5, 7]
    assert not any(short.measures(s) for s in range(1, 8))


def test_a_slow_disk_puts_a_checkpoint_off_until_it_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    boundary = Boundary(SCHEDULE, deadline_s=0.0)
    boundary.disk_is_free = False
    assert boundary.cross(6)[-1] == "checkpoint_put_off"
    assert "checkpoint of step 6: the one before it is still being written" in caplog.text
    # It is asked for at each boundary from then on, and said once.
    assert boundary.cross(7)[-1] == "checkpoint 7"
    boundary.disk_is_free = True
    assert boundary.cross(8)[-1] == "save 8 at position 8"
    assert boundary.cross(9)[-1] == "begin read"
    assert caplog.text.count("still being written") == 1


def test_the_decision_to_go_on_ends_with_the_last_step_or_an_interrupt() -> None:
    boundary = Boundary(SCHEDULE)
    assert boundary.lead.goes_on(0, boundary.worker, 11)
    assert not boundary.lead.goes_on(0, boundary.worker, 12)
    boundary.lead._interrupted.set()
    assert not boundary.lead.goes_on(0, boundary.worker, 3)
    # What the others are told, whenever they ask.
    assert boundary.lead.goes_on(1, boundary.worker, 11)
    assert not boundary.lead.goes_on(1, boundary.worker, 12)
