"""Conversation files: every common format read into one, every row accounted for.

A row holds `messages` [{role, content}] or `conversations` [{from, value}], in any mixture of those
turn keys, with `generated` ids beside them where a target wrote the answers; or `input_ids` with
`loss_mask` or `labels`; or a whole rendered conversation in `text`. What is changed in a row that is
kept, or not used of it, is counted in `Reading.notes` by the words of `NOTES`.

Text stays as it is, with NUL, direction marks and literal special tokens: a user may type those.
Only a lone surrogate, which is no text, rejects its row.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftline.data.generated import Generated, IdReader, TokenRow
from draftline.data.messages import (
    Message,
    ToolCall,
    check_unicode,
    read_flag,
    read_message,
    read_tools,
)
from draftline.data.rows import BadRow, rows_of
from draftline.data.turns import trim
from draftline.errors import DataError
from draftline.runlog import write_atomic

__all__ = [
    "NOTES",
    "Conversation",
    "Generated",
    "Message",
    "Reading",
    "Reject",
    "TokenRow",
    "ToolCall",
    "describe_rejects",
    "read_conversations",
    "write_rejects",
]

log = logging.getLogger(__name__)

NOTES = {
    "leading_turns_dropped": "no user turn leads to them and many templates refuse them",
    "trailing_turns_dropped": "nothing answers the turns after the last answer",
    "turns_merged": "neighbours of one role but tool are joined, as templates want alternation",
    "untrained_by_merge": "an answer to be learned was joined with one that is not, and is not",
    "id_made_unique": "an id used before gets #2, #3, ...",
    "prompt_weight_ignored": "only answers are learned, whatever the weight of other turns",
    "text_ignored": "the turns beside it are used",
    "turns_ignored": "the ids beside them are used, with their mask",
    "generator_unknown": "generated ids say nothing of their generator, so nothing is compared",
    "tools_ignored": "the chat template does not write the row's tools",
    "end_not_a_stop_token": "the template ends these answers with what the target does not stop "
    "with, so their end is not taught",
    "no_end_of_turn": "neither template nor tokenizer has a token that ends these answers",
    "bos_added": "the template begins with the token that their text lacks",
}

_TURN_KEYS = ("messages", "conversations", "conversation")
_MEDIA = {"images", "image", "videos", "audios"}
# A text without any such mark is no rendered conversation.
_MARKED = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under an id of their own; `origin` is file:line, in a JSON array file:row from 1.

    `complete` is False where the row's finish_reason is "length": nothing ends its last answer.
    `generated` holds the answers that the target gave as ids, in order, and `generator` how it was
    asked. `tools` is the JSON text of the list given to the template, "" where there is none, and
    `arguments` that of the row's own template arguments. A row of ids (`tokens`) or of rendered
    text (`text`) has no messages.
    """

    id: str
    messages: tuple[Message, ...]
    origin: str
    complete: bool = True
    generated: tuple[Generated, ...] = ()
    generator: Mapping[str, Any] | None = None
    tools: str = ""
    arguments: str = ""
    tokens: TokenRow | None = None
    text: str = ""

    def tokens_guessed(self, characters_a_token: int) -> int:
        """About how many tokens it has; exact where the row has ids."""
        if self.tokens is not None:
            return len(self.tokens.input_ids)
        if self.generated:
            return len(self.generated[-1].prompt_ids) + len(self.generated[-1].answer_ids)
        said = sum(len(m.content) + len(m.reasoning_content) for m in self.messages)
        return (len(self.text) + said) // characters_a_token


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that was not used: `reason` is a stable slug, `detail` says what was seen."""

    file: str
    line: int
    id: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything read: `rows` is always `len(conversations) + len(rejects)`."""

    conversations: tuple[Conversation, ...]
    rejects: tuple[Reject, ...]
    rows: int
    notes: Mapping[str, int]

    def counts(self) -> dict[str, int]:
        """Rejected rows by reason, the most frequent first."""
        return dict(Counter(reject.reason for reject in self.rejects).most_common())


def read_conversations(paths: Sequence[Path], *, need_answer: bool = True) -> Reading:
    """Every row of the files in order, as a conversation or as a reject with its reason.

    `need_answer=False` accepts prompts that no assistant turn follows (evaluation files). Of rows
    with the same turns the first is kept. Raises DataError for a file that cannot be read and when
    no row at all can be used.
    """
    if not paths:
        raise DataError("no conversation file was given; name at least one")
    kept: list[Conversation] = []
    rejects: list[Reject] = []
    notes: Counter[str] = Counter()
    origins: dict[object, str] = {}
    copies: dict[str, int] = {}
    reader = _Reader(need_answer)
    for path in paths:
        for line, row in rows_of(path):
            given = row.get("id") if isinstance(row, dict) else None
            name = stem = f"{path.name}:{line}" if given in (None, "") else str(given)
            try:
                conversation, seen = reader.read(row)
                check_unicode(name, "id")
                key = conversation.tokens or (
                    conversation.messages,
                    conversation.tools,
                    conversation.text,
                )
                if key in origins:
                    raise BadRow("duplicate", f"same turns as {origins[key]}")
            except BadRow as bad:
                rejects.append(Reject(str(path), line, name, *bad.args))
                continue
            while name in copies:
                copies[stem] += 1
                name = f"{stem}#{copies[stem]}"
                seen.add("id_made_unique")
            copies[name] = 1
            origins[key] = f"{path}:{line}"
            notes.update(seen)
            kept.append(replace(conversation, id=name, origin=origins[key]))
    if not kept:
        raise DataError(
            f"no usable conversation in {', '.join(map(str, paths))}: {describe_rejects(rejects)}. "
            "A row needs `messages` [{role, content}] or `conversations` [{from, value}] with a "
            f"user turn{' and an answer' * need_answer}"
        )
    _say_lost(paths, kept, rejects)
    return Reading(tuple(kept), tuple(rejects), len(kept) + len(rejects), dict(notes))


