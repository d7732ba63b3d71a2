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

from draftline.config_sections import SignalSection
from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.train import memory_watch
from draftline.train.memory_watch import MemoryWatch

LEAK = Cause("leak", "high", "it grows by 2 MiB a step.", "look for tensors that are kept")
NEIGHBOUR = Cause("other_process", "high", "another process moves.", "give it a device of its own")
HEALTHY = Cause("healthy", "high", "within 0 MiB for 9 s.", "nothing to do")


def verdict(cause: Cause, shape: str = "flat") -> Verdict:
    return Verdict((DeviceVerdict("0", shape, "words", (), (cause,)),))


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

        def judge(_trace: object) -> Verdict:
            self.asked += 1
            return found

        monkeypatch.setattr(memory_watch, "judge", judge)
        monkeypatch.setattr(memory_watch, "_LAUNCH_LOOK_S", 0.0)
        monkeypatch.setattr(memory_watch, "_LATER_LOOK_S", 0.0)
        self.watch = MemoryWatch(SignalSection(**section), runlog, "cuda")

    def run(self, steps: int) -> None:
        with self.watch:
            self.watch.sealed("3 graphs compiled", captured=True)
            for number in range(1, steps + 1):
                self.watch.step(number, 100)
                self.watch.look()
            self.watch.close()


def test_a_launch_that_leaks_stops_with_the_diagnosis(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"))
    with pytest.raises(RunError, match=r"launch is broken: GPU 0: leak: it grows by 2 MiB a step"):
        run.run(40)
    [event] = [e for e in events(runlog) if e["event"] == "verdict"]
    assert event["causes"] == {"0": ["leak"]}


def test_movement_without_a_cause_stops_a_launch_too(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Cause("unknown", "low", "nothing explains it.", "record more")
    with pytest.raises(RunError, match="memory is volatile: words"):
        Watched(runlog, monkeypatch, verdict(unknown, "volatile")).run(40)


def test_nothing_is_judged_before_there_is_something_to_judge(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"))
    with run.watch:
        run.watch.sealed("3 graphs compiled", captured=True)
        for number in range(1, memory_watch._FEWEST_STEPS):
            run.watch.step(number, 100)
            run.watch.look()
    assert run.asked == 0


def test_after_the_launch_it_warns_once_a_cause_and_goes_on(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Watched(runlog, monkeypatch, verdict(HEALTHY), launch_steps=20)
    leaking = verdict(LEAK, "slope")
    with run.watch, caplog.at_level(logging.INFO):
        run.watch.sealed("3 graphs compiled", captured=True)
        for number in range(1, 101):
            run.watch.step(number, 100)
            if number == 50:
                monkeypatch.setattr(memory_watch, "judge", lambda _: leaking)
            run.watch.look()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "leak: it grows" in warnings[0]
    assert "launch: 3 graphs compiled; after 21 steps memory is flat on GPU 0" in caplog.text


@pytest.mark.parametrize(("choice", "stops"), [("stop", True), ("warn", False)])
def test_the_user_may_decide_otherwise(
    runlog: RunLog, monkeypatch: pytest.MonkeyPatch, choice: str, stops: bool
) -> None:
    run = Watched(runlog, monkeypatch, verdict(LEAK, "slope"), on_volatile=choice, launch_steps=1)
    run.watch._launch_over = True
    if stops:
        with pytest.raises(RunError, match="this run is broken"):
            run.run(40)
    else:
        run.run(40)


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
        runlog, monkeypatch, verdict(LEAK), on_volatile="warn", notify=["/no/such/program"]
    )
    run.run(40)
    for thread in threading.enumerate():
        if thread.name == "signal-notify":
            thread.join(30)
    assert "signal.notify" in caplog.text


def test_on_a_cpu_the_launch_line_says_that_there_is_nothing_to_watch(
    runlog: RunLog, caplog: pytest.LogCaptureFixture
) -> None:
    with MemoryWatch(SignalSection(), runlog, "cpu") as watch, caplog.at_level(logging.INFO):
        watch.sealed("neither compiled nor captured", captured=False)
        watch.step(1, 100)
        watch.close()
    assert caplog.text.count("launch:") == 1
    assert "after 1 steps there is no device memory to watch" in caplog.text
    lines = [json.loads(x) for x in (runlog.directory / "signal.jsonl").read_text().splitlines()]
    assert [x["phase"] for x in lines if x["kind"] == "phase"] == ["load", "run", "end"]
    assert [x["tokens"] for x in lines if x["kind"] == "step"] == [100]
