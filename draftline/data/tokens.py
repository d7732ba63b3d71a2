"""Samples: rows of ids with a mask on what the target says.

A sample is what serving shows the target and then the target's answer. Where a row has the ids that
were generated they are taken as they are; a text is rendered (`data/answers.py`). A template may
change earlier turns once later ones exist (Qwen3 drops their thinking): an answer is supervised only
inside a render that begins with its own, and a conversation becomes several samples where one render
cannot hold all of its answers. Special tokens that a user typed stay special, as in serving.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.data.answers import Answers, Turn, reject_reasons
from draftline.data.chat import Chat, ChatTokenizer, Ids, Spans
from draftline.data.conversations import Conversation, Reject, describe_rejects
from draftline.data.formatted import Formatted
from draftline.data.generated import check_generators, joined_rows, normal_arguments
from draftline.data.store import Mask, Sample, Samples, token_lengths
from draftline.errors import DataError


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The samples in the order of their conversations, and what did not become one.

    `tokens` and `supervised_tokens` are sums over the samples; `cut_turns` answers begin past
    max_length. Every conversation has a sample or a reject. `notes` counts by the words of
    `conversations.NOTES`.
    """

    samples: Samples
    rejects: tuple[Reject, ...]
    tokens: int
    supervised_tokens: int
    cut_turns: int
    notes: Mapping[str, int] = field(default_factory=dict)


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    block_size: int,
    template_kwargs: Mapping[str, object] | None = None,
    stop_ids: Sequence[int] | None = None,
    embedding_rows: int | None = None,
    vocab_size: int | None = None,
    asked_template: Mapping[str, object] | None = None,
) -> Tokenized:
    """Samples of at most `max_length` tokens that each hold an anchor for `block_size`.

    `stop_ids` are the target's, `embedding_rows` and `vocab_size` the rows of its embedding and its
    head; None leaves unknown and unchecked. `asked_template` are the arguments that rows are compared
    with where `template_kwargs` hold more, such as a pinned clock.

    A sample that does not hold every answer has its last message in its id, as `#turn<i>`. Rejects,
    for the turns that the detail names while the others still count: `template_error`,
    `template_not_prefix`, `reasoning_not_in_template`, `tool_calls_not_in_template`,
    `content_not_in_template`, `cut_call`, `no_answer_mark`, `seam_not_encodable`; of rows
    `template_arguments`; of samples `token_beyond_embedding`, `token_beyond_head`,
    `no_supervised_tokens`, `shorter_than_a_block`. Raises DataError for a tokenizer without template
    or offsets, for generated ids of another template, its arguments or vocabulary, and when no sample
    is left.
    """
    arguments = template_kwargs or {}
    chat = Chat(tokenizer, arguments, stop_ids)
    conversations = list(conversations)
    asked = arguments if asked_template is None else asked_template
    check_generators(_generators(conversations), tokenizer.chat_template, asked, vocab_size)
    wanted = normal_arguments(asked)
    samples: list[Sample] = []
    rejects: list[Reject] = []
    notes: Counter[str] = Counter()
    cut_turns = 0
    for conversation in conversations:
        file, _, line = conversation.origin.rpartition(":")
        found, why, cut = _of(conversation, chat, max_length, wanted, notes)
        cut_turns += cut
        if not found and not why:
            why["no_supervised_tokens"] = f"no answer within max_length={max_length} tokens"
        rejects += [Reject(file, int(line), conversation.id, *item) for item in why.items()]
        for sample in found:
            bad = _misfit(sample, block_size, embedding_rows, vocab_size)
            if bad is None:
                samples.append(sample)
            else:
                rejects.append(Reject(file, int(line), sample.id, *bad))
    if not samples:
        way_out = {
            "no_supervised_tokens": f"data.max_length={max_length} cuts before the answers; raise it",
            "shorter_than_a_block": f"block_size={block_size} is longer than the answers; lower it",
            "template_error": "the chat template refuses the turns; see data.template",
        }
        seen = dict.fromkeys(way_out[r.reason] for r in rejects if r.reason in way_out)
        text = ". ".join([f"no sample to train on: {describe_rejects(rejects)}", *seen])
        raise DataError(text)
    tokens = sum(token_lengths(samples))
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Tokenized(
        Samples.of(samples), tuple(rejects), tokens, supervised, cut_turns, dict(notes)
    )


