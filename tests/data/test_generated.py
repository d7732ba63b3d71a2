"""Rows of ids: what was generated is trained on as it is, and nothing else is put beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import Conversation, read_conversations
from draftline.data.generated import template_sha256
from draftline.data.tokens import Tokenized, tokenize
from draftline.errors import DataError
from tests.support.chat_families import stop_ids_of, tokenizer_of

FAMILY = "qwq"
TURNS = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "other words"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "more words"},
]
GOOD = {
    "vocab_size": 400,
    "template_sha256": template_sha256(tokenizer_of(FAMILY).chat_template),
    "template": {"enable_thinking": False},
    "date": None,
    "target": "a/target",
}


def answer(turn: int, prompt: list[int], said: list[int], reason: str = "stop") -> dict[str, Any]:
    return {"turn": turn, "prompt_ids": prompt, "answer_ids": said, "finish_reason": reason}


def row(*generated: dict[str, Any], generator: Any = GOOD, **more: Any) -> dict[str, Any]:
    return {"messages": TURNS, "generated": list(generated), "generator": generator, **more}


def read(tmp_path: Path, *rows: dict[str, Any]) -> tuple[Conversation, ...]:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return read_conversations([path]).conversations


def run(conversations: tuple[Conversation, ...], length: int = 100, **extra: Any) -> Tokenized:
    given: dict[str, Any] = {"template_kwargs": GOOD["template"], "vocab_size": 400} | extra
    return tokenize(conversations, tokenizer_of(FAMILY), max_length=length, block_size=2, **given)


def test_ids_are_taken_whatever_the_text_says_and_turns_share_a_sample(tmp_path: Path) -> None:
    rows = read(
        tmp_path, row(answer(1, [1, 2, 3], [9, 8, 7]), answer(3, [1, 2, 3, 9, 8, 7, 5], [6, 6]))
    )
    (sample,) = run(rows).samples
    assert sample.input_ids.tolist() == [1, 2, 3, 9, 8, 7, 5, 6, 6]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] + [True] * 2
    assert (sample.id, sample.truncated) == ("answers.jsonl:1", False)
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == ("int32", "bool")


def test_a_history_that_was_rendered_anew_gives_one_sample_a_turn(tmp_path: Path) -> None:
    rows = read(tmp_path, row(answer(1, [1, 2], [9, 8]), answer(3, [1, 2, 8, 5], [6, 6], "length")))
    first, second = run(rows).samples
    assert (first.id, first.input_ids.tolist()) == ("answers.jsonl:1#turn1", [1, 2, 9, 8])
    assert (second.id, second.input_ids.tolist()) == ("answers.jsonl:1#turn3", [1, 2, 8, 5, 6, 6])
    assert (first.truncated, second.truncated) == (False, True)


def test_what_the_target_did_not_generate_is_history(tmp_path: Path) -> None:
    only_last = row(answer(3, [1, 2, 3], [9, 8]))
    assert run(read(tmp_path, only_last)).supervised_tokens == 2
    turns = [dict(turn) for turn in TURNS]
    turns[1]["weight"] = 0
    marked = row(answer(1, [1, 2], [9, 8]), answer(3, [1, 2, 9, 8, 5], [6, 6])) | {
        "messages": turns
    }
    (sample,) = run(read(tmp_path, marked)).samples
    assert sample.loss_mask.tolist() == [False] * 5 + [True] * 2


def test_answers_past_max_length_are_counted_and_cut(tmp_path: Path) -> None:
    rows = read(tmp_path, row(answer(1, [1, 2], [9, 8, 7]), answer(3, [1, 2, 9, 8, 7, 5], [6, 6])))
    done = run(rows, length=5)
    assert (done.samples[0].input_ids.tolist(), done.samples[0].truncated) == (
        [1, 2, 9, 8, 7],
        True,
    )
    assert done.cut_turns == 1


@pytest.mark.parametrize(
    ("generator", "words"),
    [
        ({"template": {}}, r"template arguments \{\}.*data.template=\{'enable_thinking': False\}"),
        ({"template": {"enable_thinking": True}}, "regenerate the answers"),
        ({"template_sha256": "0" * 16}, "another chat template .SHA-256 0000"),
        ({"vocab_size": 151936}, "a vocabulary of 151936, the target has 400"),
    ],
)
def test_answers_of_other_conditions_are_an_error_with_both_sides(
    tmp_path: Path, generator: dict[str, Any], words: str
) -> None:
    good, other = answer(1, [1, 2], [9, 8]), answer(3, [1, 2], [9, 8])
    turns = [*TURNS[:3], {"role": "assistant", "content": "others"}]
    rows = read(tmp_path, row(good), row(other, generator=GOOD | generator) | {"messages": turns})
    with pytest.raises(DataError, match=words) as caught:
        run(rows)
    assert "answers.jsonl" in str(caught.value)


def test_a_null_argument_is_one_that_is_not_given(tmp_path: Path) -> None:
    generator = GOOD | {"template": {"enable_thinking": False, "tools": None}}
    assert run(read(tmp_path, row(answer(1, [1, 2], [9, 8]), generator=generator))).samples


def test_ids_without_a_generator_are_used_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row(answer(1, [1, 2], [9, 8]), generator=None)) + "\n")
    reading = read_conversations([path])
    assert reading.notes == {"generator_unknown": 1}
    assert run(reading.conversations).supervised_tokens == 2


def test_tokens_behind_the_embedding_or_the_head_reject_their_row(tmp_path: Path) -> None:
    turns = [[*TURNS[:3], {"role": "assistant", "content": text}] for text in "abc"]
    answers = [answer(1, [1, 2], [9, 8]), answer(1, [1, 500], [9, 8]), answer(1, [1, 2], [450, 8])]
    rows = [
        row(a) | {"messages": t, "id": t[3]["content"]} for a, t in zip(answers, turns, strict=True)
    ]
    done = run(read(tmp_path, *rows), embedding_rows=480)
    assert [sample.id for sample in done.samples] == ["a"]
    assert [(r.id, r.reason) for r in done.rejects] == [
        ("b", "token_beyond_embedding"),
        ("c", "token_beyond_head"),
    ]
    assert "token 500 at 1" in done.rejects[0].detail


def test_rows_tokenised_elsewhere(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "id": "mask"},
        {"input_ids": [1, 2, 5, 4], "labels": [-100, -100, 5, 4], "finish_reason": "length"},
        {"input_ids": [0, 1, 2, 6, 4], "assistant_masks": [0, 0, 0, 1, 1],
         "attention_mask": [0, 1, 1, 1, 1]},
    )  # fmt: skip
    done = run(rows)
    assert [s.input_ids.tolist() for s in done.samples] == [[1, 2, n, 4] for n in (3, 5, 6)]
    assert {tuple(s.loss_mask.tolist()) for s in done.samples} == {(False, False, True, True)}
    assert [s.truncated for s in done.samples] == [False, True, False]


def test_turns_beside_ids_are_counted_as_unused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [-100, 2], "messages": turns}
    path.write_text(json.dumps(row) + "\n")
    assert read_conversations([path]).notes == {"turns_ignored": 1}


def test_a_row_of_ids_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}) + "\n")
    with pytest.raises(DataError, match="no_messages"):
        read_conversations([path], need_answer=False)


def test_equal_ids_are_one_object_however_often_they_stand(tmp_path: Path) -> None:
    (conversation,) = read(tmp_path, row(answer(1, [399, 399], [398, 399])))
    (generated,) = conversation.generated
    assert generated.prompt_ids[0] is generated.answer_ids[1]


@pytest.mark.parametrize(
    ("text", "said", "truncated"),
    [
        ("<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<think>\ntwo</think>Five.<|im_end|>\n",
         ["two</think>Five.<|im_end|>"], False),
        ("<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n<think>\ntwo</think>Fi",
         ["two</think>Fi"], True),
    ],
)  # fmt: skip
def test_a_rendered_conversation_is_read_by_the_templates_marks(
    tmp_path: Path, text: str, said: list[str], truncated: bool
) -> None:
    rows = read(tmp_path, {"text": text})
    (sample,) = run(rows, stop_ids=stop_ids_of(FAMILY)).samples
    tokenizer = tokenizer_of(FAMILY)
    assert tokenizer.decode(sample.input_ids) == text
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "".join(said)
    assert sample.truncated is truncated


@pytest.mark.parametrize(
    ("family", "text", "said"),
    [
        ("mistral", "[INST] Add.[/INST] Five.</s>[INST] And?[/INST] Six.</s>", [" Five.</s>", " Six.</s>"]),
        ("glm4", "[gMASK]<sop><|user|>\nAdd.<|assistant|>\nFive.<|user|>\nAnd?<|assistant|>\nSix.<|user|>",
         ["\nFive.<|user|>", "\nSix.<|user|>"]),
        ("phi4", "<|im_start|>user<|im_sep|>a<|im_end|><|im_start|>assistant<|im_sep|>b c<|im_end|>",
         ["b c<|im_end|>"]),
    ],
)  # fmt: skip
def test_rendered_conversations_of_other_families(
    tmp_path: Path, family: str, text: str, said: list[str]
) -> None:
    tokenizer = tokenizer_of(family)
    done = tokenize(
        read(tmp_path, {"text": text}),
        tokenizer,
        max_length=100,
        block_size=2,
        stop_ids=stop_ids_of(family),
    )
    (sample,) = done.samples
    bos = tokenizer.bos_token or ""
    assert tokenizer.decode(sample.input_ids) == bos + text
    assert done.notes == ({"bos_added": 1} if bos else {})
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "".join(said)


def test_a_rendered_conversation_of_another_template_is_left_out_by_name(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"text": "[INST] Add.[/INST] Five.</s>", "id": "other"},
        {"text": "<|im_start|>assistant\nFive.<|im_end|>", "id": "no thought"},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "id": "good"},
    )
    done = run(rows)
    reasons = {reject.id: reject.reason for reject in done.rejects}
    assert reasons == {"other": "no_answer_mark", "no thought": "template_not_prefix"}
