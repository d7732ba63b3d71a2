"""Rings, turns and meters, in threads on a CPU. Threads meet by events and conditions only."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from draftline.runtime import ring as module
from draftline.runtime.ring import Ring, RunAhead, Turns, WaitMeter
from draftline.runtime.workers import Crew, Stopped, Worker

CPU = torch.device("cpu")
WAIT_S = 30.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Gives out workers; the tests run their threads themselves, and all of them are stopped."""
    made = Crew(WAIT_S)
    yield made
    made.stop()


class Call:
    """`function(worker)` on a thread; the test sees whether it waits, returned or raised."""

    def __init__(self, crew: Crew, name: str, function: Callable[[Worker], object]) -> None:
        self.worker = crew.worker(name, CPU)
        self.result: object = None
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.result = function(self.worker)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def waits_for(self) -> str | None:
        """What it is waiting for, once it does; None when it ended instead."""
        for _ in range(int(WAIT_S / 0.001)):
            if not self._thread.is_alive():
                return None
            if self.worker.activity.waiting:
                return self.worker.activity.what
            self._thread.join(0.001)
        raise AssertionError(f"{self.worker} neither waits nor ends")

    def ended(self) -> Call:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"{self.worker} hangs"
        return self


def slots(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.full((2,), -1.0)} for _ in range(count)]


def fill(ring: Ring, sequence: int, worker: Worker, number: int | None = None) -> None:
    slot = ring.acquire(sequence, worker)
    slot.tensors["x"].fill_(float(sequence))
    ring.publish(sequence, sequence if number is None else number, worker)


# Rings


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_producer_blocks_exactly_when_the_slots_are_used_up(crew: Crew, count: int) -> None:
    ring = Ring("drafter-0", slots(count))
    consumer = crew.worker("drafter-0", CPU)

    def produce(worker: Worker) -> None:
        for sequence in range(count + 2):
            fill(ring, sequence, worker)
            produced.append(sequence)

    produced: list[int] = []
    producer = Call(crew, "target-0", produce)
    assert producer.waits_for() == "a free slot of drafter-0"
    assert produced == list(range(count))
    # Taken is not free yet: the consumer still reads it.
    assert ring.take(consumer).number == 0
    assert producer.waits_for() == "a free slot of drafter-0"
    assert produced == list(range(count))
    with ring._condition:  # the producer cannot wake before this is left
        ring.release(consumer)
        assert produced == list(range(count))
    for sequence in range(1, count + 2):
        slot = ring.take(consumer)
        assert slot.number == sequence
        assert slot.tensors["x"].tolist() == [sequence, sequence]
        ring.release(consumer)
    producer.ended()
    assert producer.error is None
    assert produced == list(range(count + 2))


def test_packs_are_taken_in_order_whatever_the_order_they_came_in(crew: Crew) -> None:
    ring = Ring("drafter-0", slots(3))
    producer = crew.worker("target-0", CPU)
    fill(ring, 2, producer, 12)
    fill(ring, 1, producer, 11)
    consumer = Call(crew, "drafter-0", lambda w: ring.take(w).number)
    assert consumer.waits_for() == "pack 0 of drafter-0"
    fill(ring, 0, producer, 10)
    assert consumer.ended().result == 10
    taker = crew.worker("drafter-0", CPU)
    assert [ring.take(taker).number for _ in range(2)] == [11, 12]


def test_a_later_pack_does_not_take_the_slot_of_one_that_is_still_expected(crew: Crew) -> None:
    """Whoever is ahead of the order waits, whoever is behind finds his slot."""
    ring = Ring("drafter-0", slots(2))
    ahead = Call(crew, "target-1", lambda w: fill(ring, 2, w))
    assert ahead.waits_for() == "a free slot of drafter-0"
    worker = crew.worker("target-0", CPU)
    for sequence in (1, 0):
        fill(ring, sequence, worker)
    consumer = crew.worker("drafter-0", CPU)
    for sequence in range(3):
        slot = ring.take(consumer)
        assert slot.tensors["x"].tolist() == [sequence, sequence]
        ring.release(consumer)
    assert ahead.ended().error is None


