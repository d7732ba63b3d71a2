"""Work is announced before it is done, and spoken of again while it lasts."""

from __future__ import annotations

import threading

import pytest

from draftline import progress
from draftline.progress import Job, doing


def test_it_is_said_before_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with doing("converting a file"):
        assert caplog.messages == ["converting a file ..."]
    assert caplog.messages == ["converting a file ..."]
    assert not [t for t in threading.enumerate() if t.name.startswith("progress")]


def test_it_is_said_again_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    heard = threading.Event()

    class Heard(Job):
        def state(self) -> str:
            heard.set()
            return super().state()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "Job", Heard)
        with doing("features", every_s=0.01) as job:
            job.reached(30, 120, "tokens")
            assert heard.wait(60)
    assert any(m.startswith("features: 30 of 120 tokens, ") for m in caplog.messages)


def test_a_failure_ends_the_talking(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="broken"), doing("loading"):
        raise ValueError("broken")
    assert not [t for t in threading.enumerate() if t.name.startswith("progress")]


def test_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    job = Job()
    now = 17.0
    assert job.state() == "12 s"
    job.reached(0, 90, "tokens")
    assert job.state() == "0 of 90 tokens, 12 s"
    job.reached(30, 90, "tokens")
    assert job.state() == "30 of 90 tokens, 12 s, about 24 s left"


def test_tokens_are_said_with_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("draftline.progress.time.monotonic", lambda: now[0])
    job, now[0] = Job(), 4.0
    job.reached(2, 8, "prompts", tokens=100)
    assert job.state() == "2 of 8 prompts, 100 tokens, 25.0 tok/s, 4 s, about 12 s left"
