"""Ctrl-C in a training run, the SIGTERM that schedulers send, and the SIGHUP of a closed terminal."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from draftline.stopping import stop

log = logging.getLogger(__name__)


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one raises KeyboardInterrupt at
    once. A SIGHUP that is ignored, as under nohup, stays ignored."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            stop(number, frame)
            return
        log.warning("interrupted: finishing the step and writing a checkpoint (again: stop now)")
        event.set()

    with _handled(on_signal):
        yield event


@contextmanager
def ending() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, where there is nothing to save yet: the
    run's log then says how it ended, and what it holds is freed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled(stop):
        yield


@contextmanager
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
