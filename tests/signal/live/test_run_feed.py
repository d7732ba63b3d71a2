import json
import os
import time
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.draftline_run import Pace
from draftline.signal.live.run_feed import RunFeed
from draftline.signal.live.watcher import Watch

NOW_S = 1.8e9


def write(path: Path, *rows: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def start(pid: int, time_s: float = NOW_S) -> dict[str, object]:
    return {
        "kind": "start",
        "format": 1,
        "time_s": time_s,
        "pid": pid,
        "program": "train.py",
        "expects": [],
    }


def device(n: int) -> dict[str, object]:
    return {
        "kind": "device",
        "time_s": NOW_S + n,
        "device": "0",
        "used_bytes": 5 << 30,
        "total_bytes": 141 << 30,
        "util_pct": 90.0,
    }


def event(kind: str, text: str = "") -> dict[str, object]:
    return {"kind": "event", "time_s": NOW_S, "event": kind, "device": None, "text": text}


def test_a_recording_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    write(path, start(os.getpid(), time.time()), *(device(n) for n in range(3)))
    feed = RunFeed(tmp_path)

    assert feed.poll(NOW_S) == []
    write(path, device(3), event("recompile", "`loss`: why"))
    [told] = feed.poll(NOW_S + 1)

    assert (told.kind, told.text) == ("recompile", "`loss`: why")
    assert feed.title == "train.py"
    assert [len(samples.time_s) for samples in feed.trace().samples] == [4]
    assert feed.ended(NOW_S + 500) is None


def test_a_file_that_appears_later_is_found(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", {"time_s": NOW_S, "event": "start", "config": "x"})
    feed = RunFeed(tmp_path)
    feed.poll(NOW_S)

    write(tmp_path / "signal.jsonl", start(os.getpid(), time.time()), event("oom", "no room"))
    write(tmp_path / "metrics.jsonl", {"time_s": NOW_S, "step": 4, "step_ms": 20.0})
    told = feed.poll(NOW_S + 5)

    assert [e.kind for e in told] == ["oom"]
    assert feed.pace.step_ms == 20.0


def test_a_run_ends_as_it_says_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, {"time_s": NOW_S, "event": "start"}, {"time_s": NOW_S, "event": "end"})
    feed = RunFeed(tmp_path)
    feed.poll(NOW_S)
    assert feed.ended(NOW_S) == "the run has ended"

    write(path, {"time_s": NOW_S, "event": "start", "resume": True})
    feed.poll(NOW_S)
    assert feed.ended(NOW_S) is None

    write(path, {"time_s": NOW_S, "event": "failed", "error": "RunError: dead worker"})
    [told] = feed.poll(NOW_S)
    assert (told.kind, told.text) == ("error", "RunError: dead worker")
    assert feed.ended(NOW_S) == "the run has failed"


def test_a_run_whose_process_is_gone_has_ended_after_a_silence(tmp_path: Path) -> None:
    gone = tmp_path / "proc"
    gone.mkdir()
    path = tmp_path / "signal.jsonl"
    write(path, start(4242), device(0))
    os.utime(path, (NOW_S, NOW_S))
    feed = RunFeed(path, proc=gone)

    feed.poll(NOW_S + 1)
    assert feed.ended(NOW_S + 1) is None
    assert feed.ended(NOW_S + 60) == "its process (4242) has ended"


def test_a_later_process_with_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    write(path, start(os.getpid(), 1e9), device(0))  # this process began long after that
    os.utime(path, (NOW_S, NOW_S))
    feed = RunFeed(tmp_path)

    feed.poll(NOW_S + 1)
    assert feed.ended(NOW_S + 60) == f"its process ({os.getpid()}) has ended"


def test_a_recording_that_was_finished_long_ago_has_ended(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "1").mkdir(parents=True)
    zeros = " ".join(["0"] * 17)
    (proc / "1" / "stat").write_text(f"1 (init) S 0 {zeros} 100 0\n")
    (proc / "stat").write_text("btime 1000000000\n")  # it began before the recording, and lives
    for name, rows in (
        ("signal", [start(1), device(0)]),
        ("metrics", [{"step": 1, "step_ms": 20.0}]),
    ):
        write(tmp_path / f"{name}.jsonl", *rows)
        os.utime(tmp_path / f"{name}.jsonl", (NOW_S, NOW_S))

    feed = RunFeed(tmp_path, proc=proc)
    feed.poll(NOW_S + 590)
    assert feed.ended(NOW_S + 590) is None

    late = RunFeed(tmp_path, proc=proc)
    late.poll(NOW_S + 3 * 3600)
    assert late.ended(NOW_S + 3 * 3600) == "nothing was written for 3 h 0 min"


def test_a_file_in_which_nothing_stands_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "signal.jsonl").touch()
    os.utime(tmp_path / "signal.jsonl", (NOW_S, NOW_S))
    feed = RunFeed(tmp_path)

    feed.poll(NOW_S + 700)
    assert feed.ended(NOW_S + 700) == "nothing was written for 11 min 40 s"


