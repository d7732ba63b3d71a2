"""Samples: a conversation as the target's chat template writes it, with a mask on its answers.

For the assistant turn at index i let P be the render of the turns before it with the generation
prompt, and F the render up to and including it. What the target generates is F past P, through the
template's end-of-turn token. Special tokens that a user typed stay special, as in serving.

A template may change earlier turns once later ones exist (Qwen3 drops their thinking). An answer is
therefore supervised only inside a render that begins with its own F; a conversation becomes several
samples where one render cannot hold all of its answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from draftline.data.conversations import Conversation, Reject, describe_rejects
from draftline.errors import DataError

Mask = NDArray[np.bool_]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that `tokenize` uses."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...
    def __call__(self, text: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A token row: `input_ids` int32 [tokens] and `loss_mask` bool [tokens], on answers only.

    `truncated` says that the template's render went on past the last token.
    """

    id: str
    input_ids: NDArray[np.int32]
    loss_mask: Mask
    truncated: bool


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The samples in the order of their conversations, and what did not become one.

    `tokens` and `supervised_tokens` are sums over the samples; `cut_turns` answers begin past
    max_length. Every conversation has a sample or a reject.
    """

    samples: tuple[Sample, ...]
    rejects: tuple[Reject, ...]
    tokens: int
    supervised_tokens: int
    cut_turns: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rendered answer: it is `text[begin:end]`, and `text` is all up to this turn."""

    text: str
    begin: int
    end: int


