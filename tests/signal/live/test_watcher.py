import numpy as np
import pytest

from draftline.signal.draftline_run import Pace
from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.signal.live.view import lines, plain
from draftline.signal.live.watcher import Watch
from draftline.signal.trace import Event, Samples, Trace

GIB = 2.0**30


class FakeFeed:
    title = "train.py"
    behind = False
    no_devices = "no device"
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.pace = Pace()
        self.events: list[Event] = []
        self.busy: list[tuple[str, float]] = []
        self.traced = 0

    def poll(self, now_s: float) -> list[Event]:
        events, self.events = self.events, []
        return events

    def compiling(self) -> list[tuple[str, float]]:
        return self.busy

    def trace(self) -> Trace:
        self.traced += 1
        time_s = np.arange(10.0)
        seen = Samples("0", time_s, np.full(10, GIB), np.full(10, 50.0), 141 * GIB)
        return Trace(samples=(seen,))

    def ended(self, now_s: float) -> str | None:
        return None


def verdict(cause: str, shape: str = "flat") -> Verdict:
    found = Cause(cause, "high", "because", "do this")
    return Verdict((DeviceVerdict("0", shape, "words", (), (found,)),))


class Judge:
    def __init__(self, *verdicts: Verdict) -> None:
        self.left = list(verdicts)

    def __call__(self, _trace: Trace) -> Verdict:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def drawn(watch: Watch, now_s: float = 0.0) -> str:
    return "\n".join(plain(line) for line in lines(watch.view(now_s), 120))


def test_events_are_counted_and_said() -> None:
    feed = FakeFeed()
    watch = Watch(feed, 0.0, Judge(verdict("healthy")))
    feed.events = [
        Event(1.0, "compile", "`loss`", None, 2.5),
        Event(1.0, "compile", "`loss`, backward", None, 1.0),
        Event(1.0, "recompile", "`loss` (a.py:4): value of `k` changed from 1 to another"),
    ]
    feed.busy = [("`step` (a.py:9)", -4.0)]

    said = watch.poll(1.0)

    assert any("recompile: `loss` (a.py:4)" in line for line in said)
    assert "compiling `step` (a.py:9) for 5.0 s, 2 compiles in 3.5 s, 1 recompile" in drawn(
        watch, 1.0
    )


def test_a_verdict_is_said_when_it_becomes_another_one() -> None:
    judging = Judge(
        verdict("unknown", "unknown"),
        verdict("healthy"),
        verdict("healthy"),
        verdict("leak", "slope"),
    )
    watch = Watch(FakeFeed(), 0.0, judging)

    assert watch.judge(0.0) == []
    assert "memory is flat, healthy" in watch.judge(2.0)[0]
    assert watch.judge(4.0) == []
    assert watch.exit_code == 0
    assert "GPU 0: leak" in watch.judge(6.0)[0]
    assert watch.exit_code == 3
    assert "slope" in drawn(watch)


@pytest.mark.parametrize(
    ("cause", "shape", "code"),
    [
        ("healthy", "flat", 0),
        ("pause", "flat", 0),
        ("unknown", "unknown", 0),
        ("unknown", "staircase", 3),
        ("recompiling", "flat", 3),
    ],
)
def test_the_exit_code_tells_a_fault_or_moving_memory(cause: str, shape: str, code: int) -> None:
    watch = Watch(FakeFeed(), 0.0, Judge(verdict(cause, shape)))
    assert watch.exit_code == 0

    watch.judge(0.0)
    assert watch.exit_code == code


def test_judging_is_not_done_at_each_poll() -> None:
    feed = FakeFeed()
    watch = Watch(feed, 0.0, Judge(verdict("healthy")))
    for n in range(100):
        watch.poll(n * 0.1)

    assert feed.traced == 5


def test_without_a_device_the_worst_that_was_told_is_shown() -> None:
    feed = FakeFeed()
    watch = Watch(feed, 0.0, Judge(Verdict(())))
    feed.events = [
        Event(1.0, "recompile", "`a`: value of `k` changed from 1 to another"),
        Event(1.0, "recompile_limit", "`a`: limit of 8 reached, new cases run uncompiled"),
    ]
    watch.poll(1.0)

    assert "verdict no device memory was recorded; recompile limit: `a`" in drawn(watch)


def test_the_summary_has_every_alert_in_full() -> None:
    feed = FakeFeed()
    watch = Watch(feed, 0.0, Judge(verdict("healthy")))
    feed.events = [Event(1.0, "error", f"trouble {'x' * 150} {n}") for n in range(20)]
    watch.poll(1.0)

    told = watch.summary(60.0, "ended with exit code 0 after 1 min 0 s")

    assert told[0] == "train.py: ended with exit code 0 after 1 min 0 s"
    assert sum("trouble" in line for line in told) == 20
    assert told[-1].endswith("x 19")