@pytest.mark.parametrize("seed", range(3))
def test_any_producer_feeds_any_consumer(crew: Crew, seed: int) -> None:
    """Three producers deal 90 packs to two consumers; each gets its own, in order and whole."""
    rings = [Ring(f"drafter-{index}", slots(2)) for index in range(2)]
    todo = iter([(n // 2, n % 2) for n in range(90)])
    lock = threading.Lock()
    got: list[list[float]] = [[], []]

    def produce(worker: Worker) -> None:
        # A switch of threads is most likely in a wait; which ones wait differs by seed.
        pause = random.Random(f"{seed} {worker.name}")
        while True:
            with lock:
                job = next(todo, None)
            if job is None:
                return
            sequence, index = job
            slot = rings[index].acquire(sequence, worker)
            slot.tensors["x"][0] = sequence
            if pause.random() < 0.3:
                threading.Event().wait(0.0005)
            slot.tensors["x"][1] = index
            rings[index].publish(sequence, sequence, worker)

    def consume(index: int) -> Callable[[Worker], None]:
        def run(worker: Worker) -> None:
            for sequence in range(45):
                slot = rings[index].take(worker)
                assert slot.number == sequence
                assert slot.tensors["x"].tolist() == [sequence, index]
                slot.tensors["x"].fill_(-1.0)
                got[index].append(slot.number)
                rings[index].release(worker)

        return run

    calls = [Call(crew, f"target-{i}", produce) for i in range(3)]
    calls += [Call(crew, f"drafter-{i}", consume(i)) for i in range(2)]
    assert [call.ended().error for call in calls] == [None] * 5
    assert got == [list(range(45))] * 2


def test_a_stop_wakes_both_sides(crew: Crew) -> None:
    ring, empty = Ring("drafter-0", slots(1)), Ring("drafter-1", slots(1))
    fill(ring, 0, crew.worker("target-9", CPU))
    producer = Call(crew, "target-0", lambda w: ring.acquire(1, w))
    consumer = Call(crew, "drafter-1", empty.take)
    assert producer.waits_for() == "a free slot of drafter-0"
    assert consumer.waits_for() == "pack 0 of drafter-1"
    crew.stop()
    assert isinstance(producer.ended().error, Stopped)
    assert isinstance(consumer.ended().error, Stopped)


def test_what_is_there_is_given_out_also_after_a_stop(crew: Crew) -> None:
    """Only who would have to wait hears of it; a step that began ends."""
    ring = Ring("drafter-0", slots(1))
    worker = crew.worker("one", CPU)
    fill(ring, 0, worker, 5)
    crew.stop()
    assert ring.take(worker).number == 5


# Turns


def test_one_worker_at_a_time_has_the_turn(crew: Crew) -> None:
    turns = Turns()
    inside = crew.worker("target-0", CPU)
    entered = threading.Event()

    def enter(worker: Worker) -> None:
        with turns.turn(worker):
            entered.set()

    with turns.turn(inside):
        other = Call(crew, "drafter-0", enter)
        assert other.waits_for() == "its turn on cpu"
        assert not entered.is_set()
    assert other.ended().error is None
    assert entered.is_set()


def test_many_turns_never_overlap(crew: Crew) -> None:
    turns = Turns()
    together = threading.Barrier(4)
    inside, most, done = 0, 0, 0

    def work(worker: Worker) -> None:
        nonlocal inside, most, done
        together.wait(WAIT_S)
        for _ in range(50):
            with turns.turn(worker):
                inside += 1
                most = max(most, inside)
                threading.Event().wait(0)
                done += 1
                inside -= 1

    calls = [Call(crew, f"worker-{i}", work) for i in range(4)]
    assert [call.ended().error for call in calls] == [None] * 4
    assert (most, done) == (1, 200)


def test_an_error_ends_the_turn_and_a_stop_the_wait(crew: Crew) -> None:
    turns = Turns()
    worker = crew.worker("target-0", CPU)
    with pytest.raises(ValueError, match="inside"), turns.turn(worker):
        raise ValueError("inside")

    def enter(other: Worker) -> None:
        with turns.turn(other):
            pass

    assert Call(crew, "drafter-0", enter).ended().error is None
    with turns.turn(worker):
        other = Call(crew, "drafter-1", enter)
        other.waits_for()
        crew.stop()
        assert isinstance(other.ended().error, Stopped)


# Meters


def test_waits_are_added_up_and_read_once(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 20.0, 22.0, 30.0, 30.25])
    clock = SimpleNamespace(perf_counter=lambda: next(times))
    monkeypatch.setattr(module, "time", clock)
    meter, worker = WaitMeter(), crew.worker("drafter-0", CPU)
    for _ in range(2):
        with meter.measure(worker):
            pass
    assert meter.read() == 2.5
    assert meter.read() == 0.0
    with meter.measure(worker):
        pass
    assert meter.read() == 0.25


def test_running_ahead_is_no_matter_on_a_cpu(crew: Crew) -> None:
    ahead, worker = RunAhead(1), crew.worker("drafter-0", CPU)
    for _ in range(5):
        ahead.mark(worker)
