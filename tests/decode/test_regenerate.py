"""Every answer becomes the target's own, each with the new answers before it as its history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError

from draftline.data.conversations import Conversation, Message, read_conversations
from draftline.decode import regenerate as module
from draftline.decode.regenerate import Regenerated, regenerate
from draftline.errors import DataError
from draftline.model.target import Target
from tests.tiny import TinyTokenizer, build_target

# A quarter of the vocabulary ends an answer, so that answers have many lengths.
STOPS = (3, *range(40, 55))


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target(stop=STOPS)


def conversation(name: str, *turns: str) -> Conversation:
    """Turns written `u:text`, `a:text`, `s:text` or `t:text`."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = tuple(Message(roles[t[0]], t[2:]) for t in turns)
    return Conversation(name, messages, f"file:{name}")


CONVERSATIONS = [
    conversation("one", "u:HELLO", "a:old"),
    conversation("many", "s:SYS", "u:A", "a:old", "u:BC", "a:older", "u:DEF", "a:oldest"),
    conversation("open", "u:WHAT IS", "a:old", "u:LAST"),
    conversation("prompt", "u:ONLY A PROMPT"),
    *(conversation(f"more{i}", f"u:{'XYZ'[i % 3] * i}", "a:old") for i in range(1, 7)),
    *(conversation(f"turns{t}", f"u:{t}", "a:old", "u:HI", "a:old", "u:NO") for t in "ABCDEFGH"),
]


def run(target: Target, out: Path, **changes: Any) -> Regenerated:
    values: dict[str, Any] = {
        "max_new_tokens": 8,
        "max_prompt_tokens": 100,
        "temperature": 0.0,
        "batch_size": 4,
        "seed": 0,
    }
    conversations = changes.pop("conversations", CONVERSATIONS)
    return regenerate(conversations, target, out, **(values | changes))


def rows(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in lines}) == len(lines), "a row was written twice"
    return {row["id"]: row for row in lines}


