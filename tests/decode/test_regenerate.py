"""Every answer becomes the target's own, each with the new answers before it as its history."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.data.conversations import Conversation, Message, read_conversations
from draftline.data.generated import template_sha256
from draftline.decode.answer_file import AnswerFile
from draftline.decode.dialogue import Dialogue
from draftline.decode.progress import Progress
from draftline.decode.regenerate import Regenerated, regenerate
from draftline.decode.request import Request
from draftline.decode.sampling import Sampling
from draftline.errors import DataError
from draftline.model.target.target import Target
from tests.support.tiny import TinyTokenizer, build_target, refuse_system_turns

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
    """One call: names of `Sampling` and `Request` go there, the others to `regenerate`."""
    values: dict[str, Any] = {"max_prompt_tokens": 100, "batch_size": 4}
    sampling = {
        k: changes.pop(k) for k in ("temperatures", "top_p", "top_k", "seed") if k in changes
    }
    asked = {"target": "tiny", "max_new_tokens": 8}
    asked |= {
        k: changes.pop(k) for k in ("target_name", "template", "max_new_tokens") if k in changes
    }
    if "target_name" in asked:
        asked["target"] = asked.pop("target_name")
    conversations = changes.pop("conversations", CONVERSATIONS)
    with AnswerFile(out) as answers:
        request = Request(**asked, sampling=Sampling(**sampling))
        return regenerate(conversations, target, answers, request, **(values | changes))


def rows(out: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in lines}) == len(lines), "a row was written twice"
    return {row["id"]: row for row in lines}


@torch.no_grad()
def expected(
    target: Target, turns: Conversation, most: int
) -> tuple[list[dict[str, str]], str, list[dict[str, Any]]]:
    """The dialogue by greedy steps of the whole model, one conversation at a time."""
    history: list[dict[str, str]] = []
    generated: list[dict[str, Any]] = []
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
            return history, "stop", generated
        reason = "stop" if stopped else "length"
        generated.append(
            {
                "turn": len(history),
                "prompt_ids": ids,
                "answer_ids": answer,
                "finish_reason": reason,
            }
        )
        history.append({"role": "assistant", "content": content})
        if not stopped:
            break
    return history, generated[-1]["finish_reason"], generated


def test_answers_are_the_targets_own(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    done = run(target, out)
    found = rows(out)
    wanted = {c.id: expected(target, c, 8) for c in CONVERSATIONS}
    wanted = {name: triple for name, triple in wanted.items() if triple[2]}
    assert found.keys() == wanted.keys()
    for name, (messages, reason, generated) in wanted.items():
        assert found[name] == {
            "id": name,
            "messages": messages,
            "finish_reason": reason,
            "generated": generated,
            "generator": {
                "target": "tiny",
                "vocab_size": 64,
                "template_sha256": template_sha256("{{ messages }}"),
                "template": {},
                "date": None,
                "temperature": 0.0,
                "top_p": None,
                "top_k": None,
                "seed": 0,
                "max_new_tokens": 8,
            },
        }
    reasons = [reason for _, reason, _ in wanted.values()]
    assert {"stop", "length"} == set(reasons), "the fixture no longer shows both ends"
    assert done.written == len(wanted)
    assert done.cut == reasons.count("length")
    numbers = {len(generated) for _, _, generated in wanted.values()}
    assert numbers == {1, 2, 3}, "the fixture no longer shows answers after answers"
    empty = done.dropped["empty answer"]
    ids = sum(len(g["answer_ids"]) for _, _, generated in wanted.values() for g in generated)
    assert done.new_tokens == ids + empty
    assert sum(done.dropped.values()) == empty


def test_a_prompt_with_a_token_beyond_the_embedding_is_left_out_by_name(tmp_path: Path) -> None:
    wide = build_target(stop=STOPS)
    wide.tokenizer = TinyTokenizer(wide.embedding.shape[0] + 6)
    asked = [conversation("beyond", "u:Ay"), conversation("good", "u:A")]
    done = run(wide, tmp_path / "out.jsonl", conversations=asked)
    assert done.dropped == {"token beyond the target's embedding": 1}
    assert set(rows(tmp_path / "out.jsonl")) == {"good"}


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


class Dies:
    """Stands for Ctrl-C after some answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.calls = 0
        plain = Dialogue.answer

        def answer(dialogue: Dialogue, *rest: Any) -> None:
            self.calls += 1
            if self.calls > after:
                raise KeyboardInterrupt
            plain(dialogue, *rest)

        monkeypatch.setattr(Dialogue, "answer", answer)


