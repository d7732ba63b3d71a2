"""The ledger of automatic choices: what was wanted, what was taken, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from draftline.errors import FallbackError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision taken for the user. `fallback` marks a got that is worse than the wanted."""

    what: str
    wanted: str
    got: str
    reason: str
    fallback: bool = False


class Choices:
    """Records every automatic choice of one run; in strict mode a fallback raises.

    `sink` is called once for each new choice (the run log's event writer).
    """

    def __init__(
        self, *, strict: bool = False, sink: Callable[[str, dict[str, object]], None] | None = None
    ) -> None:
        self._strict = strict
        self._sink = sink
        self.entries: list[Choice] = []

    def record(
        self, what: str, *, wanted: str, got: str, reason: str, fallback: bool = False
    ) -> None:
        """Enters a choice, once; raises FallbackError for a fallback in strict mode, every time."""
        choice = Choice(what, wanted, got, reason, fallback)
        known = choice in self.entries
        if not known:
            self.entries.append(choice)
            if self._sink is not None:
                self._sink("choice", asdict(choice))
        if fallback and self._strict:
            raise FallbackError(
                f"{what}: wanted {wanted}, could only get {got} because {reason}; "
                "run.strict_choices allows no fallback"
            )
        if known:
            return
        level = logging.WARNING if fallback else logging.INFO
        log.log(level, "%s: %s (%s)", what, got, reason)

    def follow(self, sink: Callable[[str, dict[str, object]], None]) -> None:
        """Sends the entries so far, and every later one, to `sink`."""
        for choice in self.entries:
            sink("choice", asdict(choice))
        self._sink = sink
