"""Answers and rows as ids: what a row says of them, and what must agree before they are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftline.data.messages import Message
from draftline.data.rows import BadRow
from draftline.errors import DataError

_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
_IGNORED_LABEL = -100
# Ids are kept as int32; no vocabulary comes near.
_MOST = 2**31


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer of the target: `messages[turn]` as the ids it was given and the ids it gave.

    `complete` says that `answer_ids` end with the token with which the target stopped.
    """

    turn: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that was tokenised elsewhere: ids, and which of them the target says."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class IdReader:
    """Reads lists of ids; equal numbers share one object, so that a token costs a pointer."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def ids(self, given: object, where: str) -> tuple[int, ...]:
        """A list of ints from 0 on; raises BadRow."""
        if not isinstance(given, list) or not given:
            raise BadRow("bad_ids", f"{where} is no list of token ids")
        if any(type(i) is not int for i in given) or not 0 <= min(given) <= max(given) < _MOST:
            wrong = next(i for i in given if type(i) is not int or not 0 <= i < _MOST)
            raise BadRow(
                "bad_ids", f"{where} holds {wrong!a:.40}; a token id is a number from 0 on"
            )
        return tuple(map(self._known.setdefault, given, given))

    def generated(
        self, row: Mapping[str, Any], messages: Sequence[Message]
    ) -> tuple[Generated, ...]:
        """The row's answers as ids, in the order of their turns; raises BadRow."""
        given = row["generated"]
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise BadRow("bad_generated", "generated is a list of objects")
        answers: list[Generated] = []
        for n, one in enumerate(given):
            where, turn = f"generated[{n}]", one.get("turn")
            if type(turn) is not int or not 0 <= turn < len(messages):
                raise BadRow("bad_generated", f"{where} is of turn {turn!a} of {len(messages)}")
            if messages[turn].role != "assistant":
                raise BadRow("bad_generated", f"{where}: turn {turn} is a {messages[turn].role}'s")
            if answers and turn <= answers[-1].turn:
                raise BadRow("bad_generated", f"{where}: turn {turn} follows {answers[-1].turn}")
            prompt = self.ids(one.get("prompt_ids"), f"{where}.prompt_ids")
            answer = self.ids(one.get("answer_ids"), f"{where}.answer_ids")
            whole = one.get("finish_reason") != "length"
            answers.append(Generated(turn, prompt, answer, whole))
        return tuple(answers)

    def token_row(self, row: Mapping[str, Any]) -> TokenRow:
        """A row of `input_ids` with `loss_mask` or `labels`; padding is left away; raises BadRow."""
        ids = self.ids(row["input_ids"], "input_ids")
        keys = [key for key in (*_MASKS, "labels") if isinstance(row.get(key), list)]
        if not keys:
            raise BadRow(
                "no_loss_mask", "input_ids need loss_mask, or labels with -100, beside them"
            )
        masks = {key: _marked(ids, row[key], key) for key in keys}
        key, mask = next(iter(masks.items()))
        for other, marks in masks.items():
            if marks != mask:
                raise BadRow("two_masks", f"{key} and {other} mark different tokens; keep one")
        if (shown := row.get("attention_mask")) is not None:
            kept = [n for n, flag in enumerate(_flags(ids, shown, "attention_mask")) if flag]
            ids, mask = tuple(ids[n] for n in kept), tuple(mask[n] for n in kept)
        if not any(mask):
            raise BadRow("no_assistant_turn", f"{key} marks no token")
        return TokenRow(ids, mask)


def _marked(ids: Sequence[int], given: object, key: str) -> tuple[bool, ...]:
    """Which of `ids` the row's `key` marks as said, one of its masks or its labels."""
    if key != "labels":
        return _flags(ids, given, key)
    labels = _as_long(ids, given, key)
    bad = next((i for i, n in zip(labels, ids, strict=True) if i not in (n, -100)), None)
    if bad is not None:
        need = "each is its own token's id or -100, unshifted"
        raise BadRow("bad_ids", f"labels hold {bad!a:.40}; {need}")
    return tuple(label != _IGNORED_LABEL for label in labels)


def _flags(ids: Sequence[int], given: object, key: str) -> tuple[bool, ...]:
    flags = _as_long(ids, given, key)
    if not all(flag in (0, 1) for flag in flags):
        raise BadRow("bad_weight", f"{key} holds something else than 0 and 1")
    return tuple(map(bool, flags))


def _as_long(ids: Sequence[int], given: object, key: str) -> list[Any]:
    if not isinstance(given, list):
        raise BadRow("bad_ids", f"{key} is no list")
    if len(given) != len(ids):
        raise BadRow("bad_ids", f"{key} has {len(given)} entries for {len(ids)} ids")
    return given


def joined_rows(
    answers: Sequence[Generated],
) -> list[tuple[list[int], list[bool], int, bool]]:
    """Rows of ids, with what of them was said, the last turn in each, and whether it is complete.

    A turn whose prompt begins with the row before it goes on with that row.
    """
    rows: list[tuple[list[int], list[bool], int, bool]] = []
    for answer in answers:
        prompt, said = answer.prompt_ids, answer.answer_ids
        ids: list[int] = []
        mask: list[bool] = []
        if rows and prompt[: len(rows[-1][0])] == tuple(rows[-1][0]):
            ids, mask, *_ = rows.pop()
        shown = prompt[len(ids) :]
        mask = [*mask, *[False] * len(shown), *[True] * len(said)]
        rows.append(([*ids, *shown, *said], mask, answer.turn, answer.complete))
    return rows


def template_sha256(chat_template: Any) -> str:
    """The first 16 hex digits of the template's SHA-256; of several named ones, of their JSON."""
    text = (
        chat_template
        if isinstance(chat_template, str)
        else json.dumps(chat_template, sort_keys=True)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normal_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Template arguments as they compare between a row and a run: JSON values, sorted by key."""
    normal: dict[str, Any] = json.loads(json.dumps(arguments or {}, sort_keys=True, default=str))
    return normal


def check_generators(
    generators: Iterable[tuple[str, Mapping[str, Any]]],
    chat_template: Any,
    arguments: Mapping[str, Any],
    vocab_size: int | None,
) -> None:
    """Raises DataError where answers were generated under other conditions than the run's.

    `generators` are pairs of the file and what it says of its generation.
    """
    for file, generator in generators:
        asked, run = normal_arguments(generator.get("template")), normal_arguments(arguments)
        # Null is how a template sees an argument that is not there.
        if _given(asked) != _given(run):
            raise DataError(
                f"{file}: its answers were generated with the template arguments {asked}, this run "
                f"has data.template={run}, under which the target is shown other prompts; set "
                f"data.template={json.dumps(asked)}, or regenerate the answers"
            )
        wrote, here = generator.get("template_sha256"), template_sha256(chat_template)
        if wrote is not None and wrote != here:
            raise DataError(
                f"{file}: its answers were generated under another chat template (SHA-256 {wrote}, "
                f"the target's is {here}); take the tokenizer they were generated with "
                f"({generator.get('target')}), or regenerate them"
            )
        size = generator.get("vocab_size")
        if None not in (size, vocab_size) and size != vocab_size:
            raise DataError(
                f"{file}: its answers are ids of a vocabulary of {size}, the target has {vocab_size}; "
                f"train against {generator.get('target')}, or regenerate the answers"
            )


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}
