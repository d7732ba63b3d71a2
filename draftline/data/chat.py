"""A tokenizer with its chat template: renders, encodes, and knows where tokens may be joined."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from draftline.data.endings import Endings
from draftline.data.messages import Message
from draftline.errors import DataError

Ids = NDArray[np.int32]
Spans = NDArray[np.int64]
# What a template raises for turns that it does not take, by itself or by an operation on them.
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# What no template writes by itself.
_ASKED, _SAID = "\u2042 asked", "\u2042 said"
# Letters and marks of which one will not merge with what follows.
_ANCHORS = ("", "\n", ":", "]", "x")
# A prompt's end is looked at in growing windows: its last special token is nearly always near.
_WINDOWS = (64, 1024)
_SHIFTS = 4


class ChatTokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that `tokenize` uses."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...
    def __call__(self, text: Any, **kwargs: Any) -> Any: ...


class Chat:
    """A tokenizer with the arguments of its template; raises DataError where it cannot serve.

    `stops` are the texts of the tokens with which the target stops, None where that is not known.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        arguments: Mapping[str, object],
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            name = type(tokenizer).__name__
            raise DataError(
                f"{name} is slow and gives no offsets; load the target's tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; take an instruct model or set one")
        self.tokenizer = tokenizer
        self.arguments = arguments
        eos = getattr(tokenizer, "eos_token_id", None)
        ends = {*(stop_ids or ()), *([eos] if eos is not None else [])}
        added = tokenizer.added_tokens_decoder.items()
        self.special = {
            key: str(token.content) for key, token in added if token.special or key in ends
        }
        self.eos = self.special.get(eos) if eos is not None else None
        self.stops = (
            None
            if stop_ids is None
            else frozenset(self.special[i] for i in stop_ids if i in self.special)
        )
        longest = sorted(self.special.values(), key=len, reverse=True)
        marks = "|".join(map(re.escape, longest)) or r"(?!)"
        self.mark = re.compile(marks)
        self.closing = re.compile(rf"(?:\s|{marks})*\Z")
        self.endings = Endings(
            self.render,
            REFUSALS,
            stops=self.stops,
            eos=self.eos,
            mark=self.mark,
            closing=self.closing,
        )
        self._tails: dict[str, list[int]] = {}
        self._parsed = lru_cache(maxsize=64)(json.loads)

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool, tools: str = "") -> str:
        """The template's text, with the prompt that opens an answer at its end if `prompt`."""
        given: dict[str, Any] = {"tools": self._parsed(tools)} if tools else {}
        call = self.tokenizer.apply_chat_template
        return str(
            call(messages, tokenize=False, add_generation_prompt=prompt, **given, **self.arguments)
        )

    @cached_property
    def prompt_adds(self) -> str:
        """What the generation prompt has behind the text that stands before an answer in a render;
        "" where it begins otherwise."""
        user, answer = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}
        try:
            prompt, whole = self.render([user], True), self.render([user, answer], False)
        except REFUSALS:
            return ""
        before, found, _ = whole.partition(_SAID)
        return prompt[len(before) :] if found and prompt.startswith(before) else ""

    def encode(self, text: str) -> tuple[Ids, Spans]:
        """Ids [tokens] as apply_chat_template has them, and character spans [tokens, 2]."""
        asked = {"add_special_tokens": False, "padding": False, "truncation": False}
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False, **asked)
        spans = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], np.int32), spans

    def close_at(self, text: str, begin: int) -> int:
        """Where the special tokens and the white space begin that `text`, past `begin`, ends in."""
        end = len(text)
        while True:
            at = max(begin, len(text[:end].rstrip()))
            mark = next((m for m in self.special.values() if text.endswith(m, begin, at)), "")
            if not mark:
                return at
            end = at - len(mark)

    def answer_start(self, text: str, begin: int, ids: Ids, spans: Spans) -> int | None:
        """The token that follows the prompt `text[:begin]`, None where that prompt has other ids.

        Tokens merge within a stretch between special tokens only, so the stretch at the prompt's
        end decides. A tokenizer that leaves spaces out of spans may be off by the tokens of spaces.
        """
        tail = self._tail(text, begin)
        at = int(np.searchsorted(spans[:, 0], begin, "left"))
        for first in range(at, min(at + _SHIFTS, len(ids) + 1)):
            if first >= len(tail) and ids[first - len(tail) : first].tolist() == tail:
                return first
        return None

    def continued(self, text: str) -> list[int] | None:
        """The ids of `text` where it goes on after other tokens; None where none are found."""
        special = self.eos or next(iter(self.special.values()), "")
        for anchor in _ANCHORS:
            known = self._ids(special + anchor)
            ids = self._ids(special + anchor + text)
            if ids[: len(known)] != known or len(ids) == len(known):
                continue
            first = str(self.tokenizer.convert_ids_to_tokens(ids[len(known)]))
            if first.startswith("▁") and not text.startswith((" ", "▁")):
                continue
            return ids[len(known) :]
        return None

    def _ids(self, text: str) -> list[int]:
        asked = {"add_special_tokens": False, "padding": False, "truncation": False}
        ids: list[int] = list(self.tokenizer(text, verbose=False, **asked)["input_ids"])
        return ids

    def _tail(self, text: str, begin: int) -> list[int]:
        """The ids of the prompt `text[:begin]` from its last special token on."""
        for window in (*_WINDOWS, begin):
            start = max(0, begin - window)
            last = None
            for match in self.mark.finditer(text, start, begin):
                last = match.start()
            if last is not None or start == 0:
                break
        tail = text[last or 0 : begin]
        if tail not in self._tails:
            ids = self._ids(tail)
            if len(tail) > _WINDOWS[-1]:
                return ids
            self._tails[tail] = ids
        return self._tails[tail]


def served_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: str, arguments: Mapping[str, Any]
) -> str:
    """What a server shows the target for these turns; raises what the template raises.

    Arguments of tool calls are given as objects, and as text where the template refuses objects.
    """
    given = {"tools": json.loads(tools)} if tools else {}

    def render(as_text: bool) -> str:
        turns = [message.to_template(as_text) for message in messages]
        return str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **given, **arguments
            )
        )

    try:
        return render(False)
    except REFUSALS:
        if not any(message.tool_calls for message in messages):
            raise
        return render(True)