def anchor_mask(loss_mask: Mask, truncated: bool, block_size: int) -> Mask:
    """Where a block may be anchored, bool [tokens]: this token and the next are supervised.

    In a truncated sample the block must also lie inside it, so that the cut takes no labels away. A
    block at the natural end of an answer may be short.
    """
    anchors = np.zeros_like(loss_mask)
    anchors[:-1] = loss_mask[:-1] & loss_mask[1:]
    if truncated:
        anchors[max(len(anchors) - block_size + 1, 0) :] = False
    return anchors


def token_counts(samples: Iterable[Sample], vocab_size: int) -> NDArray[np.int64]:
    """How often each token is supervised, int64 [vocab_size]; DataError for an id outside it."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        ids = sample.input_ids[sample.loss_mask]
        if ids.size and ids.max() >= vocab_size:
            raise DataError(
                f"{sample.id} has token {ids.max()}, vocab_size={vocab_size}; use the target's own"
            )
        np.add.at(counts, ids, 1)
    return counts


def _of(
    conversation: Conversation,
    chat: Chat,
    max_length: int,
    wanted: Mapping[str, Any],
    notes: Counter[str],
) -> tuple[list[Sample], dict[str, str], int]:
    """A conversation's samples, why turns have none, and how many answers begin too late."""
    whole = conversation.complete
    if (row := conversation.tokens) is not None:
        ids, mask = np.asarray(row.input_ids, np.int32), np.asarray(row.loss_mask, np.bool_)
        cut = not whole or len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        return ([Sample(conversation.id, ids, mask, cut)] if mask.any() else []), {}, 0
    if conversation.generated:
        return _generated(conversation, max_length)
    if conversation.arguments:
        row_arguments = normal_arguments({**wanted, **_parsed(conversation.arguments)})
        if row_arguments != wanted:
            detail = f"the row asks for {conversation.arguments}, data.template is {wanted}"
            return [], {"template_arguments": detail}, 0
    source = Formatted(chat, conversation) if conversation.text else Answers(chat, conversation)
    found, cut_turns = _samples(source, max_length)
    notes.update(source.notes)
    return found, reject_reasons(source.failures), cut_turns


