"""Conversation files: formats, accounting of every row, and what a user is told."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import Message, Reject, read_conversations, write_rejects
from draftline.errors import DataError

MESSY = Path(__file__).parent / "messy"
GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def answer(**fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **fields}]}


def read_one(tmp_path: Path, row: object, **options: bool) -> tuple[list[tuple[str, str]], Any]:
    reading = read_conversations([write(tmp_path / "rows.jsonl", row)], **options)
    (conversation,) = reading.conversations
    return [(m.role, m.content) for m in conversation.messages], reading.notes


# Rows are counted here from the raw files, not by the reader.
@pytest.mark.parametrize(
    ("name", "rows", "counts", "notes"),
    [
        ("fastchat_dummy_50.json", 50, {}, {}),
        ("glaive_toolcall_en_40.json", 40, {"duplicate": 1}, {}),
        ("v1_sft_parts_20.jsonl", 20, {}, {}),
        ("axolotl_conversation.json", 1, {}, {}),
        ("swift_chatml.jsonl", 3, {}, {}),
        ("damaged.jsonl", 25,
         {"empty_turn": 2, "not_object": 2, "duplicate": 1, "empty_conversation": 1,
          "bad_unicode": 1, "two_schemas": 1, "no_messages": 1, "truncated_line": 1},
         {"id_made_unique": 1, "leading_turns_dropped": 1, "turns_merged": 1}),
    ],
)  # fmt: skip
def test_every_row_of_a_messy_file_is_accounted_for(
    name: str, rows: int, counts: dict[str, int], notes: dict[str, int]
) -> None:
    text = (MESSY / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        assert sum(bool(line.strip()) for line in text.split("\n")) == rows
    else:
        document = json.loads(text)
        assert (len(document) if isinstance(document, list) else 1) == rows
    reading = read_conversations([MESSY / name])
    assert reading.rows == rows == len(reading.conversations) + len(reading.rejects)
    assert (reading.counts(), reading.notes) == (counts, notes)


def test_damaged_rows_are_named_by_line() -> None:
    reading = read_conversations([MESSY / "damaged.jsonl"])
    assert {reject.line: reject.reason for reject in reading.rejects} == {
        7: "duplicate", 10: "empty_conversation", 11: "empty_turn", 12: "empty_turn",
        20: "bad_unicode", 22: "two_schemas", 23: "no_messages", 24: "not_object",
        25: "not_object", 26: "truncated_line",
    }  # fmt: skip
    kept = {c.origin.rpartition(":")[2]: c for c in reading.conversations}
    assert kept["8"].id == "identity_1#2"
    assert kept["14"].messages[0] == Message("user", "Have a nice day!")
    assert kept["15"].messages[0].content.count("Can you introduce yourself?") == 2
    assert (kept["16"].id, kept["17"].id) == ("damaged.jsonl:16", "15")
    assert kept["18"].messages[0].content.startswith("<|im_end|><|im_start|>system\nhi")
    assert kept["19"].messages[0].content.startswith("\x00\u202e\U0001f469\u200d")
    assert len(kept["21"].messages[0].content) > 239_000


def test_all_files_together_have_unique_ids_and_no_repeated_turns() -> None:
    reading = read_conversations(sorted(MESSY.glob("*.json*")))
    ids = [conversation.id for conversation in reading.conversations]
    contents = [conversation.messages for conversation in reading.conversations]
    roles = {message.role for messages in contents for message in messages}
    assert roles == {"system", "user", "assistant", "tool"}
    assert len(set(ids)) == len(ids) == len(set(contents)) == 140 - len(reading.rejects)
    # Nine rows of the dummy file are in the damaged one too, which comes first.
    assert sum(r.reason == "duplicate" and "fastchat" in r.file for r in reading.rejects) == 9


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("shape", ["lines", "crlf", "array", "short array", "object"])
def test_one_row_reads_the_same_in_every_wrapping(
    tmp_path: Path, shape: str, zipped: bool, bom: bytes
) -> None:
    other = turns(("human", "a\u2028b\x85c"), ("gpt", "ok"))
    rows = [GOOD] if shape == "object" else [GOOD, other]
    text = {
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "crlf": "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n",
        "array": json.dumps(rows, indent=2, ensure_ascii=False),
        "short array": json.dumps(rows, ensure_ascii=False),
        "object": json.dumps(rows[0], indent=2),
    }[shape]
    data, path = bom + text.encode(), tmp_path / "conversations.txt"
    path.write_bytes(gzip.compress(data) if zipped else data)
    reading = read_conversations([path])
    assert not reading.rejects
    assert reading.conversations[0].messages == (Message("user", "hi"), Message("assistant", "yo"))
    if len(rows) == 2:
        assert reading.conversations[1].messages[0].content == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ([1], "not_object", "list"),
        ({"prompt": "a", "response": "b"}, "no_messages", "'prompt', 'response'"),
        ({"messages": "hi"}, "no_messages", "'messages'"),
        ({"messages": []}, "empty_conversation", "empty"),
        ({"messages": ["hi"]}, "turn_not_object", "turn 0 is a str"),
        (turns(("human", "a"), ("narrator", "b")), "unknown_role", "role 'narrator'"),
        (turns(("human", "a"), ("gpt", " \n")), "empty_turn", "turn 1 (assistant)"),
        (turns(("human", None), ("gpt", "b")), "empty_turn", "turn 0 (user)"),
        (turns(("gpt", "b")), "no_user_turn", "assistant"),
        (turns(("human", "a")), "no_assistant_turn", "no assistant turn"),
        (turns(("gpt", "b"), ("human", "a")), "no_assistant_turn", "follows"),
        (turns(("human", 7), ("gpt", "b")), "not_text", "'int'"),
        (turns(("human", [{"type": "image"}]), ("gpt", "b")), "not_text", "'image'"),
        (turns(("human", "a\ud800"), ("gpt", "b")), "bad_unicode", r"turn 0 has a lone '\ud800'"),
        ({**turns(("human", "a"), ("gpt", "b")), "id": "\udfff"}, "bad_unicode", "id has"),
        ({**turns(("human", "a"), ("gpt", "b")), **GOOD}, "two_schemas", "different turns"),
        (answer(content=None, tool_calls=[1]), "unsupported_field", "turn 1 has tool_calls"),
        (answer(content="b", reasoning_content=["c"]), "unsupported_field", "reasoning_content"),
        (answer(content="b", reasoning="c", thinking="d"), "unsupported_field", "which differ"),
        (answer(content="b", weight=0.5), "bad_weight", "turn 1 has weight=0.5"),
        (answer(content="b", train="no"), "bad_weight", "turn 1 has train='no'"),
        (answer(content="b", weight=1, trainable=False), "bad_weight", "to be learned and not"),
        (answer(content="b", loss_mask=0), "not_trained", "every answer"),
        ({**GOOD, "weight": 0}, "not_trained", "the row"),
        ({**GOOD, "loss_weight": 0.3}, "bad_weight", "the row has loss_weight=0.3"),
        ({**GOOD, "tools": "{broken"}, "bad_tools", "no JSON"),
        ({**GOOD, "tools": [{"type": "web"}]}, "bad_tools", "a tool has a name"),
        ({**GOOD, "images": ["a.png"]}, "not_text", "images"),
        ({"input_ids": [1, 2]}, "no_loss_mask", "beside them"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "bad_ids", "-2"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "bad_ids", "True"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_ids", "1 entries for 2 ids"),
        ({"input_ids": [1, 2], "labels": [-100, 9]}, "bad_ids", "unshifted"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no_assistant_turn", "marks no token"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1]}, "bad_ids",
         "attention_mask has 1 entries"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 2]}, "bad_weight",
         "attention_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [1, 2]}, "two_masks",
         "loss_mask and labels"),
        ({**GOOD, "messages": [{"role": "user", "content": {"a": 1}}]}, "not_text", "'dict'"),
        ({"messages": [GOOD["messages"][0], {**GOOD["messages"][1], "train": False}],
          "generated": [{"turn": 1, "prompt_ids": [1], "answer_ids": [2]}]}, "not_trained", "weight"),
        ({**GOOD, "generated": [{"turn": 0}]}, "bad_generated", "turn 0 is a user's"),
        ({**GOOD, "generated": [{"turn": 7}]}, "bad_generated", "turn 7 of 2"),
        ({**GOOD, "generated": [{"turn": 1, "prompt_ids": [1], "answer_ids": []}]}, "bad_ids",
         "generated[0].answer_ids"),
        ({**GOOD, "generated": [{"turn": 1, "prompt_ids": [2**40], "answer_ids": [1]}]}, "bad_ids",
         "prompt_ids holds 1099511627776"),
        (GOOD, "duplicate", "rows.jsonl:1"),
    ],
)  # fmt: skip
def test_a_bad_row_gets_its_reason(tmp_path: Path, row: object, reason: str, detail: str) -> None:
    reading = read_conversations([write(tmp_path / "rows.jsonl", GOOD, row)])
    (reject,) = reading.rejects
    assert (reject.line, reject.reason) == (2, reason)
    assert detail in reject.detail
    assert len(reading.conversations) == 1


def test_a_broken_first_line_or_json_too_deep_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [\n' + json.dumps(GOOD) + "\n" + "[" * 200_000 + "\n")
    reading = read_conversations([path])
    assert (reading.counts(), len(reading.conversations)) == ({"not_json": 2}, 1)


def test_aliases_mixed_keys_and_both_schemas_with_equal_turns(tmp_path: Path) -> None:
    row = {
        "system": "Be brief.",
        "messages": [
            {"from": "Human", "content": [{"type": "text", "text": "a"}, "b", {"text": "c"}]},
            {"role": "function_call", "value": "call"},
            {"role": "observation", "content": ""},
            {"role": "observation", "content": "second"},
            {"role": "MODEL", "content": "done"},
        ],
    }
    expected = [
        ("system", "Be brief."), ("user", "abc"), ("assistant", "call"), ("tool", ""),
        ("tool", "second"), ("assistant", "done"),
    ]  # fmt: skip
    assert read_one(tmp_path, row) == (expected, {})
    assert read_one(tmp_path, {**row, "conversations": row["messages"]}) == (expected, {})


def test_a_system_key_that_repeats_the_system_turn_is_used_once(tmp_path: Path) -> None:
    row = {"system": "S", **turns(("system", "S"), ("human", "a"), ("gpt", "b"))}
    assert read_one(tmp_path, row)[0] == [("system", "S"), ("user", "a"), ("assistant", "b")]
    row["system"] = "T"
    assert read_one(tmp_path, row)[0][0] == ("system", "T\n\nS")


def test_turns_without_prompt_or_answer_go_and_neighbours_merge(tmp_path: Path) -> None:
    row = turns(
        ("system", "S"), ("gpt", "hello"), ("human", "a"), ("human", "b"),
        ("gpt", "c"), ("gpt", "d"), ("human", "e"), ("observation", "f"),
    )  # fmt: skip
    kept, notes = read_one(tmp_path, row)
    assert kept == [("system", "S"), ("user", "a\n\nb"), ("assistant", "c\n\nd")]
    assert notes == {"leading_turns_dropped": 1, "trailing_turns_dropped": 1, "turns_merged": 1}
    open_ended, notes = read_one(tmp_path, row, need_answer=False)
    assert open_ended[-2:] == [("user", "e"), ("tool", "f")]
    assert "trailing_turns_dropped" not in notes


def test_prompts_without_answers_are_accepted_when_asked_for(tmp_path: Path) -> None:
    row = {"id": "q", "messages": [{"role": "user", "content": "2 + 2?"}], "reference": "4"}
    assert read_one(tmp_path, row, need_answer=False)[0] == [("user", "2 + 2?")]
    with pytest.raises(DataError, match="and an answer"):
        read_conversations([write(tmp_path / "rows.jsonl", row)])


def test_ids_stay_unique_when_a_made_up_one_was_taken(tmp_path: Path) -> None:
    rows = [
        {"id": name, **turns(("human", f"question {n}"), ("gpt", "b"))}
        for n, name in enumerate(["x", "x#2", "x", "x", 0, "", None])
    ]
    reading = read_conversations([write(tmp_path / "rows.jsonl", *rows)])
    ids = [conversation.id for conversation in reading.conversations]
    assert ids == ["x", "x#2", "x#3", "x#4", "0", "rows.jsonl:6", "rows.jsonl:7"]


def test_three_hundred_turns_and_one_id_for_all_rows_stay_fast(tmp_path: Path) -> None:
    long = turns(*[(("human", "gpt")[n % 2], f"turn {n} " + "word " * 50) for n in range(330)])
    rows = [{"id": 1, **turns(("human", f"q{n}"), ("gpt", "a"))} for n in range(5000)]
    path = write(tmp_path / "rows.jsonl", long, *rows)
    began = time.perf_counter()
    reading = read_conversations([path])
    assert time.perf_counter() - began < 3
    assert len(reading.conversations[0].messages) == 330
    assert reading.notes["id_made_unique"] == 4999


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \r\n\n", "is empty"),
        (b'{"a": "\xe9"}', "byte 0xe9 at offset 7"),
        (b"PAR1\x15\x04\x95\xff", "PAR1"),
        (gzip.compress(b'{"messages": []}' * 50)[:-9], "damaged gzip"),
        (b"\x1f\x8b" + b"x" * 30, "damaged gzip"),
        (json.dumps([GOOD, GOOD], indent=1).encode()[:-20], "neither JSON Lines nor one JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid 1\n", "version https://git-lfs"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_even_beside_good_ones(
    tmp_path: Path, data: bytes, words: str
) -> None:
    good = write(tmp_path / "good.jsonl", GOOD)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(data)
    with pytest.raises(DataError, match=words) as caught:
        read_conversations([good, bad])
    assert "bad.jsonl" in str(caught.value)


def test_missing_file_directory_and_no_file_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl.*No such file"):
        read_conversations([tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match="is a directory; give the files in it"):
        read_conversations([tmp_path])
    with pytest.raises(DataError, match="no conversation file was given"):
        read_conversations([])


def test_only_bad_rows_is_an_error_with_counts_and_three_examples(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"text": "a"}, [], {"text": "b"}, {"text": "c"})
    with pytest.raises(DataError) as caught:
        read_conversations([path])
    message = str(caught.value)
    assert "4 rejected {'no_messages': 3, 'not_object': 1}" in message
    assert all(f"rows.jsonl:{line} " in message for line in (1, 2, 3))
    assert "rows.jsonl:4 " not in message


def test_rejects_are_written_as_json_lines(tmp_path: Path) -> None:
    rejects = [
        Reject("a.jsonl", 3, "\ud83d", "bad_unicode", "id has a lone '\\ud83d'"),
        Reject("a.jsonl", 9, "好", "empty_turn", "turn 1"),
    ]
    path = tmp_path / "rejects.jsonl"
    write_rejects(rejects, path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [Reject(**row) for row in rows] == rejects
    assert "好" in path.read_text(encoding="utf-8")


def test_finish_reason_length_marks_the_last_answer_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    turns_of = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    rows = [
        {"id": "x", "messages": turns_of, "finish_reason": "length"},
        {"id": "y", "messages": other, "finish_reason": "stop"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [c.complete for c in read_conversations([path]).conversations] == [False, True]


def test_a_file_of_which_nothing_is_used_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps({"messages": turns}) + "\n{broken\n")
    bad.write_text('{"prompt": "a"}\n' * 3)
    read_conversations([good, bad])
    assert f"{bad}: none of its rows is used: 3 rejected" in caplog.text
    assert f"{good}:2 is no JSON: " in caplog.text
