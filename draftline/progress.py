"""What is being done, said before it is done and again while it lasts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

# Seconds in which every command says something.
QUIET_S = 10.0


class Job:
    """One piece of work; `reached` is told how far it is."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._done = self._total = 0
        self._unit = self._tokens = ""

    def reached(self, done: int, total: int, unit: str = "", tokens: int | None = None) -> None:
        """Now `done` of `total` `unit` are finished, and `tokens` generated; said the next time that
        something is said."""
        self._done, self._total, self._unit = done, total, unit
        if tokens is not None:
            rate = tokens / max(time.monotonic() - self._began, 1e-9)
            self._tokens = f", {tokens} tokens, {rate:.1f} tok/s"

    def state(self) -> str:
        """How long it has taken, and how far it is and how long the rest will take where that is known."""
        seconds = time.monotonic() - self._began
        if not self._total:
            return f"{seconds:.0f} s"
        text = f"{self._done} of {self._total} {self._unit}".rstrip()
        text += f"{self._tokens}, {seconds:.0f} s"
        if self._done:
            text += f", about {seconds * (self._total - self._done) / self._done:.0f} s left"
        return text


@contextmanager
def doing(what: str, every_s: float = QUIET_S) -> Iterator[Job]:
    """Logs `what` now, and how far it is every `every_s` seconds until the block is left."""
    job, done = Job(), threading.Event()
    log.info("%s ...", what)

    def beat() -> None:
        while not done.wait(every_s):
            log.info("%s: %s", what, job.state())

    thread = threading.Thread(target=beat, name=f"progress of {what}", daemon=True)
    thread.start()
    try:
        yield job
    finally:
        done.set()
        thread.join()