def _parsed(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    return parsed if isinstance(parsed, dict) else {}


def _generators(
    conversations: Iterable[Conversation],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each file's generators, each once: equal ones are one object by the reading of a file."""
    seen: set[tuple[str, int]] = set()
    for conversation in conversations:
        if conversation.generated and conversation.generator is not None:
            key = (conversation.origin.rpartition(":")[0], id(conversation.generator))
            if key not in seen:
                seen.add(key)
                yield key[0], conversation.generator


def _misfit(
    sample: Sample, block_size: int, embedding_rows: int | None, vocab_size: int | None
) -> tuple[str, str] | None:
    """Why a sample cannot be trained on: the reason and the detail of its reject."""
    ids, mask = sample.input_ids, sample.loss_mask
    if embedding_rows is not None and (most := int(ids.max())) >= embedding_rows:
        rows = f"the target's embedding has {embedding_rows} rows"
        return "token_beyond_embedding", f"token {most} at {int(ids.argmax())}, {rows}"
    if vocab_size is not None and (most := int(ids[mask].max())) >= vocab_size:
        return "token_beyond_head", f"token {most} is to be said, the target can say {vocab_size}"
    anchors = anchor_mask(mask, sample.truncated, block_size)
    if anchors.any() and len(anchors) >= block_size:
        return None
    return "shorter_than_a_block", f"{mask.sum()} supervised of {len(mask)} tokens"


def _generated(
    conversation: Conversation, max_length: int
) -> tuple[list[Sample], dict[str, str], int]:
    """Samples of the ids that the target was given and gave; turns share one where they follow."""
    messages = conversation.messages
    rows = joined_rows([a for a in conversation.generated if messages[a.turn].trained])
    samples, late = [], 0
    for ids, mask, turn, complete in rows:
        starts = [n for n, (a, b) in enumerate(zip([False, *mask], mask, strict=False)) if b > a]
        late += sum(n >= max_length for n in starts)
        kept = np.asarray(mask[:max_length], np.bool_)
        if not kept.any():
            continue
        name = conversation.id + f"#turn{turn}" * (len(rows) > 1)
        row = np.asarray(ids[:max_length], np.int32)
        samples.append(Sample(name, row, kept, not complete or len(ids) > max_length))
    return samples, {}, late


def _samples(source: Answers | Formatted, max_length: int) -> tuple[list[Sample], int]:
    """As few samples as hold every answer that fits, and the number of answers past max_length.

    Only a render that ends at or after an answer can hold it, so the last open answer decides the
    next render, which takes every earlier one that it begins with.
    """
    turns = source.turns
    open_turns = list(turns)
    found: list[Sample] = []
    cut = 0
    while open_turns:
        last = open_turns[-1]
        base = source.get(last)
        if base is None:
            open_turns = open_turns[:-1]
            continue
        ids, spans = source.chat.encode(base.text)
        truncated = len(ids) > max_length
        reach = int(spans[max_length, 0]) if truncated else len(base.text)
        mask = np.zeros(len(ids), np.bool_)
        left_open: list[int] = []
        for place, index in enumerate(open_turns):
            turn = source.get(index)
            if turn is None:
                continue
            if truncated and turn.begin >= reach and base.text.startswith(turn.text[:reach]):
                # Later answers begin later still: a long tail is never rendered turn by turn.
                cut += len(open_turns) - place
                break
            inside = base.text.startswith(turn.text[: turn.end])
            where = _tokens_of(source.chat, turn, ids, spans) if inside else None
            if where is not None:
                mask[where] = True
            elif index != last:
                left_open.append(index)
            else:
                joined = _joined(source, index, turn)
                if joined is not None:
                    ids, mask = joined
                    truncated = len(ids) > max_length
                    left_open = [i for i in open_turns if i != index]
        name = source.id + f"#turn{last}" * bool(left_open or last != turns[-1])
        open_turns = left_open
        # Copies, so that a cut sample does not keep the arrays of the whole conversation alive.
        ids, mask = ids[:max_length].copy(), mask[:max_length].copy()
        if mask.any():
            found.append(Sample(name, ids, mask, truncated or not base.ended))
    return found[::-1], cut


def _tokens_of(chat: Chat, turn: Turn, ids: Ids, spans: Spans) -> slice | None:
    """The tokens of the answer, None where its first is not one that the target would say next."""
    first = chat.answer_start(turn.text, turn.begin, ids, spans)
    if first is None:
        return None
    stop = int(np.searchsorted(spans[:, 1], turn.end, "right"))
    # An end-of-turn token with rstrip has the newline after it in its span.
    if stop < len(ids) and spans[stop, 0] < turn.end and int(ids[stop]) in chat.special:
        stop += 1
    return slice(first, stop)


def _joined(source: Answers | Formatted, index: int, turn: Turn) -> tuple[Ids, Mask] | None:
    """An answer whose first token would merge with the prompt's last: the ids of both, joined."""
    prompt, _ = source.chat.encode(turn.text[: turn.begin])
    said = source.chat.continued(turn.text[turn.begin : turn.end])
    if said is None:
        detail = (
            f"the answer does not begin a token of its own behind {turn.text[: turn.begin][-20:]!a}"
        )
        source.leave_out(index, "seam_not_encodable", detail)
        return None
    ids = np.concatenate((prompt, np.asarray(said, np.int32)))
    return ids, np.arange(len(ids)) >= len(prompt)
