"""Worker threads that fail together: the first failure stops all of them and names its worker.

A worker says what it does and whom it waits for; the thread that started the crew watches. A worker
that is busy with one thing for longer than the deadline counts as hung, and so does a crew in which
everybody waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from draftline.errors import DraftlineError, RunError
from draftline.runtime.devices import on_device

log = logging.getLogger(__name__)

# Seconds between two looks of a waiting thread at whether the crew still runs.
_LOOK_S = 0.1
# Seconds that the others get to stop after a failure before they are left behind.
_GRACE_S = 10.0


class Stopped(Exception):
    """Raised in a worker when it should end because the crew stops; never leaves the crew."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does since `since` (monotonic seconds), `waiting` for somebody else or not. The
    `step` counts from 1, as logs and checkpoints do."""

    what: str
    step: int
    since: float
    waiting: bool


class Worker:
    """One thread with its device and stream; the arguments of its function start with it."""

    def __init__(self, crew: Crew, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.activity = Activity("start", 0, time.monotonic(), False)
        self._crew = crew

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    def doing(self, what: str, step: int) -> None:
        """Says what the worker begins; raises Stopped when the crew stops."""
        self.activity = Activity(what, step, time.monotonic(), False)
        self.check()

    def check(self) -> None:
        """Raises Stopped when the crew stops."""
        if self._crew.stopping.is_set():
            raise Stopped

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Marks a wait for somebody else, named in `what`."""
        before = self.activity
        self.activity = Activity(what, before.step, time.monotonic(), True)
        yield
        self.activity = Activity(before.what, before.step, time.monotonic(), False)

    def wait_until(
        self, condition: threading.Condition, ready: Callable[[], bool], what: str
    ) -> None:
        """Waits, holding `condition`, until `ready()`; raises Stopped when the crew stops."""
        if ready():
            return
        with self.waiting(what):
            while not ready():
                self.check()
                condition.wait(_LOOK_S)


class Crew(AbstractContextManager["Crew"]):
    """The workers of a process. Leaving the context stops whoever still runs.

    `on_stop` are called once when the crew stops early: whatever wakes workers that wait elsewhere.
    """

    def __init__(self, deadline_s: float) -> None:
        self.stopping = threading.Event()
        self.workers: list[Worker] = []
        self.on_stop: list[Callable[[], None]] = []
        self._deadline_s = deadline_s
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._failure: tuple[Worker, Activity, BaseException] | None = None
        self._lock = threading.Lock()

    def worker(self, name: str, device: torch.device) -> Worker:
        """A worker that `start` will run."""
        worker = Worker(self, name, device)
        self.workers.append(worker)
        return worker

    def start(self, worker: Worker, function: Callable[[Worker], None]) -> None:
        """Runs `function(worker)` on a thread named after the worker, on its device and stream."""

        def run() -> None:
            try:
                with on_device(worker.device, worker.stream):
                    function(worker)
            except Stopped:
                pass
            except BaseException as error:
                self._fail(worker, error)

        # A daemon, because a thread that hangs in a driver cannot be ended, only left behind.
        thread = threading.Thread(target=run, name=worker.name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def watch(self, look: Callable[[], None] = lambda: None) -> None:
        """Returns when every worker has ended; calls `look()` some twenty times a second.

        Raises the first failure, with worker, device, step and activity, after the others ended or
        had their grace: RunError, or the error's own class where it is one of draftline's.
        """
        # What `look` finds may follow from a worker's failure, which is then what is raised.
        while not self.stopping.is_set() and any(t.is_alive() for t in self._threads):
            look()
            self._check_progress()
            time.sleep(_LOOK_S / 2)
        if self._failure is None:
            look()
        self.close()

    def close(self) -> None:
        """Stops and joins the workers; raises the first failure."""
        self.stop()
        self._join(0.0 if self._closed else _GRACE_S)
        self._closed = True
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            log.warning("left behind without an answer: %s", ", ".join(left))
        self._raise()

    def stop(self) -> None:
        """Makes every worker end at its next look."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
        for call in self.on_stop:
            call()

    def _fail(self, worker: Worker, error: BaseException) -> None:
        with self._lock:
            # What happens while everybody stops is a consequence, not a cause.
            if self._failure is None and not self.stopping.is_set():
                self._failure = (worker, worker.activity, error)
        self.stop()

    def _check_progress(self) -> None:
        alive = [
            worker
            for worker, thread in zip(self.workers, self._threads, strict=False)
            if thread.is_alive()
        ]
        now = time.monotonic()
        late = [w for w in alive if now - w.activity.since > self._deadline_s]
        busy = [w for w in late if not w.activity.waiting]
        if busy:
            worker = busy[0]
            activity = worker.activity
            error = RunError(f"no progress for {now - activity.since:.0f} s; it hangs")
            self._fail(worker, error)
        elif alive and len(late) == len(alive):
            waits = "; ".join(f"{w} waits for {w.activity.what}" for w in alive)
            self._fail(alive[0], RunError(f"everybody waits: {waits}"))

    def _raise(self) -> None:
        if self._failure is None:
            return
        worker, activity, error = self._failure
        where = f"{worker}, step {activity.step}, {activity.what}"
        if isinstance(error, DraftlineError):
            raise type(error)(f"{where}: {error}") from error
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(where, error) from error
        raise RunError(f"{where}: {type(error).__name__}: {_first_line(error)}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if kind is None:
            self.close()
            return
        self.stop()
        # Who is left after `close` had its grace; a second Ctrl-C waits for nobody.
        at_once = self._closed or kind is KeyboardInterrupt
        self._join(_LOOK_S if at_once else _GRACE_S)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def out_of_memory(where: str, error: torch.OutOfMemoryError) -> RunError:
    """What a run says when a device is full."""
    return RunError(
        f"{where}: out of memory: {_first_line(error)} Lower max_anchors, token_budget, "
        "loss.chunk_rows or topology.slots, then continue with --resume --accept-changes where a "
        "checkpoint was written"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
