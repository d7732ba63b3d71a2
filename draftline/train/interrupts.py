"""Ctrl-C in a training run, and the SIGTERM that schedulers send."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one raises KeyboardInterrupt at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        log.warning("interrupted: finishing the step and writing a checkpoint (again: stop now)")
        event.set()

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
