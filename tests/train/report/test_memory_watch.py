"""What a run does about its memory: stop a broken launch, warn later, leave neighbours alone."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.choices import Choices
from draftline.config.running import SignalSection
from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.signal import monitor
from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.train.report import memory_watch
from draftline.train.report.memory_watch import MemoryWatch

LEAK = Cause("leak", "high", "it grows by 2 MiB a step.", "look for tensors that are kept")
NEIGHBOUR = Cause("other_process", "high", "another process moves.", "give it a device of its own")
HEALTHY = Cause("healthy", "high", "within 0 MiB for 9 s.", "nothing to do")


def verdict(cause: Cause, shape: str = "flat", allocator: str | None = None) -> Verdict:
    held = shape if allocator is None else allocator
    return Verdict((DeviceVerdict("0", shape, "words", (), (cause,), held),))


@pytest.fixture
def runlog(tmp_path: Path) -> Iterator[RunLog]:
    with RunLog(tmp_path / "run") as made:
        yield made


def events(runlog: RunLog) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (runlog.directory / "events.jsonl").read_text().splitlines()]


class Watched:
    """A run of so many steps whose memory is judged as given."""

    def __init__(
        self, runlog: RunLog, monkeypatch: pytest.MonkeyPatch, found: Verdict, **section: Any
    ) -> None:
        self.asked = 0
        self.choices = Choices()

        def judge(_trace: object) -> Verdict:
            self.asked += 1
            return found

        monkeypatch.setattr(monitor, "judge", judge)
        monkeypatch.setattr(memory_watch, "_LAUNCH_LOOK_S", 0.0)
        monkeypatch.setattr(memory_watch, "_LATER_LOOK_S", 0.0)
        monkeypatch.setattr(memory_watch, "time", self)
        self.now = 100.0
        self.stops = 0
        self.watch = MemoryWatch(SignalSection(**section), runlog, "cuda", self.choices)
        self.watch.may_stop(self.stop)

    def monotonic(self) -> float:
        """The watch's clock: a second a step."""
        return self.now

    def stop(self) -> None:
        self.stops += 1

    def step(self, number: int) -> None:
        self.now += 1
        self.watch.step(number, 100)
        self.watch.look()

    def run(self, steps: int) -> None:
        with self.watch:
            self.watch.sealed("3 graphs compiled", replays=lambda: 0)
            for number in range(1, steps + 1):
                self.step(number)
            self.watch.close()


