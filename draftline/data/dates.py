"""The date that some chat templates write: found out, and held still for a run.

Llama 3.2, Mistral Small 3, SmolLM3, Granite and gpt-oss call `strftime_now`, so the same conversation
gives other tokens on another day. An argument of that name takes the place of the built-in function.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from draftline.data.chat import REFUSALS

_CLOCK = "strftime_now"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBES: tuple[tuple[list[dict[str, str]], dict[str, Any]], ...] = (
    ([{"role": "user", "content": "a"}], {}),
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], {}),
    ([{"role": "user", "content": "a"}], {"tools": [_TOOL]}),
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], {"tools": [_TOOL]}),
)


def writes_date(tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the chat template, given `arguments`, can write the day on which it is rendered.

    False where an argument such as `date_string` takes the date's place.
    """
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    if not any(_CLOCK in text for text in texts):
        return False
    # A call that no probe reaches may hang on a row, so it counts; one that the arguments silence
    # does not.
    return _asks(tokenizer, arguments) or not _asks(tokenizer, {})


def pinned(arguments: Mapping[str, Any], date: datetime.date) -> dict[str, Any]:
    """`arguments` for the chat template under which it is always `date`, at midnight."""
    midnight = datetime.datetime.combine(date, datetime.time())
    return {**arguments, _CLOCK: midnight.strftime}


def _asks(tokenizer: Any, arguments: Mapping[str, Any]) -> bool:
    asked: list[str] = []

    def clock(form: str) -> str:
        asked.append(form)
        return ""

    overridden: dict[str, Callable[[str], str]] = {_CLOCK: clock}
    for messages, tools in _PROBES:
        try:
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                **{**arguments, **tools, **overridden},
            )
        except REFUSALS:
            continue  # some templates take no system turn or no tools
    return bool(asked)
