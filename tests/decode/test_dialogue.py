"""Turns that the target is asked for, turns that stay as given, and what the template gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftline.data.conversations import Conversation, Message, ToolCall
from draftline.decode.dialogue import Dialogue
from tests.support.fakes import tiny_tokenizer

STOP = {2}  # <|im_end|>
PLAIN = (
    "{% if tools %}tools{% for t in tools %} {{ t.function.name }}{% endfor %}.{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }} {{ c.function.arguments.x }}{% endfor %}"
    ",{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = Message("assistant", "", tool_calls=(ToolCall("look", '{"x": 7}'),))


def drive(
    messages: list[Message], answers: list[str], template: str = PLAIN, **rest: Any
) -> tuple[Dialogue, list[str]]:
    """The dialogue after `answers` (`...` at the end: cut), and the prompts as text."""
    tokenizer = tiny_tokenizer(template)
    arguments = rest.pop("arguments", {})
    dialogue = Dialogue(Conversation("d", tuple(messages), "f:1", **rest))
    prompts = []
    for answer in answers:
        assert dialogue.next_prompt()
        ids = dialogue.prompt_ids(tokenizer, arguments)
        assert ids is not None, dialogue.dropped
        prompts.append(tokenizer.decode(ids))
        tokens = tokenizer(answer.removesuffix("..."), add_special_tokens=False)["input_ids"]
        dialogue.answer(ids, tokens if answer.endswith("...") else [*tokens, 2], STOP, tokenizer)
    return dialogue, prompts


def user(text: str) -> Message:
    return Message("user", text)


def old(text: str = "old", **rest: Any) -> Message:
    return Message("assistant", text, **rest)


def test_answers_replace_the_old_ones_in_the_history() -> None:
    dialogue, prompts = drive([user("a"), old(), user("b"), old(), user("c")], ["x", "y", "z"])
    assert prompts == [
        "user:a,assistant:",
        "user:a,assistant:x,user:b,assistant:",
        "user:a,assistant:x,user:b,assistant:y,user:c,assistant:",
    ]
    assert dialogue.ended
    row = dialogue.row({"k": 1})
    assert row is not None
    assert [m["content"] for m in row["messages"]] == list("axbycz")
    assert [g["turn"] for g in row["generated"]] == [1, 3, 5]
    assert row["generator"] == {"k": 1}
    assert "tools" not in row


def test_tools_reach_the_template_and_the_row() -> None:
    dialogue, prompts = drive([user("a")], ["x"], tools=json.dumps(TOOLS))
    assert prompts == ["tools look.user:a,assistant:"]
    row = dialogue.row({})
    assert row is not None
    assert row["tools"] == TOOLS


def test_a_tools_result_stays_with_the_call_that_it_belongs_to() -> None:
    """The target is asked in place of the call too, and then after the result."""
    turns = [user("a"), CALL, Message("tool", "r"), old(), user("b"), old()]
    dialogue, prompts = drive(turns, ["mine...", "x", "y"], tools=json.dumps(TOOLS))
    assert prompts[0] == "tools look.user:a,assistant:"
    assert prompts[1] == "tools look.user:a,assistant:!look 7,tool:r,assistant:"
    assert prompts[2].endswith("tool:r,assistant:x,user:b,assistant:")
    row = dialogue.row({})
    assert row is not None
    assert [m["role"] for m in row["messages"]] == [
        "user", "assistant", "tool", "assistant", "user", "assistant"]  # fmt: skip
    assert row["messages"][1]["tool_calls"][0]["function"] == {
        "name": "look",
        "arguments": {"x": 7},
    }
    assert [(g["turn"], g["finish_reason"]) for g in row["generated"]] == [
        (1, "length"), (3, "stop"), (5, "stop")]  # fmt: skip
    assert row["finish_reason"] == "stop"


def test_a_call_is_given_as_text_to_a_template_that_wants_text() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ 'args=' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    _, prompts = drive([user("a"), CALL, Message("tool", "r")], ["x", "y"], template)
    # Brackets and quotes are no tokens of the tiny tokenizer.
    assert "args" in prompts[1]
    assert "7" in prompts[1]


def test_a_turn_that_is_not_trained_stays_and_is_not_asked_for() -> None:
    turns = [user("a"), old("kept", trained=False), user("b"), old()]
    dialogue, prompts = drive(turns, ["x"])
    assert prompts == ["user:a,assistant:kept,user:b,assistant:"]
    row = dialogue.row({})
    assert row is not None
    assert [g["turn"] for g in row["generated"]] == [3]
    assert [m.get("weight") for m in row["messages"]] == [None, 0, None, None]
    silent, _ = drive([user("a"), old("kept", trained=False)], [])
    assert silent.asks() == 0
    assert not silent.next_prompt()
    assert silent.row({}) is None


def test_a_cut_answer_ends_the_dialogue() -> None:
    dialogue, _ = drive([user("a"), old(), user("b")], ["long..."])
    assert dialogue.ended
    row = dialogue.row({})
    assert row is not None
    assert row["finish_reason"] == "length"
    assert [m["content"] for m in row["messages"]] == ["a", "long"]


def test_an_empty_answer_drops_the_question() -> None:
    dialogue, _ = drive([user("a"), old(), user("b"), old(), user("c")], ["x", ""])
    assert dialogue.ended
    assert dialogue.dropped == "empty answer"
    row = dialogue.row({})
    assert row is not None
    assert [m["content"] for m in row["messages"]] == ["a", "x"]
    assert row["finish_reason"] == "stop"
    nothing, _ = drive([user("a")], [""])
    assert nothing.row({}) is None


@pytest.mark.parametrize("asked", [([user("a")], 1), ([user("a"), old(), user("b")], 2),
    ([user("a"), CALL, Message("tool", "r"), Message("tool", "s"), old()], 2),
    ([Message("system", "s"), user("a"), old(trained=False), user("b"), old()], 1)])  # fmt: skip
def test_how_many_answers_will_be_asked_for_is_known(asked: tuple[list[Message], int]) -> None:
    messages, count = asked
    dialogue = Dialogue(Conversation("d", tuple(messages), "f:1"))
    assert dialogue.asks() == count
    left = [count]
    while dialogue.next_prompt():
        left.append(dialogue.asks())
        dialogue.answer([1], [9, 2], STOP, tiny_tokenizer())
    assert left == list(range(count, -1, -1))


THINKING = {
    # The generation prompt opens thinking, a turn of the history drops it (DeepSeek-R1, QwQ).
    "opened and dropped": (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% else %}"
        "<|spare|>{{ m.content.split('/think')[-1] }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|spare|>think\n{% endif %}",
        ["<|im_start|>a<|spare|>think\n",
         "<|im_start|>a<|spare|>said<|im_end|><|im_start|>b<|spare|>think\n"],
    ),
    # Thinking off writes an empty block that the history does not have (Qwen3).
    "empty block": (
        "{% for m in messages %}{{ m.role }}\n{{ m.content.split('/think')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% if enable_thinking is false %}think/think"
        "{% endif %}{% endif %}",
        ["user\na<|im_end|>assistant\nthink/think",
         "user\na<|im_end|>assistant\nsaid<|im_end|>user\nb<|im_end|>assistant\nthink/think"],
    ),
    # No end-of-turn token at all.
    "no end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ["user: a\nassistant: ", "user: a\nassistant: why/thinksaid\nuser: b\nassistant: "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", THINKING)
def test_what_was_generated_is_kept_whatever_the_template_does_to_it(kind: str) -> None:
    template, wanted = THINKING[kind]
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_tokens(["/think"])
    dialogue = Dialogue(Conversation("d", (user("a"), old(), user("b")), "f:1"))
    prompts, answers = [], []
    for text in ("why/thinksaid", "more/thinkend"):
        assert dialogue.next_prompt()
        ids = dialogue.prompt_ids(tokenizer, {"enable_thinking": False})
        assert ids is not None
        answers.append([*tokenizer(text, add_special_tokens=False)["input_ids"], 2])
        prompts.append(tokenizer.decode(ids).replace("?", "/"))
        dialogue.answer(ids, answers[-1], STOP, tokenizer)
    row = dialogue.row({})
    assert row is not None
    assert [g["answer_ids"] for g in row["generated"]] == answers
    assert [m["content"] for m in row["messages"][1::2]] == ["why/thinksaid", "more/thinkend"]
    assert prompts == wanted
