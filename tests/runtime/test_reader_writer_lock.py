"""The lock of the compile gate: who gets in, who waits, and what is said to whoever waits too long.

Threads meet by events; a wait for a state looks until it is there, and fails after PATIENCE_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from draftline.errors import CompileError
from draftline.runtime.reader_writer_lock import ReaderWriterLock
from tests.support.timing import PATIENCE_S, until


class Worker:
    """A thread that enters one side of a lock, and leaves it when told."""

    def __init__(self, name: str, enter: Callable[[], object]) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._enter = enter
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._enter():  # type: ignore[attr-defined]
                self.entered.set()
                self.leave.wait(PATIENCE_S)
        except CompileError as error:
            self.error = error

    def end(self) -> None:
        self.leave.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[[str, Callable[[], object]], Worker]]:
    workers: list[Worker] = []

    def begin(name: str, enter: Callable[[], object]) -> Worker:
        workers.append(Worker(name, enter))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()


Start = Callable[[str, Callable[[], object]], Worker]


def test_many_share(start: Start) -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    for name in ("a", "b"):
        assert start(name, lock.shared).entered.wait(PATIENCE_S)
    with lock.shared():
        assert lock.inside() == ["MainThread", "a", "b"]
    assert lock.inside() == ["a", "b"]


def test_the_exclusive_side_waits_for_those_inside_and_keeps_newcomers_out(start: Start) -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    first = start("first", lock.shared)
    assert first.entered.wait(PATIENCE_S)
    owner = start("owner", lambda: lock.exclusive("warm-up"))
    until(lambda: lock.waiting() == ["owner"])
    newcomer = start("newcomer", lock.shared)
    until(lambda: lock.waiting() == ["newcomer", "owner"])
    assert not owner.entered.is_set()
    first.end()
    assert owner.entered.wait(PATIENCE_S)
    assert not newcomer.entered.is_set()
    assert (lock.inside(), lock.waiting()) == ([], ["newcomer"])
    owner.end()
    assert newcomer.entered.wait(PATIENCE_S)


def test_one_is_exclusive_at_a_time(start: Start) -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    one = start("one", lambda: lock.exclusive("x"))
    assert one.entered.wait(PATIENCE_S)
    two = start("two", lambda: lock.exclusive("y"))
    until(lambda: lock.waiting() == ["two"])
    assert not two.entered.is_set()
    one.end()
    assert two.entered.wait(PATIENCE_S)


def test_the_owner_may_enter_either_side_again_and_others_stay_out(start: Start) -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    with lock.exclusive("outer"):
        other = start("other", lock.shared)
        until(lambda: lock.waiting() == ["other"])
        with lock.exclusive("inner"), lock.shared():
            assert lock.inside() == []
        assert not other.entered.is_set()
    assert other.entered.wait(PATIENCE_S)


def test_a_worker_inside_enters_again_although_somebody_waits(start: Start) -> None:
    """Otherwise it would wait for the one who waits for it."""
    lock = ReaderWriterLock(PATIENCE_S)
    with lock.shared():
        owner = start("owner", lambda: lock.exclusive("warm-up"))
        until(lambda: lock.waiting() == ["owner"])
        with lock.shared():
            pass
        assert lock.inside() == ["MainThread"]
        assert not owner.entered.is_set()
    assert owner.entered.wait(PATIENCE_S)


def test_asking_from_inside_a_unit_of_work_is_an_error_and_no_deadlock() -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    with (
        lock.shared(),
        pytest.raises(CompileError, match=r"late warm-up was asked for by MainThread inside"),
        lock.exclusive("late warm-up"),
    ):
        pass
    with lock.exclusive("afterwards"):
        assert lock.inside() == []


def test_a_deadline_names_the_threads_that_still_run_and_lets_the_others_go_on(
    start: Start,
) -> None:
    lock = ReaderWriterLock(0.05)
    stuck = start("drafter cuda:1", lock.shared)
    assert stuck.entered.wait(PATIENCE_S)
    with (
        pytest.raises(
            CompileError,
            match=r"MainThread waited 0.05 s for warm-up; still running: drafter cuda:1 "
            r"\(at test_reader_writer_lock.py:\d+\)",
        ),
        lock.exclusive("warm-up"),
    ):
        pass
    assert start("newcomer", lock.shared).entered.wait(PATIENCE_S)


def test_whoever_waits_for_a_warm_up_that_never_ends_is_told_which(start: Start) -> None:
    lock = ReaderWriterLock(0.05)
    assert start("main", lambda: lock.exclusive("warm-up of head")).entered.wait(PATIENCE_S)
    with (
        pytest.raises(CompileError, match=r"still running: main \(warm-up of head, at "),
        lock.shared(),
    ):
        pass


def test_a_unit_of_work_that_fails_leaves() -> None:
    lock = ReaderWriterLock(PATIENCE_S)
    for side in (lock.shared, lambda: lock.exclusive("x")):
        with pytest.raises(ValueError, match="boom"), side():
            raise ValueError("boom")
    with lock.exclusive("y"):
        assert lock.inside() == []
