"""One loop judges a running program, for whoever watches it."""

from __future__ import annotations

import pytest

from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.signal.monitor import Monitor
from draftline.signal.trace import Trace


def verdict(cause: str, shape: str = "flat") -> Verdict:
    found = Cause(cause, "high", "because", "do this")
    return Verdict((DeviceVerdict("0", shape, "words", (), (found,)),))


def test_a_finding_is_news_once_however_often_it_goes_and_comes() -> None:
    seen = [verdict(cause) for cause in ("leak", "leak", "healthy", "leak")]
    left = iter(seen)
    monitor = Monitor(Trace, lambda _: next(left))
    assert not monitor.is_news()  # nothing was judged
    told = []
    for now_s in range(4):
        monitor.look(float(now_s))
        told.append((monitor.changed, monitor.is_news()))
    assert told == [(True, True), (False, False), (True, True), (True, False)]


def test_a_judge_that_fails_is_said_once_and_the_last_verdict_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = iter([verdict("healthy")])
    monitor = Monitor(Trace, lambda _: next(answers))
    first = monitor.look(0.0)
    assert (monitor.look(1.0), monitor.look(2.0)) == (None, None)
    assert monitor.verdict is first
    assert caplog.text.count("cannot be judged") == 1


def test_judging_that_takes_long_is_done_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5])
    monkeypatch.setattr("draftline.signal.monitor.time.monotonic", lambda: next(clock))
    monitor = Monitor(Trace, lambda _: verdict("healthy"))
    assert monitor.due(100.0, 2.0)
    monitor.look(100.0)
    assert [monitor.due(100.0 + later, 2.0) for later in (1.0, 3.0, 11.0)] == [False, False, True]