def test_a_launch_that_leaks_stops_with_the_diagnosis(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"))
    with pytest.raises(RunError, match=r"launch is broken: GPU 0: leak: it grows by 2 MiB a step"):
        run.run(40)
    # Said at once, and stopped when it stays.
    first, last = [e for e in events(runlog) if e["event"] == "verdict"]
    assert first["causes"] == last["causes"] == {"0": ["leak"]}
    assert last["step"] - first["step"] == memory_watch._SURE_S
    recorded = (runlog.directory / "signal.jsonl").read_text()
    assert "launch is broken" in recorded  # the recording knows how it ended


def test_movement_without_a_cause_stops_a_launch_too(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Cause("unknown", "low", "nothing explains it.", "record more")
    with pytest.raises(RunError, match="memory is volatile: words"):
        Watched(runlog, monkeypatch, verdict(unknown, "volatile")).run(40)


def test_what_goes_away_within_seconds_stops_nothing(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's late workspace moves memory once or twice in a sound launch."""
    unknown = Cause("unknown", "low", "nothing explains it.", "record more")
    run = Watched(runlog, monkeypatch, verdict(unknown, "staircase"))
    with run.watch:
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        for number in range(1, 41):
            if number == 20:
                monkeypatch.setattr(monitor, "judge", lambda _: verdict(HEALTHY))
            run.step(number)


@pytest.mark.parametrize("cause", [LEAK, Cause("unknown", "low", "it moves.", "record more")])
def test_while_the_allocator_holds_the_same_nothing_stops(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, cause: Cause
) -> None:
    Watched(runlog, monkeypatch, verdict(cause, "sawtooth", allocator="flat")).run(40)


def test_nothing_is_judged_before_there_is_something_to_judge(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"))
    with run.watch:
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        for number in range(1, memory_watch._FEWEST_STEPS):
            run.step(number)
    assert run.asked == 0


def test_the_launch_line_comes_within_a_minute_however_long_a_step_is(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY))
    with run.watch, caplog.at_level(logging.INFO):
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        run.now += 50
        run.step(1)
    assert "launch: 3 graphs compiled; after 1 steps memory is flat on GPU 0" in caplog.text


def test_after_the_launch_it_warns_once_a_cause_and_goes_on(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY), launch_steps=20)
    with run.watch, caplog.at_level(logging.INFO):
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        for number in range(1, 141):
            if number == 50:
                monkeypatch.setattr(monitor, "judge", lambda _: verdict(LEAK, "slope"))
            if number == 100:
                monkeypatch.setattr(monitor, "judge", lambda _: verdict(LEAK, "staircase"))
            run.step(number)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2  # another shape is another finding
    assert "leak: it grows" in warnings[0]
    assert "launch: 3 graphs compiled; after 21 steps memory is flat on GPU 0" in caplog.text
    assert run.stops == 0


def test_stop_ends_a_run_later_through_its_last_checkpoint(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY), on_volatile="stop", launch_steps=5)
    with run.watch:
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        for number in range(1, 61):
            if number == 30:
                monkeypatch.setattr(monitor, "judge", lambda _: verdict(LEAK, "slope"))
            run.step(number)
    assert run.stops == 1
    assert "this run is broken: GPU 0: leak" in str(run.watch.stopped)


def test_warn_lets_a_broken_launch_go_on(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Watched(runlog, monkeypatch, verdict(LEAK, "slope"), on_volatile="warn").run(40)
    assert caplog.text.count("memory: GPU 0: leak") == 1
    assert caplog.text.count("launch: 3 graphs compiled") == 1


def test_when_the_steps_are_over_nothing_is_stopped(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"))
    with run.watch:
        run.watch.sealed("3 graphs compiled", replays=lambda: 0)
        run.watch.step(1, 100)
        run.now += 100
        run.watch.close()
    assert "memory: GPU 0: leak" in caplog.text


def test_a_judge_that_fails_is_said_once_and_ends_nothing(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY))

    def fail(_trace: object) -> Verdict:
        raise ValueError("no such shape")

    monkeypatch.setattr(monitor, "judge", fail)
    run.run(40)
    assert caplog.text.count("the program's memory cannot be judged") == 1


def test_missing_readings_of_the_driver_are_a_recorded_choice(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY))
    monkeypatch.setattr(type(run.watch._recorder), "unsampled", "no driver here")
    run.run(3)
    [choice] = run.choices.entries
    assert (choice.what, choice.got) == ("signal.samples", "the allocator's counters alone")
    assert choice.reason == "no driver here"


def test_replays_are_counted_and_not_declared(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY))
    replays = iter([5, 7, 9, 9])
    with run.watch:
        run.watch.sealed("3 graphs compiled", replays=lambda: next(replays))
        for number in (1, 2, 3):
            run.watch.step(number, 100)
    lines = [json.loads(x) for x in (runlog.directory / "signal.jsonl").read_text().splitlines()]
    assert [x["graph_replays"] for x in lines if x["kind"] == "step"] == [2, 4, 4]


def test_another_process_on_the_device_is_no_reason_to_stop(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Watched(runlog, monkeypatch, verdict(NEIGHBOUR, "volatile")).run(40)
    assert caplog.text.count("another process moves") == 1


def test_a_finding_is_handed_to_the_program_of_the_user(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "message"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    notify = [sys.executable, "-c", code]
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"), on_volatile="warn", notify=notify)
    run.run(40)
    for thread in threading.enumerate():
        if thread.name == "signal-notify":
            thread.join(30)
    assert "leak: it grows" in out.read_text()


def test_a_broken_notify_program_is_said_and_harms_nothing(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(
        runlog, monkeypatch, verdict(LEAK, "slope"), on_volatile="warn", notify=["/no/such/program"]
    )
    run.run(40)
    for thread in threading.enumerate():
        if thread.name == "signal-notify":
            thread.join(30)
    assert "signal.notify" in caplog.text


def test_on_a_cpu_the_launch_line_says_that_there_is_nothing_to_watch(
    runlog: RunLog, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        MemoryWatch(SignalSection(), runlog, "cpu", Choices()) as watch,
        caplog.at_level(logging.INFO),
    ):
        watch.sealed("neither compiled nor captured", replays=lambda: 0)
        watch.step(1, 100)
        watch.close()
    assert caplog.text.count("launch:") == 1
    assert "after 1 steps there is no device memory to watch" in caplog.text
    lines = [json.loads(x) for x in (runlog.directory / "signal.jsonl").read_text().splitlines()]
    assert [x["phase"] for x in lines if x["kind"] == "phase"] == ["load", "run", "end"]
    assert [x["tokens"] for x in lines if x["kind"] == "step"] == [100]