def test_a_process_that_began_after_the_last_line_is_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    undated = start(os.getpid()) | {"time_s": None}
    write(path, undated, device(0) | {"time_s": 1e9})  # this process began long after that
    os.utime(path, (NOW_S, NOW_S))
    feed = RunFeed(path)

    feed.poll(NOW_S + 1)
    assert feed.ended(NOW_S + 60) == f"its process ({os.getpid()}) has ended"


def test_a_recording_that_is_begun_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    write(path, start(1), *(device(n) for n in range(20)))
    feed = RunFeed(tmp_path)
    feed.poll(NOW_S)

    path.unlink()
    write(path, start(os.getpid(), time.time()), device(50))
    feed.poll(NOW_S + 1)

    assert [len(samples.time_s) for samples in feed.trace().samples] == [1]


@pytest.mark.parametrize(("name", "words"), [("empty", "is empty of"), ("none", "is not there")])
def test_without_a_recording_it_says_what_is_wanted(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=f"{words}.*signal.jsonl.*--pid"):
        RunFeed(tmp_path / name)


ESCAPE = "\x1b]0;owned\x07\x1b[2J\nanother line"


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "signal.jsonl"
    failed = {"time_s": NOW_S, "event": "failed", "error": ESCAPE}
    write(path, start(1) | {"program": ESCAPE}, event(ESCAPE, ESCAPE), failed)
    feed = RunFeed(path)
    told = feed.poll(NOW_S)

    assert len(told) == 2
    assert all(f"{e.kind}{e.text}".isprintable() for e in told)
    assert feed.title == "]0;owned [2J another line"


@pytest.mark.parametrize("wrong", ["fast", 1e300, -1.0, True, [1], None, 10**400])
def test_values_of_a_wrong_kind_are_unknown(tmp_path: Path, wrong: object) -> None:
    path = tmp_path / "signal.jsonl"
    metrics = {"time_s": NOW_S, "step": wrong, "step_ms": wrong, "targets_waited_pct": wrong}
    lines = [
        {**event("oom"), "time_s": wrong},
        {**event("oom", "no room"), "device": wrong, "seconds": wrong},
        {"time_s": wrong, "event": "failed", "error": wrong},
        start(1) | {"pid": wrong, "time_s": wrong, "program": wrong},
        {**metrics, "tokens_per_s": 5.0},
    ]
    write(path, *lines)
    feed = RunFeed(path)
    watch = Watch(feed, NOW_S)
    watch.poll(NOW_S)

    assert watch.summary(NOW_S, feed.ended(NOW_S + 60) or "a snapshot")
    assert feed.pace == Pace(tokens_per_s=5.0)
    assert not any("None" in alert.text for alert in watch.alerts.known.values())
