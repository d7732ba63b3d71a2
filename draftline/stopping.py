"""Ctrl-C, kept until the program is at a place where an exception reaches the command that runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# How long a kept signal waits before it is tried again, seconds.
_AGAIN_S = 0.05
# The package that imports lazily, and wraps or drops whatever an import raises.
_LAZY = "transformers.utils.import_utils"


@contextmanager
def stopping() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt as soon as `stop` may; one that is ignored stays ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop(number: int, frame: FrameType | None) -> None:
    """A signal handler that raises KeyboardInterrupt, later where imports are in progress.

    Imports and finalizers catch what is raised in them: the run would go on, or end in an error about a
    module that is only half there. A second signal meanwhile ends the program at once, with 130.
    """
    kept = signal.setitimer(signal.ITIMER_REAL, 0)[0] > 0
    if not _catches(frame):
        raise KeyboardInterrupt
    if kept and number != signal.SIGALRM:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"interrupted\n")
        os._exit(130)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _catches(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__":
            return True
        if frame.f_globals.get("__name__") == _LAZY:
            return True
        frame = frame.f_back
    return False