SAMPLED = {"temperatures": (0.0, 0.7, 1.5), "top_p": 0.9, "top_k": 20, "seed": 3}


@pytest.mark.parametrize("after", [1, 6, 11, 19, 25])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_second_call_goes_on_where_the_first_ended(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    settings: dict[str, Any],
) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run(target, whole, **settings)
    with monkeypatch.context() as patch:
        Dies(patch, after)
        with pytest.raises(KeyboardInterrupt):
            run(target, part, **settings)
    kept = part.read_text() if part.exists() else ""
    assert len(kept.splitlines()) < len(rows(whole))
    done = run(target, part, **settings)
    assert part.read_text().startswith(kept)
    assert rows(part) == rows(whole)
    assert done.written == len(rows(whole)) - len(kept.splitlines())
    assert run(target, part, conversations=CONVERSATIONS[:1], **settings).written == 0


def test_a_continued_call_does_not_repeat_the_noise_for_other_rows(
    target: Target, tmp_path: Path
) -> None:
    """The same prompt everywhere: answers are equal only where their noise is."""
    same = [conversation(f"s{i}", "u:SAME") for i in range(8)]
    out = tmp_path / "out.jsonl"
    settings = {"temperatures": (3.0,), "batch_size": 4, "max_new_tokens": 20}
    run(target, out, conversations=same[:4], **settings)
    run(target, out, conversations=same, **settings)
    answers = [tuple(row["generated"][0]["answer_ids"]) for row in rows(out).values()]
    longer = [a for a in answers if len(a) > 2]
    assert len(longer) >= 3, "the fixture no longer has answers long enough to differ by chance"
    assert len(set(longer)) == len(longer)