class _Chat:
    """A tokenizer with the arguments of its template; raises DataError where it cannot serve."""

    def __init__(self, tokenizer: ChatTokenizer, arguments: Mapping[str, object]) -> None:
        if not getattr(tokenizer, "is_fast", False):
            name = type(tokenizer).__name__
            raise DataError(
                f"{name} is slow and gives no offsets; load the target's tokenizer.json"
            )
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; take an instruct model or set one")
        added = tokenizer.added_tokens_decoder.items()
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.special = {key: str(token.content) for key, token in added if token.special}

    def render(self, messages: Sequence[Mapping[str, str]], prompt: bool) -> str:
        """The template's text, with the prompt that opens an answer at its end if `prompt`."""
        call = self.tokenizer.apply_chat_template
        return str(call(messages, tokenize=False, add_generation_prompt=prompt, **self.arguments))

    def encode(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids [tokens] as apply_chat_template has them, and character spans [tokens, 2]."""
        asked = {"add_special_tokens": False, "padding": False, "truncation": False}
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False, **asked)
        spans = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], np.int32), spans

    def tokens_of(self, turn: _Turn, ids: NDArray[np.int32], spans: NDArray[np.int64]) -> slice:
        """The tokens that lie wholly inside the answer.

        Byte-level tokenizers with trim_offsets leave leading spaces out of a token's span, so one
        that reaches back into the prompt shows by the gap before it and by its own leading space.
        """
        first = int(np.searchsorted(spans[:, 0], turn.begin, "left"))
        while 0 < first < len(ids) and spans[first - 1, 1] < turn.begin:
            if not str(self.tokenizer.convert_ids_to_tokens(int(ids[first]))).startswith("Ġ"):
                break
            first += 1
        stop = int(np.searchsorted(spans[:, 1], turn.end, "right"))
        # An end-of-turn token with rstrip has the newline after it in its span.
        if stop < len(ids) and spans[stop, 0] < turn.end and int(ids[stop]) in self.special:
            stop += 1
        return slice(first, stop)


class _Answers:
    """The answers of one conversation, each rendered when first asked for, and the failures."""

    def __init__(self, chat: _Chat, conversation: Conversation) -> None:
        self.chat = chat
        self.conversation = conversation
        self._messages = [{"role": m.role, "content": m.content} for m in conversation.messages]
        self.cut = not conversation.complete
        self._turns: dict[int, _Turn | None] = {}
        self.failures: dict[str, dict[int, str]] = {}

    def get(self, index: int) -> _Turn | None:
        """The answer at this message, or None where the template gives none."""
        if index not in self._turns:
            self._turns[index] = self._render(index)
        return self._turns[index]

    def _render(self, index: int) -> _Turn | None:
        try:
            prompt = self.chat.render(self._messages[:index], True)
            text = self.chat.render(self._messages[: index + 1], False)
        except (TemplateError, TypeError, ValueError) as error:
            self.failures.setdefault("template_error", {})[index] = str(error)
            return None
        if not text.startswith(prompt):
            detail = f"the generation prompt ends {prompt[-30:]!a}, the answer does not follow it"
            self.failures.setdefault("template_not_prefix", {})[index] = detail
            return None
        begin = len(prompt)
        ended, body = _answer_lengths(text[begin:], self.chat.special.values())
        if self.cut and index == len(self._messages) - 1:
            # The template ends every answer, the target did not end this one.
            return _Turn(text[: begin + body], begin, begin + body)
        return _Turn(text, begin, begin + ended)


def tokenize(
    conversations: Iterable[Conversation],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    block_size: int,
    template_kwargs: Mapping[str, object] | None = None,
) -> Tokenized:
    """Samples of at most `max_length` tokens that each hold an anchor for `block_size`.

    A sample's ids are what `apply_chat_template` gives for its messages, cut at the end. One
    that does not hold every answer has its last message in its id, as `#turn<i>`. Rejects:
    `template_error` and `template_not_prefix`, for the turns that the detail names while the others
    still count, `no_supervised_tokens`, `shorter_than_a_block`. Raises DataError for a tokenizer
    without template or offsets, and when no sample is left.
    """
    chat = _Chat(tokenizer, template_kwargs or {})
    samples: list[Sample] = []
    rejects: list[Reject] = []
    cut_turns = 0
    for conversation in conversations:
        file, _, line = conversation.origin.rpartition(":")
        answers = _Answers(chat, conversation)
        found, cut = _samples(answers, max_length)
        cut_turns += cut
        why = {
            reason: f"turns {', '.join(map(str, turns))}: {next(iter(turns.values()))}"
            for reason, turns in answers.failures.items()
        }
        if not found and not why:
            why["no_supervised_tokens"] = f"no answer within max_length={max_length} tokens"
        rejects += [Reject(file, int(line), conversation.id, *item) for item in why.items()]
        for sample in found:
            anchors = anchor_mask(sample.loss_mask, sample.truncated, block_size)
            if anchors.any() and len(anchors) >= block_size:
                samples.append(sample)
                continue
            detail = f"{sample.loss_mask.sum()} supervised of {len(sample.loss_mask)} tokens"
            rejects.append(Reject(file, int(line), sample.id, "shorter_than_a_block", detail))
    if not samples:
        raise DataError(
            f"no sample to train on: {describe_rejects(rejects)}. Likely the template refuses the "
            f"turns (see data.template), data.max_length={max_length} cuts before the answers, or "
            f"block_size={block_size} is longer than the conversations"
        )
    tokens = sum(len(sample.input_ids) for sample in samples)
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Tokenized(tuple(samples), tuple(rejects), tokens, supervised, cut_turns)


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


def _samples(answers: _Answers, max_length: int) -> tuple[list[Sample], int]:
    """As few samples as hold every answer that fits, and the number of answers past max_length.

    Only a render that ends at or after an answer can hold it, so the last open answer decides the
    next render, which takes every earlier one that it begins with.
    """
    turns = [i for i, m in enumerate(answers.conversation.messages) if m.role == "assistant"]
    open_turns = turns
    found: list[Sample] = []
    cut = 0
    while open_turns:
        last = open_turns[-1]
        base = answers.get(last)
        if base is None:
            open_turns = open_turns[:-1]
            continue
        ids, spans = answers.chat.encode(base.text)
        truncated = len(ids) > max_length
        reach = int(spans[max_length, 0]) if truncated else len(base.text)
        mask = np.zeros(len(ids), np.bool_)
        left_open = []
        for place, index in enumerate(open_turns):
            turn = answers.get(index)
            if turn is None:
                continue
            if truncated and turn.begin >= reach and base.text.startswith(turn.text[:reach]):
                # Later answers begin later still: a long tail is never rendered turn by turn.
                cut += len(open_turns) - place
                break
            if base.text.startswith(turn.text[: turn.end]):
                mask[answers.chat.tokens_of(turn, ids, spans)] = True
            else:
                left_open.append(index)
        name = answers.conversation.id + f"#turn{last}" * bool(left_open or last != turns[-1])
        open_turns = left_open
        # Copies, so that a cut sample does not keep the arrays of the whole conversation alive.
        ids, mask = ids[:max_length].copy(), mask[:max_length].copy()
        if mask.any():
            unended = answers.cut and last == turns[-1]
            found.append(Sample(name, ids, mask, truncated or unended))
    return found[::-1], cut


def _answer_lengths(answer: str, special: Iterable[str]) -> tuple[int, int]:
    """Characters of `answer` with the first of the special tokens that end it, and without.

    What follows it is the template's own: a newline, or an end-of-text that closes every render.
    """
    body = answer.rstrip()
    length = len(body)
    while mark := next((token for token in special if body.endswith(token)), ""):
        length = len(body)
        body = body.removesuffix(mark).rstrip()
    return length, len(body)
