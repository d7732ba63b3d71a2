"""What libraries warn of, kept out of the terminal: counted, and written to the run log.

A warning that names a file of somebody else's, in the middle of a table, helps nobody who reads the
table. What draftline says stays, and so does a library's error. Who wants to see all of it sets
PYTHONWARNINGS (warnings) or TORCH_LOGS (PyTorch's log).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

log = logging.getLogger(__name__)

# Different warnings that are kept; more are only counted.
_MOST = 200
_OWN = "draftline"


class _Terminal(logging.Handler):
    """Standard error as it is at the moment: a progress bar stands below what is said."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(f"{self.format(record)}\n")


class LibraryWarnings(logging.Handler):
    """Everything that libraries warn of, in this process, between `held_back` and its end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        # What draftline says is never waited for: the run log may be saying it, under its own lock.
        self.addFilter(lambda record: not f"{record.name}.".startswith(f"{_OWN}."))
        self._terminal = _Terminal()
        self._holding = False
        self._counts: Counter[tuple[str, str]] = Counter()
        self._told = 0
        self._event: Callable[[str, Mapping[str, object]], None] | None = None

    @property
    def count(self) -> int:
        """Warnings so far."""
        return self._counts.total()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, draftline's log of INFO and above goes to the terminal, and of libraries errors only."""
        root, own = logging.getLogger(), logging.getLogger(_OWN)
        level, shown = own.level, warnings.showwarning
        root.addHandler(self)
        own.addHandler(self._terminal)
        own.setLevel(logging.INFO)
        if not sys.warnoptions:
            warnings.showwarning = self._warned
        self._holding, self._told = True, self.count
        try:
            yield
        finally:
            self._tell("PYTHONWARNINGS=default shows them")
            self._holding = False
            warnings.showwarning = shown
            own.setLevel(level)
            own.removeHandler(self._terminal)
            root.removeHandler(self)

    @contextmanager
    def written_to(
        self, event: Callable[[str, Mapping[str, object]], None], where: str
    ) -> Iterator[None]:
        """Inside, each different warning is an event `library_warning` of the run log, those from before
        included; `where` names it for the line that tells their number."""
        self.acquire()
        self._event = event
        for library, text in self._counts if self._holding else ():
            event("library_warning", {"library": library, "text": text})
        self.release()
        try:
            yield
        finally:
            self.acquire()
            self._event = None
            self.release()
            self._tell(f"see library_warning in {where}")

    @contextmanager
    def quiet_loggers(self) -> Iterator[None]:
        """Inside, the libraries that are loaded by now and write their log to the terminal themselves, as
        PyTorch's compiler does, do not; nothing outside of `held_back`."""
        taken: list[tuple[logging.Logger, logging.Handler]] = []
        for name, logger in list(logging.root.manager.loggerDict.items()):
            library = name.partition(".")[0]
            asked = library == "torch" and "TORCH_LOGS" in os.environ
            if not isinstance(logger, logging.Logger) or library == _OWN or asked:
                continue
            for handler in list(logger.handlers) if self._holding else ():
                if type(handler) is logging.StreamHandler:  # and no file's
                    logger.removeHandler(handler)
                    taken.append((logger, handler))
                    if not logger.propagate:
                        logger.addHandler(self)
        try:
            yield
        finally:
            for logger, handler in taken:
                logger.removeHandler(self)
                logger.addHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self._terminal.handle(record)
            return
        found = (record.name, record.getMessage())
        if found not in self._counts and len(self._counts) >= _MOST:
            found = ("others", f"more than {_MOST} different ones")
        self._counts[found] += 1
        if self._event is not None and self._counts[found] == 1:
            self._event("library_warning", {"library": found[0], "text": found[1]})

    def _warned(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = f"{category.__name__}: {message} ({filename}:{lineno})"
        values: dict[str, Any] = {"name": "warnings", "levelno": logging.WARNING, "msg": text}
        self.handle(logging.makeLogRecord(values))

    def _tell(self, where: str) -> None:
        new, self._told = self.count - self._told, self.count
        if new and self._holding:
            log.info("libraries warned %d time(s), kept out of the way: %s", new, where)


LIBRARY_WARNINGS = LibraryWarnings()
