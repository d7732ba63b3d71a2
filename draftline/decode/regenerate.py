"""Answers of conversations replaced by the target's own.

A drafter imitates the target, so it must be trained on what the target says, not on what the data
set says. Every answer is generated anew in order, each with the new earlier ones as its history, and
kept as the ids that the target was given and gave: text that is rendered again can come out as other
ids, or without the thinking.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from draftline.choices import Choices
from draftline.data.conversations import Conversation
from draftline.data.dates import pinned, writes_date
from draftline.data.generated import template_sha256
from draftline.decode.answer_file import AnswerFile
from draftline.decode.dialogue import Dialogue
from draftline.decode.progress import Progress
from draftline.decode.request import Request
from draftline.decode.session import DecodeSession
from draftline.errors import DataError
from draftline.model.target.target import Target

log = logging.getLogger(__name__)

# Buffers are sized for a few prompt lengths, so that short prompts do not pay for long ones.
_PROMPT_SLOTS = (64, 128, 256, 512, 1024, 2048, 4096)
# Conversations are taken this many batches at a time through all their turns: a row is written when
# its last answer is there, and an interrupted call loses no more than these.
_BATCHES_AT_ONCE = 32

Waiting = tuple[Dialogue, list[int]]


@dataclass(frozen=True, slots=True)
class Regenerated:
    """Counts of one regeneration; the conversations themselves are in the file.

    `cut` rows end with an answer of max_new_tokens tokens, after which `unasked` answers of their
    conversations were not asked for; `dropped` dialogues ended before their last turn for another
    reason, some of them without a row.
    """

    written: int
    cut: int
    unasked: int
    dropped: Mapping[str, int]
    new_tokens: int


def regenerate(
    conversations: Sequence[Conversation],
    target: Target,
    out: AnswerFile,
    request: Request,
    *,
    max_prompt_tokens: int,
    batch_size: int,
    choices: Choices | None = None,
    progress: Progress | None = None,
) -> Regenerated:
    """Appends one row per conversation to `out` (see docs/data.md) and returns the counts.

    `generated` has the ids of every answer with the token that stopped it, `generator` how the target
    was asked. An answer that is cut at max_new_tokens is never continued, so its dialogue ends there.
    Prompts over `max_prompt_tokens`, refused by the template or answered with nothing end a dialogue
    as well and are counted. A row is written as soon as its dialogue ends; conversations that `out`
    already holds are skipped, and the others get the answers of a call that nothing interrupted.
    Raises DataError when `out` was made in another way or there is nothing to write.
    """
    choices = choices or Choices()
    most_prompt = _room(target, request.max_new_tokens, max_prompt_tokens, choices)
    date = _date(target.tokenizer, request.template, out, choices)
    template = {**request.template} if date is None else pinned(request.template, date)
    fixed = {
        "vocab_size": target.vocab_size,
        "template_sha256": template_sha256(target.tokenizer.chat_template),
        "date": None if date is None else date.isoformat(),
    }

    def generator(conversation: str) -> dict[str, Any]:
        return {"target": request.target, **fixed, **request.facts(conversation)}

    out.check_generator(generator)
    out.check_questions(conversations)
    work = _Work(target, out, request, template, generator, most_prompt, batch_size, progress)
    at_once = batch_size * _BATCHES_AT_ONCE
    parts = [conversations[i : i + at_once] for i in range(0, len(conversations), at_once)]
    missing = [c for c in conversations if c.id not in out]
    if progress is not None and missing:
        progress.begin(
            rows=len(missing),
            answers=sum(Dialogue(c).asks() for c in missing),
            most_tokens=request.max_new_tokens,
        )
    for part in parts:
        if any(c.id not in out for c in part):
            work.do([Dialogue(c) for c in part])
    if not work.written and not len(out):
        why = ", ".join(f"{count} x {reason}" for reason, count in work.dropped.most_common())
        raise DataError(f"no conversation got an answer: {why or 'no turn asks for one'}")
    return Regenerated(work.written, work.cut, work.unasked, dict(work.dropped), work.new_tokens)


class _Work:
    """Dialogues on their way through all their turns, with the counts of what came of them."""

    def __init__(
        self,
        target: Target,
        out: AnswerFile,
        request: Request,
        template: Mapping[str, Any],
        generator: Callable[[str], Mapping[str, Any]],
        max_prompt_tokens: int,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        self._target, self._out, self._request = target, out, request
        self._template, self._generator = template, generator
        self._max_prompt_tokens, self._batch_size = max_prompt_tokens, batch_size
        self._progress = progress
        self.written = self.cut = self.unasked = self.new_tokens = 0
        self.dropped: Counter[str] = Counter()

    def do(self, active: list[Dialogue]) -> None:
        """Answers every turn of `active`.

        Those that the file already holds take part with the answers that they have there, so that
        the batches of a call that continues another are the same.
        """
        turn = 0
        while active:
            waiting = []
            for dialogue in active:
                asked = dialogue.asks()
                ids = self._prompt(dialogue)
                if ids is None:
                    self._end([dialogue], asked)
                else:
                    waiting.append((dialogue, ids))
            active = []
            for temperature, slots, group in self._groups(waiting):
                active += self._answer(turn, temperature, slots, group)
            turn += 1

    def _prompt(self, dialogue: Dialogue) -> list[int] | None:
        if not dialogue.next_prompt():
            return None
        ids = dialogue.prompt_ids(self._target.tokenizer, self._template)
        if ids is not None and len(ids) > self._max_prompt_tokens:
            dialogue.drop("prompt too long")
            return None
        if ids is not None and max(ids, default=0) >= self._target.embedding.shape[0]:
            dialogue.drop("token beyond the target's embedding")
            return None
        return ids

    def _groups(self, waiting: list[Waiting]) -> Iterator[tuple[float, int, list[Waiting]]]:
        """Dialogues of one temperature and size of buffers, the shortest prompts first."""
        groups: dict[tuple[int, float], list[Waiting]] = {}
        for dialogue, ids in sorted(waiting, key=lambda item: len(item[1])):
            slots = next((s for s in _PROMPT_SLOTS if s >= len(ids)), self._max_prompt_tokens)
            temperature = self._request.sampling.temperature_of(dialogue.id)
            groups.setdefault((slots, temperature), []).append((dialogue, ids))
        for (slots, temperature), group in sorted(groups.items(), key=lambda item: item[0]):
            yield temperature, slots, group

    def _answer(
        self, turn: int, temperature: float, slots: int, group: list[Waiting]
    ) -> list[Dialogue]:
        """Answers `group` batch by batch; returns the dialogues that go on.

        A batch is decoded when the file lacks one of its rows, and then as a whole: its answers are
        so those of a call that nothing interrupted, to the last bit and at every temperature.
        """
        size = self._batch_size
        batches = [group[i : i + size] for i in range(0, len(group), size)]
        sampling, most = self._request.sampling, self._request.max_new_tokens
        going_on: list[Dialogue] = []
        with ExitStack() as stack:
            decoder: DecodeSession | None = None
            for batch in batches:
                answers = [self._kept(dialogue) for dialogue, _ in batch]
                new = 0
                if None in answers:
                    decoder = decoder or stack.enter_context(
                        DecodeSession(
                            self._target,
                            None,
                            rows=min(size, len(group)),
                            slots=slots + most + 1,
                            temperature=temperature,
                            top_p=sampling.top_p,
                            top_k=sampling.top_k,
                        )
                    )
                    decoded = decoder.decode(
                        [ids for _, ids in batch],
                        most,
                        seed=sampling.noise_of(turn, (dialogue.id for dialogue, _ in batch)),
                        progress=self._decoding,
                    )
                    new = decoded.new_tokens
                    answers = [
                        tokens if kept is None else kept
                        for kept, tokens in zip(answers, decoded.tokens, strict=True)
                    ]
                going_on += self._settle(batch, answers, new)
        return going_on

    def _kept(self, dialogue: Dialogue) -> list[int] | None:
        """The answer that the file has for this turn, empty where its row ends before it; None where
        it has no row."""
        if dialogue.id not in self._out:
            return None
        answers = self._out.answers(dialogue.id)
        turn = len(dialogue.generated)
        return answers[turn] if turn < len(answers) else []

    def _settle(
        self, batch: list[Waiting], answers: Sequence[list[int] | None], new_tokens: int
    ) -> list[Dialogue]:
        """Gives the batch its answers and writes what has ended; returns what goes on."""
        self.new_tokens += new_tokens
        lost = asked = 0
        for (dialogue, ids), tokens in zip(batch, answers, strict=True):
            assert tokens is not None, "decoded or kept"
            left = dialogue.asks()
            dialogue.answer(ids, tokens, self._target.stop_ids, self._target.tokenizer)
            if dialogue.id not in self._out:
                asked += 1
                lost += left if dialogue.ended else 0
                self.unasked += left if dialogue.cut else 0
        if self._progress is not None:
            self._progress.settled(answers=asked, tokens=new_tokens)
        self._end([dialogue for dialogue, _ in batch if dialogue.ended], lost)
        return [dialogue for dialogue, _ in batch if not dialogue.ended]

    def _decoding(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress.decoding(tokens)

    def _end(self, dialogues: Sequence[Dialogue], lost: int) -> None:
        ended = [d for d in dialogues if d.id not in self._out]
        rows = [row for d in ended if (row := d.row(self._generator(d.id))) is not None]
        self.written += self._out.append(rows)
        self.cut += sum(row["finish_reason"] == "length" for row in rows)
        self.dropped.update(d.dropped for d in ended if d.dropped is not None)
        if self._progress is not None and ended:
            self._progress.settled(rows=len(ended), lost=lost)


def _room(target: Target, new: int, prompt: int, choices: Choices) -> int:
    """The longest prompt that leaves room for `new` tokens among the target's positions."""
    positions = getattr(target.text_config, "max_position_embeddings", None) or prompt + new
    if positions <= new:
        raise DataError(
            f"max_new_tokens={new} leaves no room for a prompt: the target has {positions} positions; "
            "lower it"
        )
    if positions - new < prompt:
        reason = f"the target has {positions} positions, and {new} are for new tokens"
        got = str(positions - new)
        choices.record("max_prompt_tokens", wanted=str(prompt), got=got, reason=reason)
    return min(prompt, positions - new)


def _date(
    tokenizer: Any, template: Mapping[str, Any], out: AnswerFile, choices: Choices
) -> datetime.date | None:
    """The day that the template writes, where it writes one: that of the rows in `out`, else today."""
    if not writes_date(tokenizer, template):
        return None
    kept = out.date
    date = datetime.date.today() if kept is None else datetime.date.fromisoformat(kept)
    choices.record(
        "date in the prompts",
        wanted="one for all rows",
        got=date.isoformat(),
        reason="the chat template writes the date; "
        + ("today" if kept is None else f"that of the rows in {out.path}"),
    )
    return date
