"""A crew of threads: who failed, who hangs, and that everybody else ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from draftline.errors import CompileError, ConfigError, DraftlineError, RunError
from draftline.runtime import workers as module
from draftline.runtime.workers import Crew, Stopped, Worker

CPU = torch.device("cpu")
WAIT_S = 30.0


def alive(crew: Crew) -> bool:
    return any(thread.is_alive() for thread in crew._threads)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends whoever hangs in a test, when it is over."""
    event = threading.Event()
    yield event
    event.set()


def wait_forever(condition: threading.Condition, what: str) -> Callable[[Worker], None]:
    def run(worker: Worker) -> None:
        with condition:
            worker.wait_until(condition, lambda: False, what)

    return run


def start(crew: Crew, name: str, function: Callable[[Worker], None]) -> Worker:
    worker = crew.worker(name, CPU)
    crew.start(worker, function)
    return worker


def run(
    crew: Crew,
    functions: dict[str, Callable[[Worker], None]],
    look: Callable[[], None] = lambda: None,
) -> None:
    """The whole life of a crew."""
    with crew:
        for name, function in functions.items():
            start(crew, name, function)
        crew.watch(look)


def waiting_for(what: str) -> Callable[[Worker], None]:
    return wait_forever(threading.Condition(), what)


def failing(error: BaseException) -> Callable[[Worker], None]:
    def run(worker: Worker) -> None:
        worker.doing("forward", 7)
        raise error

    return run


# The ordinary end


def test_watching_ends_with_the_last_worker() -> None:
    done: list[str] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    with Crew(WAIT_S) as crew:
        together = threading.Barrier(3)

        def work(worker: Worker) -> None:
            together.wait(WAIT_S)
            assert threading.current_thread().name == worker.name
            done.append(worker.name)

        for index in range(3):
            start(crew, f"worker-{index}", work)
        crew.watch(look)
    assert sorted(done) == ["worker-0", "worker-1", "worker-2"]
    assert looks >= 1
    assert not alive(crew)


def test_the_last_look_comes_after_everybody_ended() -> None:
    """What a worker leaves behind as its last act is seen."""
    left: list[str] = []
    seen: list[str] = []
    with Crew(WAIT_S) as crew:
        start(crew, "one", lambda w: left.append("report"))
        crew.watch(lambda: seen.extend(left) or left.clear())
    assert seen == ["report"]


def test_a_worker_that_is_done_may_stop_those_that_wait() -> None:
    """As drafters do with targets at the end of a run: no failure."""
    condition = threading.Condition()
    with Crew(WAIT_S) as crew:
        start(crew, "target-0", wait_forever(condition, "a free slot"))
        start(crew, "drafter-0", lambda w: crew.stop())
        crew.watch()
    assert not alive(crew)


def test_leaving_the_context_stops_and_joins() -> None:
    with Crew(WAIT_S) as crew:
        start(crew, "one", waiting_for("nothing"))
    assert not alive(crew)


def test_an_error_of_the_caller_stops_and_joins() -> None:
    def fail(crew: Crew) -> None:
        with crew:
            start(crew, "one", waiting_for("nothing"))
            raise ValueError("of the caller")

    crew = Crew(WAIT_S)
    with pytest.raises(ValueError, match="of the caller"):
        fail(crew)
    assert not alive(crew)


def test_an_error_of_the_watcher_stops_the_workers() -> None:
    def look() -> None:
        raise RunError("another machine failed")

    crew = Crew(WAIT_S)
    with pytest.raises(RunError, match=r"^another machine failed$"):
        run(crew, {"one": waiting_for("nothing")}, look)
    assert not alive(crew)


# Failures


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad shape"), RunError, "ValueError: bad shape"),
        (KeyboardInterrupt(), RunError, "KeyboardInterrupt: "),
        (RunError("the loss is nan"), RunError, "the loss is nan"),
        (CompileError("late compile"), CompileError, "late compile"),
        (ConfigError("a bad key"), ConfigError, "a bad key"),
    ],
)
def test_a_failure_names_worker_device_step_and_activity_once(
    error: BaseException, kind: type[DraftlineError], message: str
) -> None:
    waits = {f"drafter-{index}": waiting_for("a pack") for index in range(2)}
    crew = Crew(WAIT_S)
    with pytest.raises(DraftlineError) as caught:
        run(crew, {"target-1": failing(error), **waits})
    assert type(caught.value) is kind
    assert str(caught.value) == f"target-1 on cpu, step 7, forward: {message}"
    assert caught.value.__cause__ is error
    assert not alive(crew)


def test_out_of_memory_says_what_to_lower() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nProcess 1 ...")
    with pytest.raises(RunError) as caught:
        run(Crew(WAIT_S), {"drafter-0": failing(error)})
    message = str(caught.value)
    assert message.startswith(
        "drafter-0 on cpu, step 7, forward: out of memory: CUDA out of memory. Tried to allocate 2 GiB."
    )
    assert "\n" not in message
    assert "max_anchors" in message
    assert "--resume" in message


