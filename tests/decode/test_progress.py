"""What a long command says, by a clock that the test moves."""

from __future__ import annotations

import io

from draftline.decode.progress import Progress
from tests.support.timing import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stage_is_said_at_once_and_goes_on_being_said() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.stage("loading some/model")
    assert stream.getvalue() == "loading some/model\n"
    clock.now += 4.9
    assert not progress.due()
    clock.now += 0.1
    assert progress.due()
    progress.say()
    assert stream.getvalue().endswith("\nloading some/model, for 5 s\n")
    assert not progress.due()


def test_figures_come_in_the_first_second_of_generation_and_then_every_five() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock)
    progress.stage("loading")
    clock.now += 60
    progress.begin(rows=64, answers=64, most_tokens=4096)
    assert "answering: 0 of 64 rows, 0 tokens, 0.0 tok/s, ETA unknown" in stream.getvalue()
    assert not progress.due()
    clock.now += 1
    assert progress.due()


def test_rate_and_eta_move_inside_a_batch_and_between_batches() -> None:
    clock = Clock()
    progress = Progress(io.StringIO(), clock)
    progress.begin(rows=4, answers=6, most_tokens=100)
    clock.now += 2
    progress.decoding(40)
    # No answer is whole yet, so each may have all of its 100 tokens: 560 more at 20 a second.
    assert progress.line() == (
        "answering: 0 of 4 rows (0 of 6 answers), 40 tokens, 20.0 tok/s, ETA at most 28 s"
    )
    clock.now += 2
    progress.settled(answers=2, tokens=60)
    progress.settled(rows=1, lost=1)
    # 30 tokens an answer, 5 answers in all: 90 more at 15 a second.
    assert progress.line() == (
        "answering: 1 of 4 rows (2 of 5 answers), 60 tokens, 15.0 tok/s, ETA 6 s"
    )
    progress.decoding(15)
    assert "75 tokens, 18.8 tok/s, ETA 4 s" in progress.line()
    clock.now += 96
    assert "0.8 tok/s, ETA 1.7 min" in progress.line()


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(stream, clock)
    progress.begin(rows=2, answers=2, most_tokens=10)
    clock.now += 1
    assert progress.due()
    progress.say()
    progress.stage("next")
    text = stream.getvalue()
    assert text.count("\r\x1b[K") == 2
    assert text.endswith("ETA unknown\nnext\n")


def test_the_thread_ends_with_the_context() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.stage("reading")
        assert progress._thread.is_alive()
    assert not progress._thread.is_alive()
    assert stream.getvalue() == "reading\n"
