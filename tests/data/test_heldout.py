"""Who is held out follows from the prompts alone, and never leaks into training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from draftline.data.heldout import (
    MOST_CONVERSATIONS,
    Split,
    count_conversations,
    hold_out,
    leave_out,
)
from draftline.data.store import Sample, Samples


def sample(name: str, prompt: list[int], answer: list[int]) -> Sample:
    ids = np.array(prompt + answer, np.int32)
    return Sample(name, ids, np.arange(len(ids)) >= len(prompt), False)


def conversations(count: int, *, first: int = 0) -> list[Sample]:
    return [sample(str(n), [n, n // 7, 5], [n, n + 1]) for n in range(first, first + count)]


def held_out(samples: Sequence[Sample], share: float) -> Split:
    return hold_out(Samples.of(samples), share)


def names(samples: Sequence[Sample]) -> set[str]:
    return {s.id for s in samples}


@pytest.mark.parametrize(
    ("count", "share", "held"), [(100, 0.02, 2), (149, 0.02, 2), (10, 0.5, 5), (49, 0.02, 0)]
)
def test_a_share_is_held_out_and_the_rest_keeps_its_order(
    count: int, share: float, held: int
) -> None:
    samples = conversations(count)
    split = held_out(samples, share)
    assert (len(split.heldout), len(split.train), split.conversations) == (
        held,
        count - held,
        count,
    )
    order = [int(s.id) for s in split.train]
    assert order == sorted(order)
    assert not names(split.train) & names(split.heldout)


def test_no_more_than_so_many_are_held_out() -> None:
    split = held_out(conversations(5000), 0.1)
    assert len(split.heldout) == MOST_CONVERSATIONS


def test_neither_order_nor_ids_nor_files_decide() -> None:
    samples = conversations(200)
    chosen = {s.input_ids.tobytes() for s in held_out(samples, 0.05).heldout}
    renamed = [Sample(f"x{s.id}", s.input_ids, s.loss_mask, s.truncated) for s in samples[::-1]]
    assert {s.input_ids.tobytes() for s in held_out(renamed, 0.05).heldout} == chosen
    # New conversations move none of the old ones into training except by taking their places.
    more = held_out([*samples, *conversations(20, first=900)], 10 / 220)
    assert len({s.input_ids.tobytes() for s in more.heldout} - chosen) <= 10
    assert names(more.heldout) - names(held_out(samples, 0.05).heldout) <= {
        str(n) for n in range(900, 920)
    }


def test_answers_to_one_prompt_are_on_one_side() -> None:
    samples = [sample(f"{n}-{copy}", [n, 5], [copy, 9, n]) for copy in range(4) for n in range(60)]
    split = held_out(samples, 0.1)
    assert len(split.heldout) == 24
    held, kept = ({s.id.partition("-")[0] for s in some} for some in (split.heldout, split.train))
    assert not held & kept


def test_a_prompt_of_most_conversations_is_not_held_out() -> None:
    samples = [sample(f"same-{n}", [1, 2], [n, n + 1]) for n in range(80)]
    split = held_out([*samples, *conversations(20)], 0.1)
    assert len(split.heldout) == 10
    assert not any(s.id.startswith("same") for s in split.heldout)


def test_the_samples_of_a_conversation_stay_together() -> None:
    """A template that rewrites history makes one sample a turn; the later ones hold the earlier."""
    samples = []
    for n in range(50):
        samples.append(sample(f"{n}#turn1", [n, 5], [7, 8]))
        samples.append(sample(f"{n}#turn3", [n, 5, 7, 6], [9, 9]))
        samples.append(sample(f"{n}", [n, 5, 7, 6, 9], [4, 4]))
    split = held_out(samples, 0.1)
    assert count_conversations(split.heldout) == 5
    assert len(split.heldout) == 15


def test_texts_without_a_prompt_are_told_apart() -> None:
    samples = [sample(str(n), [], [n, n + 1, 3]) for n in range(100)]
    assert len(held_out(samples, 0.1).heldout) == 10


def test_what_files_hold_out_is_taken_from_training() -> None:
    samples = conversations(30)
    # Another answer to a question that training has, and one that it does not have.
    heldout = [sample("a", [3, 0, 5], [50, 51]), sample("b", [99, 98], [1, 2])]
    split = leave_out(Samples.of(samples), Samples.of(heldout))
    assert names(split.heldout) == {"a", "b"}
    assert names(split.train) == names(samples) - {"3"}