def test_only_the_first_failure_counts() -> None:
    """The second one comes while everybody stops: a consequence."""
    waits, failed = threading.Event(), threading.Event()

    def second(worker: Worker) -> None:
        waits.set()
        try:
            waiting_for("a pack")(worker)
        except Stopped:
            failed.set()
            raise ValueError("second") from None

    def first(worker: Worker) -> None:
        waits.wait(WAIT_S)
        raise ValueError("first")

    with pytest.raises(RunError, match=r"^one on cpu.*: first$"):
        run(Crew(WAIT_S), {"two": second, "one": first})
    assert failed.is_set()


def test_a_failure_wakes_those_that_wait_elsewhere_once() -> None:
    elsewhere = threading.Event()
    calls: list[str] = []

    def wake() -> None:
        calls.append("wake")
        elsewhere.set()

    def sleep(_: Worker) -> None:
        elsewhere.wait(WAIT_S)

    crew = Crew(WAIT_S)
    crew.on_stop.append(wake)
    with pytest.raises(RunError):
        run(crew, {"two": sleep, "one": failing(ValueError("x"))})
    assert not alive(crew)
    assert calls == ["wake"]


@pytest.mark.parametrize(
    "look", [lambda w: w.doing("forward", 1), lambda w: w.check(), waiting_for("a pack")]
)
def test_a_stopped_worker_ends_at_its_next_look(look: Callable[[Worker], None]) -> None:
    crew = Crew(WAIT_S)
    worker = crew.worker("one", CPU)
    crew.stop()
    with pytest.raises(Stopped):
        look(worker)


def test_nobody_waits_for_what_is_there() -> None:
    crew = Crew(WAIT_S)
    worker = crew.worker("one", CPU)
    condition = threading.Condition()
    crew.stop()
    with condition:
        worker.wait_until(condition, lambda: True, "a pack")


def test_a_worker_says_what_it_does_and_waits_for() -> None:
    crew = Crew(WAIT_S)
    worker = crew.worker("drafter-2", CPU)
    assert str(worker) == "drafter-2 on cpu"
    worker.doing("forward", 3)
    before = worker.activity
    assert (before.what, before.step, before.waiting) == ("forward", 3, False)
    with worker.waiting("a pack"):
        inside = worker.activity
        assert (inside.what, inside.step, inside.waiting) == ("a pack", 3, True)
    after = worker.activity
    assert (after.what, after.step, after.waiting) == ("forward", 3, False)
    # What it does counts anew from the end of the wait.
    assert before.since <= inside.since <= after.since


# Hangs


class Clock:
    """The watcher's and the workers' time, which stands still until the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sleep = time.sleep
        monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(module, "_GRACE_S", 0.2)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_worker_that_hangs_is_named_and_left_behind(
    clock: Clock, released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()

    def hang(worker: Worker) -> None:
        worker.doing("forward", 4)
        hangs.set()
        released.wait()

    def look() -> None:
        hangs.wait(WAIT_S)
        clock.now += 4

    expected = "^target-0 on cpu, step 4, forward: no progress for 12 s; it hangs$"
    crew = Crew(10)
    with caplog.at_level(logging.WARNING), pytest.raises(RunError, match=expected):
        run(crew, {"drafter-0": waiting_for("pack 0"), "target-0": hang}, look)
    assert alive(crew)
    assert "left behind without an answer: target-0" in caplog.text


def test_a_crew_in_which_everybody_waits_says_who_waits_for_what(clock: Clock) -> None:
    crew = Crew(10)

    def look() -> None:
        while not all(worker.activity.waiting for worker in crew.workers):
            time.sleep(0.001)
        clock.now += 11

    expected = (
        "everybody waits: target-0 on cpu waits for a free slot; drafter-0 on cpu waits for pack 0"
    )
    waits = {"target-0": waiting_for("a free slot"), "drafter-0": waiting_for("pack 0")}
    with pytest.raises(RunError, match=expected):
        run(crew, waits, look)
    assert not alive(crew)


def test_a_long_wait_is_no_hang_while_another_gets_on(clock: Clock) -> None:
    """Several deadlines long, in which one worker always says something new."""
    condition = threading.Condition()
    done: list[int] = []
    wanted = 0
    ended = threading.Event()

    def busy(worker: Worker) -> None:
        while len(done) < 8:
            with condition:
                condition.wait_for(lambda: wanted > len(done), WAIT_S)
                worker.doing("forward", len(done))
                done.append(len(done))
                condition.notify_all()
        # While it lives somebody has done something lately, until the other one has seen it.
        ended.wait(WAIT_S)

    def patient(worker: Worker) -> None:
        with condition:
            worker.wait_until(condition, lambda: len(done) == 8, "a pack")
        ended.set()

    def look() -> None:
        nonlocal wanted
        if len(done) == 8:
            return
        with condition:
            clock.now += 6
            wanted += 1
            condition.notify_all()
            condition.wait_for(lambda: len(done) >= min(wanted, 8), WAIT_S)

    run(Crew(10), {"target-0": busy, "drafter-0": patient}, look)
    assert len(done) == 8