def _say_lost(
    paths: Sequence[Path], kept: Sequence[Conversation], rejects: Sequence[Reject]
) -> None:
    """Warns of each file of which nothing is used, and of the first line that is no JSON."""
    used = {conversation.origin.rpartition(":")[0] for conversation in kept}
    rejected: dict[str, list[Reject]] = {str(path): [] for path in paths}
    for reject in rejects:
        rejected[reject.file].append(reject)
    for path, lost in rejected.items():
        if lost and path not in used:
            log.warning("%s: none of its rows is used: %s", path, describe_rejects(lost))
        elif broken := [reject for reject in lost if reject.reason == "not_json"]:
            first, more = broken[0], len(broken) - 1
            others = f" ({more} more such lines)" if more else ""
            log.warning("%s:%d is no JSON: %s%s", path, first.line, first.detail, others)


def describe_rejects(rejects: Sequence[Reject]) -> str:
    """The rejects in one line: how many for which reason, and the first three in detail."""
    counts = Counter(reject.reason for reject in rejects).most_common()
    shown = "; ".join(f"{r.file}:{r.line} {r.reason} ({r.detail})" for r in rejects[:3])
    return f"{len(rejects)} rejected {dict(counts)}, first {shown}"


def write_rejects(rejects: Sequence[Reject], path: Path) -> None:
    """Writes one JSON object per line, with the fields of `Reject`, replacing the file."""
    text = "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejects)
    # A rejected id may hold a lone surrogate; its backslash form is the JSON escape for it.
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


class _Reader:
    """Rows to conversations; what many rows repeat (ids, tools, generators) is kept once."""

    def __init__(self, need_answer: bool) -> None:
        self._need_answer = need_answer
        self._ids = IdReader()
        self._texts: dict[str, str] = {}
        self._generators: dict[str, Mapping[str, Any]] = {}

    def read(self, row: object) -> tuple[Conversation, set[str]]:
        """A conversation that has no id and origin yet, and the notes on it; raises BadRow."""
        if isinstance(row, BadRow):
            raise row
        if not isinstance(row, dict):
            raise BadRow("not_object", f"a row is an object, this is a {type(row).__name__}")
        if self._need_answer and read_flag(row, "the row") is False:
            raise BadRow("not_trained", "the row has a weight of 0")
        if media := [key for key in _MEDIA & row.keys() if row[key]]:
            raise BadRow("not_text", f"the row has {media[0]}, only text is read")
        whole = row.get("finish_reason") != "length"
        if self._need_answer and isinstance(row.get("input_ids"), list):
            tokens = self._ids.token_row(row)
            beside = {"turns_ignored"} if any(row.get(key) for key in _TURN_KEYS) else set()
            return Conversation("", (), "", whole, tokens=tokens), beside
        lists = [row[key] for key in _TURN_KEYS if isinstance(row.get(key), list)]
        text = row["text"] if isinstance(row.get("text"), str) else ""
        marked = _MARKED.search(text) is not None
        if not lists:
            if self._need_answer and marked:
                check_unicode(text, "text")
                return Conversation("", (), "", whole, text=text), set()
            keys = ", ".join(map(ascii, row))
            raise BadRow("no_messages", f"no list of turns, the keys are {keys}")
        conversation, notes = self._of_turns(row, lists, whole)
        return conversation, notes | ({"text_ignored"} if marked else set())

    def _of_turns(
        self, row: dict[str, Any], lists: list[list[object]], whole: bool
    ) -> tuple[Conversation, set[str]]:
        if not any(lists):
            raise BadRow("empty_conversation", "the list of turns is empty")
        read = [[read_message(n, turn) for n, turn in enumerate(turns)] for turns in lists]
        messages, *others = [[message for message, _ in turns] for turns in read]
        if any(other != messages for other in others):
            raise BadRow("two_schemas", "messages and conversations hold different turns")
        notes = set().union(*(seen for _, seen in read[0]))
        tools = read_tools(row)
        arguments = row.get("chat_template_kwargs")
        said = json.dumps(arguments, sort_keys=True) if arguments else ""
        shared = (self._texts.setdefault(tools, tools), self._texts.setdefault(said, said))
        if self._need_answer and row.get("generated"):
            generated = self._ids.generated(row, messages)
            if not any(messages[answer.turn].trained for answer in generated):
                raise BadRow("not_trained", "every generated answer has a weight of 0")
            generator = row.get("generator")
            if isinstance(generator, dict):
                known = json.dumps(generator, sort_keys=True)
                generator = self._generators.setdefault(known, generator)
            else:
                notes.add("generator_unknown")
                generator = None
            return Conversation(
                "", tuple(messages), "", whole, generated, generator, *shared
            ), notes
        if isinstance(system := row.get("system"), str) and system.strip():
            instruction, _ = read_message("system", {"role": "system", "content": system})
            if messages[0] != instruction:
                messages.insert(0, instruction)
        kept, trimmed = trim(messages, self._need_answer)
        if self._need_answer and not any(m.role == "assistant" and m.trained for m in kept):
            raise BadRow("not_trained", "every answer has a weight of 0")
        return Conversation("", kept, "", whole, tools=shared[0], arguments=shared[1]), (
            notes | trimmed
        )
