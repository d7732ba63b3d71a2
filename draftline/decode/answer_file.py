"""The file that regenerated answers go to: one regeneration's rows, written by one call at a time."""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftline.amounts import counted
from draftline.data.conversations import Conversation
from draftline.data.generated import normal_arguments
from draftline.decode.dialogue import questions
from draftline.errors import ConfigError, DataError
from draftline.files import irregular

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    offset: int
    asked: str
    generator: Mapping[str, Any]


class AnswerFile:
    """`path`, locked and ready to be appended to while the context is open.

    What it holds is kept. Entering raises ConfigError for a path that is no regular file, one of
    `inputs`, or this command's own output; DataError where it holds anything but rows of a
    regeneration with token ids, or another call writes to it.
    """

    def __init__(self, path: Path, inputs: Sequence[Path] = ()) -> None:
        self.path = path
        self._inputs = inputs
        self._file: BinaryIO | None = None
        self._rows: dict[str, _Row] = {}
        self._made = False

    def __enter__(self) -> AnswerFile:
        _check_place(self.path, self._inputs)
        self._made = not self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise DataError(f"--out {self.path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._rows = _read(self.path, self._file)
        except BaseException:
            self._file.close()
            raise
        if self._rows:
            log.info(
                "%s already holds %s; move it away to start anew",
                self.path,
                counted(
                    len(self._rows), "conversation, which is kept", "conversations, which are kept"
                ),
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None, "entered"
        if self._made and not os.fstat(self._file.fileno()).st_size:
            self.path.resolve().unlink(missing_ok=True)  # nothing came of this call
        self._file.close()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, conversation: str) -> bool:
        return conversation in self._rows

    @property
    def date(self) -> str | None:
        """The date that the prompts of its rows have, where there is one."""
        dates = (row.generator.get("date") for row in self._rows.values())
        return next((str(date) for date in dates if date), None)

    def answers(self, conversation: str) -> list[list[int]]:
        """The ids of the answers that its row of `conversation` has, in order."""
        assert self._file is not None, "entered"
        self._file.seek(self._rows[conversation].offset)
        row = json.loads(self._file.readline())
        return [generated["answer_ids"] for generated in row["generated"]]

    def check_generator(self, wanted: Callable[[str], Mapping[str, Any]]) -> None:
        """Raises DataError where a row was not made as `wanted(id)` says, naming what differs.

        A row may have been made with more than `wanted` names.
        """
        for name, row in self._rows.items():
            for key, value in wanted(name).items():
                seen = row.generator.get(key)
                if not _same(key, seen, value):
                    raise DataError(
                        f"{self.path}:{row.line} was made with {key}={json.dumps(seen)}, this call "
                        f"has {key}={json.dumps(value)}: answers of both kinds in one file could "
                        "not be told apart; ask as before, or name another --out"
                    )

    def check_questions(self, conversations: Iterable[Conversation]) -> None:
        """Raises DataError where a row has the id of one of `conversations` and other turns."""
        for conversation in conversations:
            row = self._rows.get(conversation.id)
            if row is None:
                continue
            asked = questions([m.to_template() for m in conversation.messages])
            # A dialogue can have ended before its last turn.
            if row.asked not in {_digest(asked[:n]) for n in range(1, len(asked) + 1)}:
                raise DataError(
                    f"{self.path}:{row.line} answers other turns than {conversation.origin}, whose "
                    f"id {conversation.id} is the same; give the rows ids of their own, or name "
                    "another --out"
                )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Writes whole rows through to the system; returns how many."""
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        assert self._file is not None, "entered"
        self._file.write("".join(lines).encode())
        self._file.flush()
        return len(lines)

    def _lock(self) -> None:
        assert self._file is not None, "opened"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
                raise FileNotFoundError(errno.ENOENT, "removed by the call that made it")
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
                raise DataError(
                    f"--out {self.path} is being written by another call of draftline regenerate; "
                    "wait for it to end, or name another file"
                ) from None
            log.warning(
                "%s cannot be locked here (%s): do not start a second call that writes to it",
                self.path,
                error.strerror,
            )


def _check_place(path: Path, inputs: Sequence[Path]) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"--out {path} cannot be written: {error.strerror}") from None
    for other in inputs:
        if other.exists() and path.samefile(other):
            raise ConfigError(
                f"--out {path} is one of the files with the prompts; name another file"
            )
    for own in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(own)):
                raise ConfigError(
                    f"--out {path} is where this command prints to; name another file"
                )
    if kind := irregular(path):
        raise ConfigError(
            f"--out {path} is {kind}; name a regular file, which an interrupted call can continue"
        )


def _read(path: Path, file: BinaryIO) -> dict[str, _Row]:
    """The rows by id, with the end of the file repaired.

    A crash or a full disk can leave half a line at the end; it goes, its dialogue is answered anew.
    """
    rows: dict[str, _Row] = {}
    whole = 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        ended = line.endswith(b"\n")
        try:
            name, row = _row(number, whole, json.loads(line))
        except _Old:
            raise DataError(
                f"{path}:{number} is of an older draftline, which wrote text without token ids: "
                "such rows cannot be continued; move the file away, or name another --out"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            if ended or number == 1:
                raise DataError(
                    f"{path}:{number} is not a line of an earlier regeneration; move the file away"
                ) from None
            file.truncate(whole)
            break
        rows[name] = row
        whole += len(line)
        if not ended:
            file.write(b"\n")
            break
    return rows


class _Old(Exception):
    """A row that names no generated ids."""


def _row(line: int, offset: int, row: dict[str, Any]) -> tuple[str, _Row]:
    name, messages = str(row["id"]), row["messages"]
    if "generated" not in row and "finish_reason" in row:
        raise _Old
    if not row["generated"][0]["answer_ids"]:
        raise ValueError("an answer of no tokens")
    generator = dict(row["generator"])
    if date := generator.get("date"):
        datetime.date.fromisoformat(date)
    return name, _Row(line, offset, _digest(questions(messages)), generator)


def _digest(asked: Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _same(key: str, seen: Any, wanted: Any) -> bool:
    if key == "template":
        return normal_arguments(seen) == normal_arguments(wanted)
    if key == "target" and seen != wanted:
        with suppress(OSError, TypeError):
            return Path(seen).samefile(wanted)
    return bool(seen == wanted)
