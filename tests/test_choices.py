"""The ledger of automatic choices."""

from __future__ import annotations

import logging

import pytest

from draftline.choices import Choice, Choices
from draftline.errors import DraftlineError, FallbackError

FALLBACK = {"wanted": "flex", "got": "dense", "reason": "no GPU", "fallback": True}


def test_a_choice_is_entered_logged_and_sent_once(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[tuple[str, dict[str, object]]] = []
    choices = Choices(sink=lambda kind, fields: sent.append((kind, fields)))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            choices.record("run.device", wanted="auto", got="cpu", reason="no CUDA device")
    fields = {
        "what": "run.device",
        "wanted": "auto",
        "got": "cpu",
        "reason": "no CUDA device",
        "fallback": False,
    }
    assert sent == [("choice", fields)]
    assert choices.entries == [Choice("run.device", "auto", "cpu", "no CUDA device")]
    [line] = caplog.records
    assert line.levelno == logging.INFO
    assert line.getMessage() == "run.device: cpu (no CUDA device)"


def test_the_same_thing_chosen_otherwise_is_another_entry() -> None:
    choices = Choices()
    choices.record("compile", wanted="a", got="b", reason="c")
    choices.record("compile", wanted="a", got="d", reason="c")
    assert [entry.got for entry in choices.entries] == ["b", "d"]


def test_a_fallback_warns(caplog: pytest.LogCaptureFixture) -> None:
    choices = Choices()
    choices.record("kernel", **FALLBACK)  # type: ignore[arg-type]
    assert [line.levelno for line in caplog.records] == [logging.WARNING]
    assert choices.entries[0].fallback


def test_strict_mode_raises_for_a_fallback_every_time_but_records_it_once() -> None:
    sent: list[str] = []
    choices = Choices(strict=True, sink=lambda kind, _: sent.append(kind))
    choices.record("run.device", wanted="auto", got="cpu", reason="no CUDA device")
    for _ in range(2):
        with pytest.raises(FallbackError) as caught:
            choices.record("kernel", **FALLBACK)  # type: ignore[arg-type]
        assert "kernel: wanted flex, could only get dense because no GPU" in str(caught.value)
        assert "run.strict_choices" in str(caught.value)
    assert [entry.what for entry in choices.entries] == ["run.device", "kernel"]
    assert sent == ["choice", "choice"]
    assert isinstance(caught.value, DraftlineError)
    assert caught.value.exit_code == 1


def test_a_late_follower_hears_what_came_before() -> None:
    choices = Choices()
    choices.record("a", wanted="w", got="g", reason="r")
    heard: list[object] = []
    choices.follow(lambda _, fields: heard.append(fields["what"]))
    choices.record("b", wanted="w", got="g", reason="r")
    choices.record("a", wanted="w", got="g", reason="r")
    assert heard == ["a", "b"]
