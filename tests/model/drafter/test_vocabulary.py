"""Which row masks a slot, and which tokens a drafter can draft."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftline.choices import Choices
from draftline.errors import ConfigError, FallbackError
from draftline.model.drafter.vocabulary import (
    check_mask_row,
    choose_draft_vocabulary,
    choose_mask_token,
)
from draftline.model.target.target import load_target
from tests.support.fakes import SPECIAL, VOCAB_SIZE, tiny_tokenizer

UNUSED = np.zeros(VOCAB_SIZE, np.int64)
SPARE = SPECIAL.index("<|spare|>")


def target_with(tokenizer: Any, rows: int = VOCAB_SIZE, stop: tuple[int, ...] = (2,)) -> Any:
    """As much of a target as the rule looks at."""
    embedding = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(embedding=embedding, tokenizer=tokenizer, stop_ids=stop)


def choose(target: Any, explicit: int | None = None, used: Any = UNUSED) -> tuple[int, Choices]:
    choices = Choices()
    return choose_mask_token(target, explicit, used, choices), choices


def tokenizer_with(*names: str, **roles: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(names), special_tokens=True)
    for role, name in roles.items():
        setattr(tokenizer, role, name)
    return tokenizer


def test_the_tokenizers_own_mask_token_comes_first() -> None:
    tokenizer = tokenizer_with("<mask>", "<own>", mask_token="<own>")
    chosen, choices = choose(target_with(tokenizer, VOCAB_SIZE + 9))
    assert chosen == tokenizer.convert_tokens_to_ids("<own>")
    [entry] = choices.entries
    assert (entry.what, entry.got) == ("drafter.mask_token_id", str(chosen))
    assert entry.reason == "the tokenizer's mask token"


def test_a_token_named_like_a_mask_comes_before_a_padded_row() -> None:
    tokenizer = tokenizer_with("<|fim_pad|>", "[MASK]")
    chosen, choices = choose(target_with(tokenizer, VOCAB_SIZE + 9))
    assert chosen == tokenizer.convert_tokens_to_ids("[MASK]")
    assert choices.entries[0].reason == "token named [MASK]"


def test_a_padded_row_comes_before_a_spare_special_token() -> None:
    assert choose(target_with(tiny_tokenizer(), VOCAB_SIZE + 9))[0] == VOCAB_SIZE
    dead = target_with(tiny_tokenizer(), VOCAB_SIZE + 9)
    dead.embedding[VOCAB_SIZE] = 0
    assert choose(dead)[0] == SPARE
    dead.embedding[VOCAB_SIZE] = torch.nan
    assert choose(dead)[0] == SPARE


def test_the_last_unused_special_token_is_the_last_resort() -> None:
    """Not one that ends or pads text, nor one of the template: <|im_start|> stands in it."""
    target = target_with(tiny_tokenizer())
    chosen, choices = choose(target)
    assert chosen == SPARE
    assert choices.entries[0].reason == "unused special token <|spare|>"
    later = tokenizer_with("<|reserved_7|>")
    assert choose(target_with(later, VOCAB_SIZE + 1))[0] == VOCAB_SIZE
    used = UNUSED.copy()
    used[SPARE] = 3
    for spent in (
        choose(target, used=used),
        choose(target_with(tiny_tokenizer(), stop=(2, SPARE))),
    ):
        assert spent[0] == VOCAB_SIZE - 1


def test_an_ordinary_token_that_the_data_never_hold_is_a_fallback() -> None:
    used = np.ones(VOCAB_SIZE, np.int64)
    target = target_with(tiny_tokenizer())
    with pytest.raises(ConfigError, match="cannot be chosen"):
        choose(target, used=used)
    used[[20, 30]] = 0
    chosen, choices = choose(target, used=used)
    assert chosen == 30
    assert choices.entries[0].fallback
    with pytest.raises(FallbackError, match="ordinary token"):
        choose_mask_token(target, None, used, Choices(strict=True))


def test_a_token_in_any_of_several_templates_is_not_spare() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tools": "<|spare|>"}
    assert choose(target_with(tokenizer))[0] == VOCAB_SIZE - 1


def test_a_mask_token_of_the_training_text_does_not_qualify() -> None:
    tokenizer = tokenizer_with("<mask>")
    mask = tokenizer.convert_tokens_to_ids("<mask>")
    used = np.zeros(VOCAB_SIZE + 1, np.int64)
    used[mask] = 1
    assert choose(target_with(tokenizer, VOCAB_SIZE + 1), used=used)[0] == SPARE


@pytest.mark.parametrize(
    ("token_id", "problem"),
    [
        (VOCAB_SIZE, "is outside the target's embedding"),
        (0, "begins, ends, pads"),
        (2, "begins, ends, pads"),
        (11, "occurs 5 times in the training tokens"),
        (12, "zeros or non-finite"),
    ],
)
def test_an_explicit_id_is_checked(token_id: int, problem: str) -> None:
    target = target_with(tiny_tokenizer())
    target.embedding[12] = 0
    used = UNUSED.copy()
    used[11] = 5
    with pytest.raises(ConfigError) as caught:
        choose(target, token_id, used)
    assert f"drafter.mask_token_id={token_id} " in str(caught.value)
    assert problem in str(caught.value)
    suggested = int(str(caught.value).partition(", such as ")[2])
    assert choose(target, suggested, used)[0] == suggested
    assert f"0..{VOCAB_SIZE - 1}" in str(caught.value)


def test_an_explicit_id_that_qualifies_is_taken_and_is_no_automatic_choice() -> None:
    chosen, choices = choose(target_with(tiny_tokenizer()), 20)
    assert chosen == 20
    assert choices.entries == []


def test_a_loaded_target_has_what_the_rule_needs(target_dir: Any) -> None:
    path: Path = target_dir("llama")
    target = load_target(str(path), device=torch.device("cpu"), num_taps=1)
    assert choose(target)[0] == SPARE


# The drafter's vocabulary


def test_the_most_frequent_tokens_in_ascending_order() -> None:
    counts = np.array([5, 0, 9, 1, 7, 0, 2], np.int64)
    chosen = choose_draft_vocabulary(counts, 3, ())
    assert chosen.tolist() == [0, 2, 4]
    assert chosen.dtype == torch.int64


def test_stop_tokens_always_belong_and_ties_go_to_the_smaller_id() -> None:
    counts = np.array([4, 4, 4, 4, 9, 0, 0], np.int64)
    assert choose_draft_vocabulary(counts, 3, (5,)).tolist() == [0, 4, 5]
    # A stop id behind the counted vocabulary is no row of the head.
    assert choose_draft_vocabulary(counts, 3, (5, 99)).tolist() == [0, 4, 5]
    assert counts.tolist() == [4, 4, 4, 4, 9, 0, 0], "the caller's counts were changed"


def test_the_whole_vocabulary_is_the_most_there_is() -> None:
    counts = np.array([1, 2, 3], np.int64)
    assert choose_draft_vocabulary(counts, 3, (0,)).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"drafter.vocab_size=4 .* vocabulary of 3"):
        choose_draft_vocabulary(counts, 4, ())


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_loaded_mask_row_that_says_nothing_is_refused(value: float) -> None:
    embedding = torch.ones(6, 4)
    check_mask_row(embedding, 5)
    embedding[5] = value
    with pytest.raises(ConfigError, match=r"mask_token_id=5.*zeros.*0\.\.5"):
        check_mask_row(embedding, 5)
