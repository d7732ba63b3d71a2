"""Rings: fixed slots on a consumer's device, filled by any producer, in one order.

Data are handed over by events, so neither side's host waits for a device. A slot is free again when
its consumer's stream has read it; whoever is faster waits, and the wait is measured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.runtime.workers import Worker


@dataclass(eq=False, slots=True)
class Slot:
    """`tensors` are the slot's memory; `number` is what its producer filled it with."""

    tensors: Mapping[str, Tensor]
    number: int = -1
    filled: torch.cuda.Event | None = None
    freed: torch.cuda.Event | None = None


class Ring:
    """The slots of one consumer. Place `sequence` of its stream of packs is slot `sequence % slots`.

    Each sequence number is produced once, by any worker and in any order in time, and consumed in
    order.
    """

    def __init__(self, consumer: str, slots: Sequence[Mapping[str, Tensor]]) -> None:
        self._consumer = consumer
        self._slots = [Slot(tensors) for tensors in slots]
        self._condition = threading.Condition()
        self._filled: set[int] = set()
        self._next = 0
        self._released = 0

    @property
    def first_slot(self) -> Slot:
        """A slot to try a copy with before anything is produced."""
        return self._slots[0]

    def acquire(self, sequence: int, worker: Worker) -> Slot:
        """The slot of `sequence`, once it is free; the current stream waits for its last reader."""
        with self._condition:
            worker.wait_until(
                self._condition,
                lambda: sequence < self._released + len(self._slots),
                f"a free slot of {self._consumer}",
            )
        slot = self._slots[sequence % len(self._slots)]
        if slot.freed is not None and worker.stream is not None:
            worker.stream.wait_event(slot.freed)
        return slot

    def publish(self, sequence: int, number: int, worker: Worker) -> None:
        """Hands the slot of `sequence` to the consumer, with all that the worker's stream queued."""
        slot = self._slots[sequence % len(self._slots)]
        slot.number = number
        slot.filled = _recorded(worker)
        with self._condition:
            self._filled.add(sequence)
            self._condition.notify_all()

    def take(self, worker: Worker) -> Slot:
        """The next slot in order; the consumer's stream waits for its content."""
        with self._condition:
            worker.wait_until(
                self._condition,
                lambda: self._next in self._filled,
                f"pack {self._next} of {self._consumer}",
            )
            self._filled.remove(self._next)
            slot = self._slots[self._next % len(self._slots)]
            self._next += 1
        if slot.filled is not None and worker.stream is not None:
            worker.stream.wait_event(slot.filled)
        return slot

    def release(self, worker: Worker) -> None:
        """Frees the slot taken last, once what the consumer's stream queued so far is done."""
        self._slots[self._released % len(self._slots)].freed = _recorded(worker)
        with self._condition:
            self._released += 1
            self._condition.notify_all()


class Turns:
    """Lets the workers that share a device compute one after another, in whole units of work.

    On CUDA a turn orders what is queued and the host waits for nothing; on a CPU it is the
    computation itself. A turn is never held while waiting for another worker.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._taken = False
        self._last: torch.cuda.Event | None = None

    @contextmanager
    def turn(self, worker: Worker) -> Iterator[None]:
        with self._condition:
            worker.wait_until(
                self._condition, lambda: not self._taken, f"its turn on {worker.device}"
            )
            self._taken = True
        try:
            if self._last is not None and worker.stream is not None:
                worker.stream.wait_event(self._last)
            yield
            self._last = _recorded(worker)
        finally:
            with self._condition:
                self._taken = False
                self._condition.notify_all()


class WaitMeter:
    """How long a worker's stream, or on a CPU its thread, stood still for others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    @contextmanager
    def measure(self, worker: Worker) -> Iterator[None]:
        if worker.stream is None:
            began = time.perf_counter()
            yield
            with self._lock:
                self._seconds += time.perf_counter() - began
            return
        with self._lock:
            pair = [
                self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        pair[0].record(worker.stream)
        yield
        pair[1].record(worker.stream)
        with self._lock:
            self._pairs.append((pair[0], pair[1]))

    def read(self) -> float:
        """Seconds of the waits that ended since the last call."""
        with self._lock:
            while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call]
                begin, end = self._pairs.popleft()
                self._seconds += begin.elapsed_time(end) / 1000
                self._spare += [begin, end]
            seconds, self._seconds = self._seconds, 0.0
        return seconds


class RunAhead:
    """Keeps a worker's host at most `units` units of work ahead of its device."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._queued: deque[torch.cuda.Event] = deque()

    def mark(self, worker: Worker) -> None:
        """Ends a unit of work; waits for the one `units` before it."""
        if worker.stream is None:
            return
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(worker.stream)
        self._queued.append(done)
        if len(self._queued) > self._units:
            self._queued.popleft().synchronize()


def _recorded(worker: Worker) -> torch.cuda.Event | None:
    if worker.stream is None:
        return None
    # A new one each time: an event belongs to the device that first recorded it, and producers
    # on several devices fill one slot.
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(worker.stream)
    return event