def test_a_dialogue_is_written_before_later_parts_begin(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted call loses one part's unfinished dialogues, not every second turn."""
    many = [
        conversation(f"m{i}", f"u:{'ABCDEFGH'[i % 8]}", "a:x", "u:HI", "a:x") for i in range(80)
    ]
    out = tmp_path / "out.jsonl"
    Dies(monkeypatch, 70)  # a part has 32 batches of 1, so at most 64 answers
    with pytest.raises(KeyboardInterrupt):
        run(target, out, conversations=many, batch_size=1)
    ids = [int(name[1:]) for name in rows(out)]
    assert {i for i in ids if i < 32}
    assert sum(row["messages"][-2]["content"] == "HI" for row in rows(out).values()) > 0


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
    reference, reason, ids = expected(target, conversations[1], 8)
    assert reason == "stop", "the fixture's first answer must end by itself"
    done = run(target, out, conversations=conversations, max_prompt_tokens=20)
    assert rows(out).keys() == {"later"}
    row = rows(out)["later"]
    assert (row["messages"], row["generated"], row["finish_reason"]) == (
        reference[:2],
        ids[:1],
        "stop",
    )
    assert (done.written, done.dropped, done.cut) == (1, {"prompt too long": 2}, 0)


def test_answers_stay_inside_the_targets_positions(target: Target, tmp_path: Path) -> None:
    """The tiny target has 512: more would be asked of positions that it never saw."""
    fits, over = conversation("fits", "u:" + "A" * 20), conversation("over", "u:" + "A" * 21)
    choices = Choices()
    settings = {"conversations": [fits, over], "max_new_tokens": 512 - 24, "choices": choices}
    done = run(target, tmp_path / "out.jsonl", **settings)
    assert rows(tmp_path / "out.jsonl").keys() == {"fits"}
    assert done.dropped == {"prompt too long": 1}
    assert [(c.what, c.got) for c in choices.entries] == [("max_prompt_tokens", "24")]
    with pytest.raises(DataError, match=r"max_new_tokens=512 leaves no room.*512 positions"):
        run(target, tmp_path / "none.jsonl", max_new_tokens=512)


def test_a_prompt_that_the_template_refuses_is_left_out(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_system_turns(monkeypatch)
    out = tmp_path / "out.jsonl"
    done = run(target, out)
    assert "many" not in rows(out)
    assert done.written > 0
    assert done.dropped["template error: System role not supported"] == 1


def test_nothing_answered_is_an_error_that_says_why(target: Target, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"no conversation got an answer: {len(CONVERSATIONS)} x prompt too long"
    ):
        run(target, tmp_path / "out.jsonl", max_prompt_tokens=2)
    silent = build_target(stop=range(64))
    with pytest.raises(
        DataError, match=f"no conversation got an answer: {len(CONVERSATIONS)} x empty answer"
    ):
        run(silent, tmp_path / "none.jsonl")


def test_temperatures_are_spread_over_conversations_and_recorded(
    target: Target, tmp_path: Path
) -> None:
    many = [conversation(f"c{i}", f"u:{'ABCDEFGH'[i % 8] * (1 + i // 8)}") for i in range(60)]
    out = tmp_path / "out.jsonl"
    run(target, out, conversations=many, **SAMPLED)
    found = {name: row["generator"] for name, row in rows(out).items()}
    by_temperature = {
        t: {n for n, g in found.items() if g["temperature"] == t} for t in SAMPLED["temperatures"]
    }
    assert all(len(names) > 8 for names in by_temperature.values())
    assert all((g["top_p"], g["top_k"], g["seed"]) == (0.9, 20, 3) for g in found.values())
    # A row's temperature is its own, whatever else is in the call.
    names = sorted(found)[20:30]
    alone = tmp_path / "alone.jsonl"
    run(target, alone, conversations=[c for c in many if c.id in names], **SAMPLED)
    shared = rows(alone).keys() & found.keys()
    assert len(shared) > 3
    assert all(rows(alone)[name]["generator"] == found[name] for name in shared)
    greedy = tmp_path / "greedy.jsonl"
    run(target, greedy, conversations=many)
    plain = rows(greedy)
    for name in by_temperature[0.0]:
        assert rows(out)[name]["generated"] == plain[name]["generated"]
    changed = [n for n in by_temperature[1.5] & plain.keys()
               if rows(out)[n]["generated"] != plain[n]["generated"]]  # fmt: skip
    assert changed


def test_sampling_follows_the_seed(target: Target, tmp_path: Path) -> None:
    def texts(name: str, seed: int) -> list[str]:
        out = tmp_path / name
        run(target, out, temperatures=(1.0,), seed=seed)
        return [row["messages"][-1]["content"] for row in rows(out).values()]

    assert texts("a", 1) == texts("b", 1)
    assert texts("c", 2) != texts("d", 3)


def test_progress_follows_the_tokens_inside_a_batch_and_ends_at_the_total(
    target: Target, tmp_path: Path
) -> None:
    looks: list[int] = []
    progress = Progress(io.StringIO(), clock=lambda: 0.0)
    plain = progress.decoding

    def decoding(tokens: int) -> None:
        looks.append(tokens)
        plain(tokens)

    progress.decoding = decoding  # type: ignore[method-assign]
    out = tmp_path / "out.jsonl"
    done = run(target, out, progress=progress, batch_size=64)
    assert len(looks) > 12, "a batch is looked at while it is decoded"
    rising = sum(b > a for a, b in pairwise(looks))
    assert rising > len(looks) / 2
    line = progress.line()
    assert f"answering: {len(CONVERSATIONS)} of {len(CONVERSATIONS)} rows" in line
    asked = sum(len(row["generated"]) for row in rows(out).values())
    answers = asked + done.dropped["empty answer"]
    assert f"({answers} of {answers} answers), {done.new_tokens} tokens" in line
