"""Answers of conversations replaced by the target's own.

A drafter imitates the target, so it must be trained on what the target says, not on what the data set
says. Every assistant turn is generated anew in order, each with the new earlier turns as its history.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from draftline.data.conversations import Conversation
from draftline.decode.chain import ChainDecoder
from draftline.errors import DataError
from draftline.model.target import Target

log = logging.getLogger(__name__)

# Buffers are sized for a few prompt lengths, so that short prompts do not pay for long ones.
_PROMPT_SLOTS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(slots=True)
class _Dialogue:
    id: str
    remaining: list[Mapping[str, str]]
    done: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str = "stop"
    dropped: str | None = None

    @property
    def ended(self) -> bool:
        return self.finish_reason == "length" or not any(
            turn["role"] == "user" for turn in self.remaining
        )

    def drop(self, reason: str) -> None:
        """Ends here, with its last answer; what was asked after that stays unanswered."""
        self.dropped = reason
        self.remaining.clear()
        while self.done and self.done[-1]["role"] != "assistant":
            self.done.pop()

    def next_prompt(self) -> bool:
        """Moves turns up to the next user turn into the history; False when none is left."""
        while self.remaining:
            turn = dict(self.remaining.pop(0))
            if turn["role"] == "assistant":
                continue
            self.done.append(turn)
            if turn["role"] == "user" and (
                not self.remaining or self.remaining[0]["role"] == "assistant"
            ):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Regenerated:
    """Counts of one regeneration; the conversations themselves are in the file."""

    written: int
    cut: int
    too_long: int
    new_tokens: int


def regenerate(
    conversations: Sequence[Conversation],
    target: Target,
    out: Path,
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    template: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Regenerated:
    """Writes `{"id", "messages", "finish_reason"}` lines to `out` and returns the counts.

    `finish_reason` is "length" where the last answer was cut at `max_new_tokens`; such an answer is
    never continued, so its dialogue ends there. Prompts over `max_prompt_tokens` end a dialogue as
    well and are counted. A row is written as soon as its dialogue ends, so an interrupted call loses
    little: called again, it skips the ids that `out` already holds. Raises DataError when there is
    nothing to write.
    """
    present = _ids_in(out)
    dialogues = [
        _Dialogue(c.id, [{"role": m.role, "content": m.content} for m in c.messages])
        for c in conversations
        if c.id not in present
    ]
    tokenizer = target.tokenizer
    active = dialogues
    new_tokens = 0
    opened = 0  # every decoder draws its own noise
    written = 0
    if present:
        log.info(
            "%s already holds %d conversations, which are kept; move it away to start anew",
            out,
            len(present),
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
    except OSError as error:
        raise DataError(f"--out {out} cannot be written: {error.strerror}") from None
    while active:
        waiting: list[tuple[_Dialogue, list[int]]] = []
        ended = []
        for dialogue in active:
            if not dialogue.next_prompt():
                ended.append(dialogue)
                continue
            try:
                text = tokenizer.apply_chat_template(
                    dialogue.done, tokenize=False, add_generation_prompt=True, **(template or {})
                )
            except (TemplateError, TypeError, ValueError) as error:
                dialogue.drop(f"template error: {error}")
                ended.append(dialogue)
                continue
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > max_prompt_tokens:
                dialogue.drop("prompt too long")
                ended.append(dialogue)
            else:
                waiting.append((dialogue, ids))
        written += _write(ended, out)
        waiting.sort(key=lambda item: len(item[1]))
        answered = 0
        for slots, group in _by_slots(waiting, max_prompt_tokens):
            with ChainDecoder(
                target,
                None,
                rows=min(batch_size, len(group)),
                slots=slots + max_new_tokens + 1,
                temperature=temperature,
                seed=seed + opened,
            ) as decoder:
                opened += 1
                for first in range(0, len(group), batch_size):
                    batch = group[first : first + batch_size]
                    decoded = decoder.decode([ids for _, ids in batch], max_new_tokens)
                    new_tokens += decoded.new_tokens
                    for (dialogue, _), tokens in zip(batch, decoded.tokens, strict=True):
                        _append_answer(dialogue, tokens, target)
                    written += _write([d for d, _ in batch if d.ended], out)
                    answered += len(batch)
                    progress(answered, len(waiting))
        active = [d for d, _ in waiting if not d.ended]
    if not written and not present:
        raise DataError("no conversation got an answer: every prompt was too long or empty")
    return Regenerated(
        written=written,
        cut=sum(d.finish_reason == "length" for d in dialogues),
        too_long=sum(d.dropped is not None for d in dialogues),
        new_tokens=new_tokens,
    )


def _by_slots(
    waiting: list[tuple[_Dialogue, list[int]]], most: int
) -> list[tuple[int, list[tuple[_Dialogue, list[int]]]]]:
    groups: dict[int, list[tuple[_Dialogue, list[int]]]] = {}
    for item in waiting:
        fitting = next((s for s in _PROMPT_SLOTS if s >= len(item[1])), most)
        groups.setdefault(fitting, []).append(item)
    return sorted(groups.items())


def _append_answer(dialogue: _Dialogue, tokens: list[int], target: Target) -> None:
    stopped = bool(tokens) and tokens[-1] in target.stop_ids
    text = target.tokenizer.decode(tokens[:-1] if stopped else tokens)
    if not text.strip():
        dialogue.drop("empty answer")
        return
    dialogue.finish_reason = "stop" if stopped else "length"
    dialogue.done.append({"role": "assistant", "content": text})


def _ids_in(out: Path) -> set[str]:
    """Ids of the rows in `out`, and `out` ready to be appended to.

    A crash or a full disk can leave half a line at the end; it goes, its dialogue is answered anew.
    """
    if not out.exists():
        return set()
    found = set()
    whole = 0
    with out.open("r+b") as file:
        for number, line in enumerate(file, 1):
            ended = line.endswith(b"\n")
            try:
                found.add(str(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError):
                if ended or number == 1:
                    raise DataError(
                        f"{out}:{number} is not a line of an earlier regeneration; move the file away"
                    ) from None
                file.truncate(whole)
                break
            whole += len(line)
            if not ended:
                file.write(b"\n")
    return found


def _write(dialogues: Sequence[_Dialogue], out: Path) -> int:
    written = 0
    with out.open("a", encoding="utf-8") as file:
        for dialogue in dialogues:
            if not any(turn["role"] == "assistant" for turn in dialogue.done):
                continue
            row = {
                "id": dialogue.id,
                "messages": dialogue.done,
                "finish_reason": dialogue.finish_reason,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
    return written
