"""Two decisions about token ids: which row masks a slot, and which tokens a drafter can draft."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import ConfigError

_MASK_NAMES = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<|fim_pad|>")
_DEAD_ROW = "is an embedding row of zeros or non-finite values"


class Vocabulary(Protocol):
    """The part of a target, or of its facts, that decides about token ids.

    `embedding` has a shape `[rows, hidden]`, and a row an index: a tensor, or None where the
    checkpoint is not at hand and nothing can be said about the row.
    """

    @property
    def tokenizer(self) -> Any: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def embedding(self) -> Any: ...


def choose_mask_token(
    target: Vocabulary, explicit: int | None, used: NDArray[np.int64], choices: Choices
) -> int:
    """The id whose embedding row stands for a masked slot.

    An explicit id is checked. Otherwise the first that qualifies of: the tokenizer's mask token or a
    token named like one; the first row behind the tokenizer's vocabulary, where the embedding is
    padded; the last special token that neither ends, begins nor pads a text nor stands in the chat
    template; as a fallback that is recorded, the last token of any kind. To qualify, the row must
    exist, be finite and not zero, and the token must not occur in the training tokens, whose counts
    `used [vocab]` are given. Raises ConfigError.
    """
    rows = target.embedding.shape[0]
    if explicit is not None:
        problem = _problem(target, explicit, used)
        if problem is not None:
            raise ConfigError(
                f"drafter.mask_token_id={explicit} {problem}; the embedding has rows 0..{rows - 1}"
                f"{_suggestion(target, used)}"
            )
        return explicit
    for token_id, reason in _candidates(target):
        if _problem(target, token_id, used) is None:
            choices.record(
                "drafter.mask_token_id", wanted="automatic", got=str(token_id), reason=reason
            )
            return token_id
    last = _last_free(target, used)
    if last is None:
        raise ConfigError(
            "drafter.mask_token_id cannot be chosen: every embedding row of the target is of a token "
            "that occurs in the training data, begins, ends or pads a text, or is empty; leave out rows "
            "with rare tokens, or take a target with a spare embedding row"
        )
    choices.record(
        "drafter.mask_token_id",
        wanted="an unused embedding row or special token",
        got=str(last),
        reason="the target has none; this is an ordinary token that the training data never hold, and "
        "where a text holds it the drafter takes it for an empty slot",
        fallback=True,
    )
    return last


def _last_free(target: Vocabulary, used: NDArray[np.int64]) -> int | None:
    """The last id that qualifies, which is the rarest in most vocabularies."""
    ids = reversed(range(target.embedding.shape[0]))
    return next((token_id for token_id in ids if _problem(target, token_id, used) is None), None)


def _suggestion(target: Vocabulary, used: NDArray[np.int64]) -> str:
    last = _last_free(target, used)
    return "" if last is None else f", such as {last}"


def _candidates(target: Vocabulary) -> list[tuple[int, str]]:
    tokenizer = target.tokenizer
    found: list[tuple[int, str]] = []
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        found.append((int(own), "the tokenizer's mask token"))
    vocabulary = tokenizer.get_vocab()
    found += [(vocabulary[n], f"token named {n}") for n in _MASK_NAMES if n in vocabulary]
    size = max(vocabulary.values()) + 1
    if size < target.embedding.shape[0]:
        found.append((size, "first embedding row behind the tokenizer's vocabulary"))
    template = str(tokenizer.chat_template or "")  # a mapping where there are several
    special = [
        (token_id, token.content)
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if token.special and token.content not in template
    ]
    found += [(token_id, f"unused special token {name}") for token_id, name in special]
    return found


def _problem(target: Vocabulary, token_id: int, used: NDArray[np.int64]) -> str | None:
    if token_id >= target.embedding.shape[0]:
        return "is outside the target's embedding"
    row = target.embedding[token_id]
    if row is not None and _is_dead(row):
        return _DEAD_ROW
    tokenizer = target.tokenizer
    reserved = {*target.stop_ids}
    for name in ("bos", "eos", "pad", "unk"):
        value = getattr(tokenizer, f"{name}_token_id", None)
        if value is not None:
            reserved.add(int(value))
    if token_id in reserved:
        return "is a token that begins, ends, pads or replaces text"
    if token_id < len(used) and used[token_id]:
        return f"occurs {int(used[token_id])} times in the training tokens"
    return None


def check_mask_row(embedding: Tensor, token_id: int) -> None:
    """Raises ConfigError when row `token_id` of the loaded `embedding [rows, hidden]` cannot mask a
    slot: where the checkpoint was not at hand before, nothing was known of the row."""
    if _is_dead(embedding[token_id]):
        raise ConfigError(
            f"drafter.mask_token_id={token_id} {_DEAD_ROW}; set an id of 0..{len(embedding) - 1} that "
            "never occurs in your data"
        )


def _is_dead(row: Tensor) -> bool:
    return not (bool(torch.isfinite(row).all()) and bool(row.any()))


def choose_draft_vocabulary(
    counts: NDArray[np.int64], size: int, stop_ids: tuple[int, ...]
) -> Tensor:
    """The `size` most frequent answer tokens, ascending int64 `[size]`; stop tokens always belong.

    `counts [vocab]` are over supervised training tokens. Ties go to the smaller id. Raises
    ConfigError when the whole vocabulary is smaller than `size`.
    """
    if size > len(counts):
        raise ConfigError(
            f"drafter.vocab_size={size} is more than the target's vocabulary of {len(counts)}"
        )
    if size <= len(stop_ids):
        raise ConfigError(
            f"drafter.vocab_size={size} leaves no room beside the {len(stop_ids)} stop tokens"
        )
    weighted = counts.copy()
    weighted[[i for i in stop_ids if i < len(counts)]] = counts.max() + 1
    order = np.lexsort((np.arange(len(counts)), -weighted))
    return torch.from_numpy(np.sort(order[:size]).astype(np.int64))
