"""What libraries warn of: away from the terminal, in the run log, counted; all the rest stays."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftline.library_warnings import LibraryWarnings
from draftline.runlog import RunLog
from tests.support.runs import events

OWN, THEIRS = logging.getLogger("draftline.train.loop"), logging.getLogger("somebody.else")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> LibraryWarnings:
    monkeypatch.setattr(sys, "warnoptions", [])
    return LibraryWarnings()


@contextmanager
def with_a_handler() -> Iterator[logging.Logger]:
    """A logger that writes to the terminal by itself, as PyTorch's do."""
    logger = logging.getLogger("torch.a_test")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def warn(text: str = "Synchronization debug mode is a prototype feature") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=1)


def test_only_draftline_speaks_and_errors_of_all(
    kept: LibraryWarnings, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept.held_back():
        OWN.info("step 1")
        warn()
        THEIRS.warning("deprecated")
        THEIRS.info("connected")
        OWN.warning("a warning of ours")
        THEIRS.error("it broke")
        assert kept.count == 2
    assert capsys.readouterr().err.splitlines() == [
        "step 1",
        "a warning of ours",
        "it broke",
        "libraries warned 2 time(s), kept out of the way: PYTHONWARNINGS=default shows them",
    ]


def test_each_different_warning_is_in_the_run_log_once(
    kept: LibraryWarnings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept.held_back():
        THEIRS.warning("before the run")
        with RunLog(tmp_path) as runlog, kept.written_to(runlog.event, "events.jsonl"):
            for _ in range(3):
                warn("in the run")
        THEIRS.warning("after it")
    texts = [e["text"] for e in events(tmp_path)]
    assert texts[0] == "before the run"
    assert texts[1].startswith("UserWarning: in the run (")
    assert len(texts) == 2
    said = capsys.readouterr().err.splitlines()
    assert "4 time(s), kept out of the way: see library_warning in events.jsonl" in said[0]
    assert "1 time(s)" in said[1]


def test_a_library_that_writes_to_the_terminal_itself_is_quiet_behind_the_gate(
    kept: LibraryWarnings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with with_a_handler() as logger, kept.held_back(), RunLog(tmp_path) as runlog:
        before = list(logger.handlers)
        with kept.written_to(runlog.event, "events.jsonl"), kept.quiet_loggers():
            logger.warning("Not enough SMs")
        assert set(logger.handlers) == set(before)
    assert [e["text"] for e in events(tmp_path)] == ["Not enough SMs"]
    assert "Not enough SMs" not in capsys.readouterr().err


def test_who_asks_for_warnings_sees_them(
    kept: LibraryWarnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    shown = warnings.showwarning
    with kept.held_back():
        assert warnings.showwarning is shown


def test_many_different_ones_are_counted_and_not_kept(kept: LibraryWarnings) -> None:
    told: list[Any] = []
    with kept.held_back(), kept.written_to(lambda *event: told.append(event), "events.jsonl"):
        for number in range(500):
            THEIRS.warning("number %d", number)
    assert kept.count == 500
    assert len(told) == 201


def test_afterwards_everything_is_as_before(kept: LibraryWarnings) -> None:
    root, own = logging.getLogger(), logging.getLogger("draftline")

    def state() -> tuple[Any, ...]:
        return (*root.handlers, *own.handlers, own.level, warnings.showwarning)

    before = state()
    with pytest.raises(KeyError), kept.held_back():
        raise KeyError
    assert state() == before


def test_without_the_command_line_nothing_of_the_program_is_touched(
    kept: LibraryWarnings, tmp_path: Path
) -> None:
    """As when a notebook calls `train`."""
    with with_a_handler() as logger, RunLog(tmp_path) as runlog:
        before = (list(logger.handlers), warnings.showwarning)
        with kept.written_to(runlog.event, "events.jsonl"), kept.quiet_loggers():
            assert (list(logger.handlers), warnings.showwarning) == before
            THEIRS.warning("theirs")
    assert events(tmp_path) == []
