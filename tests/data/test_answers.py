"""Answers that a template alters, ends late or does not end, and turns that are not to be learned."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import Conversation, Message, read_conversations
from draftline.data.dates import pinned, writes_date
from draftline.data.tokens import Tokenized, tokenize
from draftline.errors import DataError
from tests.support.chat_families import stop_ids_of, tokenizer_of
from tests.support.fakes import CHATML, tiny_tokenizer

USER = Message("user", "say it")


def said(done: Tokenized, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(s.input_ids[s.loss_mask]) for s in done.samples]


def run(tokenizer: Any, *messages: Message, complete: bool = True, **extra: Any) -> Tokenized:
    conversation = Conversation("c", messages, "f:1", complete)
    return tokenize([conversation], tokenizer, max_length=300, block_size=2, **extra)


ROLES = (
    "{% for m in messages %}{{ {'user': '<|im_start|>', 'assistant': '<|spare|>'}[m.role] }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|spare|>' }}{% endif %}"
)


@pytest.mark.parametrize(("stops", "end"), [
    (None, "<|im_start|>"), (("<|im_start|>",), "<|im_start|>"),
    # The role token is none that it stops with, so it stops with the end of text.
    (("<|im_end|>",), "<|im_end|>"),
])  # fmt: skip
def test_a_template_without_an_end_teaches_the_token_that_the_target_stops_with(
    stops: tuple[str, ...] | None, end: str
) -> None:
    tokenizer = tiny_tokenizer(ROLES)
    ids = None if stops is None else tokenizer.convert_tokens_to_ids(list(stops))
    turns = (USER, Message("assistant", "one two"), USER, Message("assistant", "three"))
    done = run(tokenizer, *turns, stop_ids=ids)
    assert "".join(said(done, tokenizer)) == f"one two{end}three{end}"
    whole = [tokenizer.decode(s.input_ids) for s in done.samples]
    assert whole[-1].endswith(f"three{end}")
    # Where the role token ends the answer the turns share a sample, else the history has another end.
    assert len(whole) == (2 if end == "<|im_end|>" else 1)


def test_a_cut_answer_is_not_taught_to_end_by_the_next_role() -> None:
    tokenizer = tiny_tokenizer(ROLES)
    done = run(tokenizer, USER, Message("assistant", "one two"), complete=False)
    assert said(done, tokenizer) == ["one two"]
    assert done.samples[0].truncated


def test_an_end_that_is_no_stop_token_is_not_taught_and_counted() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    stops = tokenizer.convert_tokens_to_ids(["<|endoftext|>"])
    done = run(tokenizer, USER, Message("assistant", "one two"), stop_ids=stops)
    assert (said(done, tokenizer), done.notes) == (["one two"], {"end_not_a_stop_token": 1})


def test_an_answer_that_holds_its_end_is_not_ended_twice() -> None:
    tokenizer = tiny_tokenizer(CHATML.replace("m.content", "m.content | trim"))
    done = run(tokenizer, USER, Message("assistant", " one two<|im_end|>"))
    assert said(done, tokenizer) == [" one two<|im_end|>"]


@pytest.mark.parametrize(
    "field", ["weight", "loss_weight", "train", "trainable", "loss_mask", "training", "loss"]
)
@pytest.mark.parametrize(("off", "on"), [(0, 1), (False, True), (0.0, 1.0)])
def test_a_turn_of_no_weight_is_history(tmp_path: Path, field: str, off: Any, on: Any) -> None:
    answers = [{"role": "assistant", "content": "wrong", field: off},
               {"role": "assistant", "content": "right", field: on}]  # fmt: skip
    user = {"role": "user", "content": "say it", field: off}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [user, answers[0], user, answers[1]]}) + "\n")
    reading = read_conversations([path])
    tokenizer = tiny_tokenizer(CHATML)
    done = tokenize(reading.conversations, tokenizer, max_length=300, block_size=2)
    assert (said(done, tokenizer), reading.notes) == (["right<|im_end|>"], {})
    assert "wrong" in tokenizer.decode(done.samples[0].input_ids)


def test_a_weight_survives_the_joining_of_neighbours(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a", "weight": 1}, {"role": "assistant", "content": "b"},
             {"role": "assistant", "content": "c", "weight": 0}, {"role": "user", "content": "d"},
             {"role": "assistant", "content": "e"}]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    reading = read_conversations([path])
    trained = [m.trained for m in reading.conversations[0].messages if m.role == "assistant"]
    assert trained == [False, True]
    assert reading.notes == {
        "turns_merged": 1, "untrained_by_merge": 1, "prompt_weight_ignored": 1,
    }  # fmt: skip


def test_calls_thoughts_and_tools_are_read_from_every_form(tmp_path: Path) -> None:
    call = {"name": "look", "arguments": '{"at": 6}'}
    forms: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": call}]},
        {"role": "assistant", "content": "", "function_call": {"name": "look", "arguments": {"at": 6}}},
        {"from": "function_call", "value": json.dumps({"name": "look", "arguments": {"at": 6}})},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    tool = {"name": "look", "parameters": {}}
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {**form, "reasoning": "two"}],
         "tools": json.dumps([tool])}
        for n, form in enumerate(forms)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for conversation in read_conversations([path]).conversations:
        turn = conversation.messages[1].to_template()
        assert turn["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 6}}
        assert (turn["content"], turn["reasoning_content"], turn["thinking"]) == ("", "two", "two")
        assert json.loads(conversation.tools) == [{"type": "function", "function": tool}]


def test_tools_that_a_template_ignores_are_counted() -> None:
    tools = '[{"type": "function", "function": {"name": "look"}}]'
    conversation = Conversation("c", (USER, Message("assistant", "one")), "f:1", tools=tools)
    done = tokenize([conversation], tiny_tokenizer(), max_length=300, block_size=2)
    assert (len(done.samples), done.notes) == (1, {"tools_ignored": 1})


def test_a_row_that_asks_for_other_template_arguments_is_left_out_by_name() -> None:
    turns = (USER, Message("assistant", "one"))
    asks = Conversation("asks", turns, "f:1", arguments='{"enable_thinking": true}')
    same = Conversation("same", turns, "f:2", arguments='{"enable_thinking": false}')
    done = tokenize(
        [asks, same],
        tokenizer_of("qwen3"),
        max_length=300,
        block_size=2,
        template_kwargs={"enable_thinking": False},
    )
    assert [sample.id for sample in done.samples] == ["same"]
    assert [(r.id, r.reason) for r in done.rejects] == [("asks", "template_arguments")]


def test_a_thought_in_a_field_that_was_cut_ends_where_it_was_cut() -> None:
    tokenizer = tokenizer_of("qwen3")
    turns = (USER, Message("assistant", "", "two, th"))
    done = run(tokenizer, *turns, complete=False, stop_ids=stop_ids_of("qwen3"))
    assert said(done, tokenizer) == ["<think>\ntwo, th"]


def test_a_pinned_date_is_the_one_written_and_an_argument_may_silence_it() -> None:
    template = (
        "{{ 'today ' + (day if day is defined else strftime_now('%d %b %Y')) + ' ' }}" + CHATML
    )
    tokenizer = tiny_tokenizer(template)
    assert writes_date(tokenizer, {})
    assert not writes_date(tokenizer, {"day": "x"})
    assert not writes_date(tiny_tokenizer(), {})
    # Written only for a turn that no probe has: it counts as written.
    assert writes_date(
        tiny_tokenizer(CHATML + "{% if rare %}{{ strftime_now('%Y') }}{% endif %}"), {}
    )
    turns = (USER, Message("assistant", "one"))
    day = datetime.date(2026, 3, 30)
    done = run(tokenizer, *turns, template_kwargs=pinned({}, day))
    assert tokenizer.decode(done.samples[0].input_ids).startswith("today 30 Mar 2026 ")


OPENED = CHATML.replace("assistant\n' }}", "assistant\n<work>\n' }}")


def test_a_block_under_any_name_that_the_prompt_opens_is_not_opened_twice() -> None:
    tokenizer = tiny_tokenizer(OPENED.replace("m.content", "m.content.split('/work>')[-1]"))
    answer = "<work>\ntwo\n</work>\none"
    done = run(tokenizer, USER, Message("assistant", answer))
    assert said(done, tokenizer) == [
        tokenizer.decode(tokenizer("two\n</work>\none<|im_end|>")["input_ids"])
    ]
    # Not a word of it is a thought, and the prompt has opened one.
    others = [Conversation("c", (USER, Message("assistant", "one")), "f:1")]
    with pytest.raises(DataError, match="template_not_prefix"):
        tokenize(others, tokenizer, max_length=300, block_size=2)


@pytest.mark.parametrize(
    "fault",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 // (m.content | length - 3) }}",
        "{{ m.content.format() }}",
    ],
)
def test_whatever_a_template_raises_costs_that_row_only(fault: str) -> None:
    template = CHATML.replace(
        "%}{{ '<", "%}{% if '{' in m.content %}" + fault + "{% endif %}{{ '<", 1
    )
    bad = Conversation("bad", (Message("user", "{0}"), Message("assistant", "one")), "f:1")
    good = Conversation("good", (USER, Message("assistant", "one")), "f:2")
    done = tokenize([bad, good], tiny_tokenizer(template), max_length=300, block_size=2)
    assert [(r.id, r.reason) for r in done.rejects] == [("bad", "template_error")]
