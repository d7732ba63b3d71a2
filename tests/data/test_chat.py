"""A prompt is rendered as a server would, whichever form of a tool call's arguments the template takes."""

from __future__ import annotations

from typing import Any

import pytest

from draftline.data.chat import served_prompt
from draftline.data.messages import Message, ToolCall

TURNS = [
    Message("user", "Weather?"),
    Message("assistant", "", tool_calls=(ToolCall("look", '{"city": "Rome"}'),)),
    Message("tool", "sunny"),
]


class Template:
    """Writes calls whose arguments have the type `takes`, and refuses others, as templates do."""

    def __init__(self, takes: type) -> None:
        self.takes = takes

    def apply_chat_template(self, turns: list[dict[str, Any]], **_: Any) -> str:
        calls = [c["function"]["arguments"] for t in turns for c in t.get("tool_calls", ())]
        if not all(isinstance(arguments, self.takes) for arguments in calls):
            raise TypeError("can only concatenate str")
        return f"{len(turns)} turns, {calls}"


@pytest.mark.parametrize(
    ("takes", "seen"), [(dict, "3 turns, [{'city': 'Rome'}]"), (str, """3 turns, ['{"city": "Rome"}']""")]
)  # fmt: skip
def test_arguments_are_objects_or_text_as_the_template_needs(takes: type, seen: str) -> None:
    assert served_prompt(Template(takes), TURNS, "", {}) == seen  # type: ignore[arg-type]


def test_what_a_template_refuses_in_both_forms_is_raised() -> None:
    with pytest.raises(TypeError, match="concatenate"):
        served_prompt(Template(list), TURNS, "", {})  # type: ignore[arg-type]
