"""Conversation files: every common format read into one, every row accounted for.

A file is JSON Lines, a JSON array of rows, or one JSON object, plain or gzipped. A row holds
`messages` [{role, content}] or `conversations` [{from, value}], in any mixture of those turn keys.
What is changed in a row that is kept is counted in `Reading.notes`:

* leading_turns_dropped: no user turn leads to them and many templates refuse them; system stays
* trailing_turns_dropped: with `need_answer`, turns after the last answer, which nothing answers
* turns_merged: neighbours of one role but tool are joined, as some templates want alternation
* tools_ignored: a tool list beside the turns; give one to the template instead
* id_made_unique: an id used before gets `#2`, `#3`, ...

Text stays as it is, with NUL, direction marks and literal special tokens: a user may type those.
Only a lone surrogate, which is no text, rejects its row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.data.generated import Generated
from draftline.errors import DataError
from draftline.runlog import write_atomic

_TURN_KEYS = ("messages", "conversations", "conversation")
_ROLE_OF = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "model", "bot", "function_call", "tool_call"), "assistant"
    ),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
# The target generates these too, so an answer read without them is not the target's answer.
_UNREAD_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning")
_BLANK = "\ufeff \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is system, user, assistant or tool.

    `trained` is False where the row says that the turn is history only.
    """

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    trained: bool = True

    def to_template(self, arguments_as_text: bool = False) -> dict[str, Any]:
        """The turn as a chat template takes it; arguments of calls are objects unless asked."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        for key in ("reasoning_content", "name", "tool_call_id"):
            if value := getattr(self, key):
                turn[key] = value
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments
                        if arguments_as_text
                        else json.loads(call.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under an id of their own; `origin` is file:line, in a JSON array file:row from 1.

    `complete` is False where the row's finish_reason is "length": nothing ends its last answer.
    `generated` holds the answers that the target gave as ids, in order, and `generator` how it was
    asked. `tools` is the JSON text of the list given to the template, empty where there is none.
    """

    id: str
    messages: tuple[Message, ...]
    origin: str
    complete: bool = True
    generated: tuple[Generated, ...] = ()
    generator: Mapping[str, Any] | None = None
    tools: str = ""


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


class _BadRow(ValueError):
    """Why a row is not used: its args are the reason and the detail of the Reject."""


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
    origins: dict[tuple[Message, ...], str] = {}
    copies: dict[str, int] = {}
    for path in paths:
        for line, row in _rows(path):
            given = row.get("id") if isinstance(row, dict) else None
            name = stem = f"{path.name}:{line}" if given in (None, "") else str(given)
            try:
                messages, seen = _conversation(row, need_answer)
                _check_unicode(name, "id")
                if messages in origins:
                    raise _BadRow("duplicate", f"same turns as {origins[messages]}")
            except _BadRow as bad:
                rejects.append(Reject(str(path), line, name, *bad.args))
                continue
            while name in copies:
                copies[stem] += 1
                name = f"{stem}#{copies[stem]}"
                seen.add("id_made_unique")
            copies[name] = 1
            origins[messages] = f"{path}:{line}"
            notes.update(seen)
            assert isinstance(row, dict), "anything else is a bad row"
            whole = row.get("finish_reason") != "length"
            kept.append(Conversation(name, messages, origins[messages], whole))
    if not kept:
        raise DataError(
            f"no usable conversation in {', '.join(map(str, paths))}: {describe_rejects(rejects)}. "
            "A row needs `messages` [{role, content}] or `conversations` [{from, value}] with a "
            f"user turn{' and an answer' * need_answer}"
        )
    return Reading(tuple(kept), tuple(rejects), len(kept) + len(rejects), dict(notes))


def describe_rejects(rejects: Sequence[Reject]) -> str:
    """The rejects in one line: how many for which reason, and the first three in detail."""
    counts = Counter(reject.reason for reject in rejects).most_common()
    shown = "; ".join(f"{r.file}:{r.line} {r.reason} ({r.detail})" for r in rejects[:3])
    return f"{len(rejects)} rejected {dict(counts)}, first {shown}"


def write_rejects(rejects: Sequence[Reject], path: Path) -> None:
    """Writes one JSON object a line, with the fields of `Reject`, replacing the file."""
    text = "".join(json.dumps(asdict(reject), ensure_ascii=False) + "\n" for reject in rejects)
    # A rejected id may hold a lone surrogate; its backslash form is the JSON escape for it.
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """Every row with its number: the line, or the place in a JSON array; no JSON is a _BadRow."""
    text = _text(path)
    # Not splitlines(): it also splits at U+2028 and others that JSON allows inside a string.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip(_BLANK)]
    if not lines:
        raise DataError(f"{path} is empty; check that the step which was to write it finished")
    first = _parse(lines[0][1])
    if isinstance(first, _BadRow) or (isinstance(first, list) and len(lines) == 1):
        document = _parse(text)
        if not isinstance(document, _BadRow):
            yield from enumerate(document if isinstance(document, list) else [document], 1)
            return
        if not any(isinstance(_parse(line), dict) for _, line in lines):
            raise DataError(
                f"{path} is neither JSON Lines nor one JSON document ({document.args[1]}); "
                f"it begins {text[:30]!a}, likely cut off or another format. Write JSON Lines"
            )
    for number, line in lines:
        row = _parse(line)
        if isinstance(row, _BadRow) and line is lines[-1][1] and not text.endswith("\n"):
            row = _BadRow("truncated_line", f"the last line is cut off: {row.args[1]}")
        yield number, row