@torch.no_grad()
def expected(target: Target, turns: Conversation, most: int) -> tuple[list[dict[str, str]], str]:
    """The dialogue by greedy steps of the whole model, one conversation at a time."""
    history: list[dict[str, str]] = []
    for message in turns.messages:
        if message.role == "assistant":
            continue
        history.append({"role": message.role, "content": message.content})
        if message.role != "user":
            continue
        text = target.tokenizer.apply_chat_template(history, add_generation_prompt=True)
        ids = target.tokenizer(text)["input_ids"]
        answer: list[int] = []
        while len(answer) < most and not (answer and answer[-1] in STOPS):
            logits = target._model(input_ids=torch.tensor([ids + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
        stopped = answer[-1] in STOPS
        content = target.tokenizer.decode(answer[:-1] if stopped else answer)
        if not content:
            while history and history[-1]["role"] != "assistant":
                history.pop()
            return history, "stop"
        history.append({"role": "assistant", "content": content})
        if not stopped:
            return history, "length"
    return history, "stop"


def test_answers_are_the_targets_own(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    done = run(target, out)
    found = rows(out)
    wanted = {c.id: expected(target, c, 8) for c in CONVERSATIONS}
    wanted = {name: pair for name, pair in wanted.items() if pair[0]}
    assert found.keys() == wanted.keys()
    for name, (messages, reason) in wanted.items():
        assert found[name] == {"id": name, "messages": messages, "finish_reason": reason}
    reasons = [reason for _, reason in wanted.values()]
    assert {"stop", "length"} == set(reasons), "the fixture no longer shows both ends"
    assert done.written == len(wanted)
    assert done.cut == reasons.count("length")
    answers = [m["content"] for ms, _ in wanted.values() for m in ms if m["role"] == "assistant"]
    numbers = {sum(m["role"] == "assistant" for m in ms) for ms, _ in wanted.values()}
    assert numbers == {1, 2, 3}, "the fixture no longer shows answers after answers"
    # Beside the answers only stop tokens: one each, those of empty answers included.
    beside = done.new_tokens - sum(len(target.tokenizer(a)["input_ids"]) for a in answers)
    assert beside == len(answers) - done.cut + done.too_long


def test_batches_do_not_change_answers(target: Target, tmp_path: Path) -> None:
    for size in (1, 3, 64):
        run(target, tmp_path / f"{size}", batch_size=size)
    assert rows(tmp_path / "1") == rows(tmp_path / "3") == rows(tmp_path / "64")


def test_what_was_written_can_be_read_and_trained_on(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = run(target, out)
    reading = read_conversations([out])
    assert len(reading.conversations) == done.written
    assert not reading.rejects


def test_a_second_call_goes_on_where_the_first_ended(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.jsonl"
    run(target, whole)
    part = tmp_path / "part.jsonl"
    plain = module._append_answer
    calls = 0

    def dies(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise KeyboardInterrupt
        plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_append_answer", dies)
        with pytest.raises(KeyboardInterrupt):
            run(target, part)
    kept = part.read_text()
    assert 0 < len(rows(part)) < len(rows(whole))
    done = run(target, part)
    assert part.read_text().startswith(kept)
    assert rows(part) == rows(whole)
    assert done.written == len(rows(whole)) - len(kept.splitlines())
    assert run(target, part, conversations=CONVERSATIONS[:1]).written == 0


@pytest.mark.parametrize("damage", ["half a line", "no line end"])
def test_the_end_of_a_crashed_file_is_repaired(target: Target, tmp_path: Path, damage: str) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run(target, whole)
    lines = whole.read_text().splitlines(keepends=True)
    text = "".join(lines[:3])
    part.write_text(text + lines[3][:15] if damage == "half a line" else text.rstrip("\n"))
    run(target, part)
    assert rows(part) == rows(whole)


@pytest.mark.parametrize("text", ["half", "{}\n", "[1]\n", '{"id": 1}\nnonsense\n{"id": 2}\n'])
def test_another_file_is_not_touched(target: Target, tmp_path: Path, text: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(DataError, match="not a line of an earlier regeneration"):
        run(target, out)
    assert out.read_text() == text


def test_a_long_prompt_ends_the_dialogue_before_it(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    conversations = [
        conversation("never", "u:" + "A" * 30, "a:old"),
        # The first prompt of "more2" is answered, then the second question is too long.
        conversation("later", "u:" + "Z" * 2, "a:old", "u:" + "B" * 30, "a:old"),
    ]
    reference, reason = expected(target, conversations[1], 8)
    assert reason == "stop", "the fixture's first answer must end by itself"
    done = run(target, out, conversations=conversations, max_prompt_tokens=20)
    assert rows(out) == {
        "later": {"id": "later", "messages": reference[:2], "finish_reason": "stop"}
    }
    assert (done.written, done.too_long, done.cut) == (1, 2, 0)


def test_a_prompt_that_the_template_refuses_is_left_out(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TinyTokenizer.apply_chat_template

    def strict(self: TinyTokenizer, turns: list[dict[str, str]], **rest: Any) -> str:
        if turns[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return plain(self, turns, **rest)

    monkeypatch.setattr(TinyTokenizer, "apply_chat_template", strict)
    out = tmp_path / "out.jsonl"
    done = run(target, out)
    assert "many" not in rows(out)
    assert done.written > 0
    assert done.too_long >= 1


def test_nothing_answered_is_an_error(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversation got an answer"):
        run(target, tmp_path / "out.jsonl", max_prompt_tokens=2)


def test_an_empty_answer_drops_the_question(target: Target, tmp_path: Path) -> None:
    silent = build_target(stop=range(64))
    with pytest.raises(DataError, match="no conversation got an answer"):
        run(silent, tmp_path / "none.jsonl")
    out = tmp_path / "out.jsonl"
    chosen = [conversation("q", "u:A", "a:old", "u:B", "a:old")]
    dialogue = module._Dialogue("q", [{"role": "user", "content": "A"}] * 2)
    dialogue.done = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "X"},
        {"role": "user", "content": "B"},
    ]
    module._append_answer(dialogue, [STOPS[1]], target)
    assert dialogue.ended
    assert [turn["content"] for turn in dialogue.done] == ["A", "X"]
    assert dialogue.finish_reason == "stop"
    assert run(target, out, conversations=chosen).written == 1


def test_sampling_follows_the_seed(target: Target, tmp_path: Path) -> None:
    def texts(name: str, seed: int) -> list[str]:
        out = tmp_path / name
        run(target, out, temperature=1.0, seed=seed)
        return [row["messages"][-1]["content"] for row in rows(out).values()]

    assert texts("a", 1) == texts("b", 1)
    assert texts("c", 2) != texts("d", 3)


def test_progress_counts_prompts(target: Target, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run(target, tmp_path / "out.jsonl", progress=lambda n, total: seen.append((n, total)))
    assert seen[0][1] == len(CONVERSATIONS)
    assert all(0 < n <= total for n, total in seen)
    firsts = [n for n, total in seen if total == len(CONVERSATIONS)]
    assert firsts[-1] == len(CONVERSATIONS)
