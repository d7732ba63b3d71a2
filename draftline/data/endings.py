"""With what a target ends an answer: what its template writes there, or how the next turn begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from re import Pattern
from typing import Any

# What no template writes by itself, to find an answer and the turn after it in a render.
_LAST, _NEXT = "\u2042 last", "\u2042 next"

Render = Callable[[Sequence[Mapping[str, Any]], bool, str], str]


class Endings:
    """The texts that end answers under one template; what needs further renders is found once.

    `stops` are the texts of the stop tokens, None where they are not known, and `eos` that of the
    end-of-text token; `mark` finds special tokens, `closing` matches them and white space.
    """

    def __init__(
        self,
        render: Render,
        refusals: tuple[type[Exception], ...],
        *,
        stops: frozenset[str] | None,
        eos: str | None,
        mark: Pattern[str],
        closing: Pattern[str],
    ) -> None:
        self._render, self._refusals = render, refusals
        self._stops, self._eos = stops, eos
        self._mark, self._closing = mark, closing
        self._known: dict[tuple[bool, str], str | None] = {}

    def of(
        self, turns: list[dict[str, Any]], text: str, after: int, calls: bool, tools: str
    ) -> tuple[str, str | None]:
        """The ending of the last of `turns`, whose answer ends at `after` in its render `text`.

        It is what follows up to a stop token, of which there may be only one in the next turn's
        beginning. "" where the template ends turns with what the target does not stop with. The
        second is the note that this is worth.
        """
        close = text[after:]
        marks = list(self._mark.finditer(close))
        ends = self._stops if self._stops is not None else {self._eos}
        for mark in marks:
            if mark[0] in ends:
                return close[: mark.end()], None
        if self._stops is None and marks:
            return close[: marks[0].end()], None
        key = (calls, close)
        if key not in self._known:
            self._known[key] = self._following(turns, text, after, calls, tools)
        if (following := self._known[key]) is not None:
            return following, None
        if marks:
            return "", "end_not_a_stop_token"
        if self._eos is not None:
            return self._eos, None
        return "", "no_end_of_turn"

    def _following(
        self, turns: list[dict[str, Any]], text: str, after: int, calls: bool, tools: str
    ) -> str | None:
        """What the next turn puts behind an answer, up to the token that the target stops with."""
        user = {"role": "user", "content": _NEXT}
        if calls:
            result = {"role": "tool", "content": _NEXT, "name": "a", "tool_call_id": "a"}
            found = self._between([*turns, result], text[max(0, after - 24) : after], tools)
        else:
            first = {"role": "user", "content": "a"}
            answered = [first, {"role": "assistant", "content": _LAST}, user]
            found = self._between(answered, _LAST, tools)
        # Less of an answer is left where the template drops the thought before it.
        for length in (24, 4):
            if found is None:
                found = self._between([*turns, user], text[max(0, after - length) : after], tools)
        return found

    def _between(self, turns: list[dict[str, Any]], said: str, tools: str) -> str | None:
        """What stands between `said` and the last turn, up to the first stop token there."""
        try:
            shown = self._render(turns, False, tools)
        except self._refusals:
            return None
        at = shown.rfind(said, 0, max(0, shown.rfind(_NEXT)))
        if at < 0:
            return None
        close = shown[at + len(said) :]
        for mark in self._mark.finditer(close):
            if not self._closing.fullmatch(close[: mark.start()]):
                break
            if self._stops is None or mark[0] in self._stops:
                return close[: mark.end()]
        return None