def _text(path: Path) -> str:
    """The file's text, unzipped; raises DataError that says what was found instead."""
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        seen = f"is not UTF-8 ({at}), it begins {raw[:8]!r}; likely another format: convert it"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        seen = f"is a damaged gzip file of {len(raw)} bytes: {error}; likely cut off. Copy it again"
    except IsADirectoryError:
        seen = f"is a directory; give the files in it, for example with {path / '*.jsonl'}"
    except OSError as error:
        seen = f"cannot be read: {error.strerror}; check the path, seen from {Path.cwd()}"
    raise DataError(f"{path} {seen}") from None


def _parse(text: str) -> object:
    try:
        return json.loads(text.strip(_BLANK))
    except (ValueError, RecursionError) as error:
        return _BadRow("not_json", str(error))


def _conversation(row: object, need_answer: bool) -> tuple[tuple[Message, ...], set[str]]:
    """The messages that a row stands for and the notes on it; raises _BadRow."""
    if isinstance(row, _BadRow):
        raise row
    if not isinstance(row, dict):
        raise _BadRow("not_object", f"a row is an object, this is a {type(row).__name__}")
    lists = [row[key] for key in _TURN_KEYS if isinstance(row.get(key), list)]
    if not lists:
        raise _BadRow("no_messages", f"no list of turns, the keys are {', '.join(map(ascii, row))}")
    if not any(lists):
        raise _BadRow("empty_conversation", "the list of turns is empty")
    messages, *others = [[_message(n, turn) for n, turn in enumerate(turns)] for turns in lists]
    if any(other != messages for other in others):
        raise _BadRow("two_schemas", "messages and conversations hold different turns")
    if isinstance(system := row.get("system"), str) and system.strip():
        instruction = _message("system", {"role": "system", "content": system})
        if messages[0] != instruction:
            messages.insert(0, instruction)
    kept, notes = _trim(messages, need_answer)
    return kept, notes | ({"tools_ignored"} if row.get("tools") else set())


def _message(name: object, turn: object) -> Message:
    where = f"turn {name}"
    if not isinstance(turn, dict):
        raise _BadRow("turn_not_object", f"{where} is a {type(turn).__name__}")
    alias = turn.get("role", turn.get("from"))
    role = _ROLE_OF.get(alias.strip().lower()) if isinstance(alias, str) else None
    if role is None:
        raise _BadRow("unknown_role", f"{where} has the role {alias!a}")
    for field in _UNREAD_FIELDS:
        if turn.get(field):
            raise _BadRow("unsupported_field", f"{where} has {field}; write it into the content")
    content = turn.get("content", turn.get("value"))
    parts = content if isinstance(content, list) else [content]
    text = "".join(_part(part, where) for part in parts if part is not None)
    # A tool may return nothing and a system turn may ask for no default prompt.
    if role in ("user", "assistant") and not text.strip():
        raise _BadRow("empty_turn", f"{where} ({role}) has no text")
    _check_unicode(text, where)
    return Message(role, text)


def _part(part: object, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text":
        part = part.get("text", part.get("value"))
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise _BadRow("not_text", f"{where} holds {kind!a}, only text is read")


def _trim(messages: list[Message], need_answer: bool) -> tuple[tuple[Message, ...], set[str]]:
    """The turns that are kept, neighbours of one role joined by a blank line; raises _BadRow."""
    notes = set()
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise _BadRow("no_user_turn", f"the roles are {', '.join(sorted(set(roles)))}")
    first, end = roles.index("user"), len(roles)
    if need_answer:
        if "assistant" not in roles[first:]:
            raise _BadRow("no_assistant_turn", "no assistant turn follows a user turn")
        end -= roles[::-1].index("assistant")
    if end < len(roles):
        notes.add("trailing_turns_dropped")
    lead = [message for message in messages[:first] if message.role == "system"]
    if len(lead) < first:
        notes.add("leading_turns_dropped")
    merged: list[Message] = []
    for message in [*lead, *messages[first:end]]:
        if merged and message.role == merged[-1].role != "tool":
            notes.add("turns_merged")
            merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}")
        else:
            merged.append(message)
    return tuple(merged), notes


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow("bad_unicode", f"{where} has a lone {text[error.start]!a}") from None
