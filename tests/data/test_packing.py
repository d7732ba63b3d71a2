"""Packs: nothing lost, nothing split, well filled, and the same for the same seed."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.packing import Pack, PackPlan, build_pack, plan_packs
from draftline.data.store import Sample
from draftline.data.tokens import anchor_mask
from draftline.errors import DataError


def realistic(count: int, longest: int, seed: int = 0) -> list[int]:
    """Conversation lengths with mean 450 and a long tail, as chat data has them."""
    drawn = np.random.default_rng(seed).lognormal(np.log(450) - 0.32, 0.8, count)
    lengths: list[int] = np.clip(drawn, 24, longest).astype(int).tolist()
    return lengths


def members(plan: PackPlan) -> list[int]:
    return [index for pack in plan.packs for index in pack.members]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=80),
    budget=st.integers(64, 200),
    seats=st.integers(1, 9),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_every_sample_is_in_one_pack_that_has_room_for_it(
    lengths: list[int], budget: int, seats: int, seed: int, epoch: int
) -> None:
    plan = plan_packs(lengths, token_budget=budget, max_batch_size=seats, seed=seed, epoch=epoch)
    assert sorted(members(plan)) == list(range(len(lengths)))
    for pack in plan.packs:
        assert pack.tokens == sum(lengths[index] for index in pack.members) <= budget
        assert 1 <= len(pack.members) <= seats
    filled = sum(lengths) / (len(plan.packs) * budget)
    assert plan.fill_pct == pytest.approx(100 * filled)
    assert plan == plan_packs(
        lengths, token_budget=budget, max_batch_size=seats, seed=seed, epoch=epoch
    )


@pytest.mark.parametrize(("budget", "longest"), [(8192, 4096), (49152, 8192), (2048, 2048)])
def test_realistic_lengths_fill_the_packs(budget: int, longest: int) -> None:
    lengths = realistic(20_000, longest)
    plan = plan_packs(lengths, token_budget=budget, max_batch_size=512, seed=3, epoch=0)
    assert plan.fill_pct >= 98
    assert plan.limited_by == "tokens"


def test_a_tight_seat_limit_still_fills_because_packs_mix_lengths() -> None:
    # 18 conversations fill a pack on average; sorted by length, the short ones' packs would close
    # at 24 with most of their tokens unused.
    plan = plan_packs(
        realistic(20_000, 4096), token_budget=8192, max_batch_size=24, seed=0, epoch=0
    )
    assert plan.fill_pct >= 98


def test_epochs_and_seeds_differ_in_composition_and_order() -> None:
    lengths = realistic(2000, 4096)

    def plan(seed: int, epoch: int) -> PackPlan:
        return plan_packs(lengths, token_budget=8192, max_batch_size=64, seed=seed, epoch=epoch)

    first, next_epoch, other_seed = plan(0, 0), plan(0, 1), plan(1, 0)
    for other in (next_epoch, other_seed):
        assert members(first) != members(other)
        shared = {frozenset(p.members) for p in first.packs} & {
            frozenset(p.members) for p in other.packs
        }
        assert len(shared) <= 1


def test_an_epoch_does_not_run_from_full_packs_to_empty_ones() -> None:
    plan = plan_packs(realistic(4000, 2048), token_budget=2048, max_batch_size=64, seed=0, epoch=0)
    fills = np.array([pack.tokens for pack in plan.packs])
    emptiest = np.argsort(fills)[:10] / len(fills)
    assert 0.2 < emptiest.mean() < 0.8


@pytest.mark.parametrize(
    ("lengths", "budget", "seats", "limited_by"),
    [
        (realistic(5000, 4096), 49152, 64, "max_batch_size"),
        ([100] * 74, 8192, 64, "max_batch_size"),
        (realistic(40, 4096), 49152, 512, "too few conversations"),
        (realistic(300, 4096), 8192, 512, "too few conversations"),
        (realistic(300, 4096), 8192, 21, "too few conversations"),
        ([95] * 10 + [10], 100, 64, "too few conversations"),
        ([7], 64, 1, "too few conversations"),
        ([60] * 50, 100, 64, "tokens"),
        ([50] * 50, 100, 2, "tokens"),
    ],
)
def test_the_plan_says_what_limits_the_fill(
    lengths: list[int], budget: int, seats: int, limited_by: str
) -> None:
    plan = plan_packs(lengths, token_budget=budget, max_batch_size=seats, seed=0, epoch=0)
    assert plan.limited_by == limited_by


def test_a_gap_as_long_as_the_shortest_conversation_is_filled() -> None:
    plan = plan_packs([50] * 50, token_budget=100, max_batch_size=4, seed=0, epoch=0)
    assert plan.fill_pct == 100


def test_a_quarter_million_conversations_take_seconds() -> None:
    lengths = realistic(250_000, 2048)
    began = time.perf_counter()
    plan = plan_packs(lengths, token_budget=2048, max_batch_size=64, seed=0, epoch=0)
    assert time.perf_counter() - began < 6
    assert plan.fill_pct > 98


def test_lengths_that_cannot_be_packed_are_errors_with_numbers() -> None:
    def plan(lengths: list[int], seats: int = 4) -> PackPlan:
        return plan_packs(lengths, token_budget=100, max_batch_size=seats, seed=0, epoch=0)

    with pytest.raises(DataError, match=r"2 samples.*token_budget=100.*sample 3"):
        plan([5, 101, 100, 140])
    with pytest.raises(DataError, match="no sample to pack"):
        plan([])
    with pytest.raises(DataError, match="sample 1 has 0 tokens"):
        plan([5, 0])
    with pytest.raises(DataError, match="max_batch_size=0"):
        plan([5], seats=0)


def samples() -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(
            str(index),
            random.integers(1, 99, tokens).astype(np.int32),
            random.random(tokens) < 0.7,
            truncated=index % 2 == 0,
        )
        for index, tokens in enumerate((5, 9, 3, 12))
    ]


def test_a_pack_holds_its_members_in_order_with_padding_last() -> None:
    made = samples()
    pack = Pack((3, 0, 2), 20)
    arrays = build_pack(made, pack, token_budget=24, block_size=4)
    begin = 0
    for place, index in enumerate(pack.members):
        sample = made[index]
        tokens = len(sample.input_ids)
        span = slice(begin, begin + tokens)
        np.testing.assert_array_equal(arrays.input_ids[span], sample.input_ids)
        np.testing.assert_array_equal(arrays.loss_mask[span], sample.loss_mask)
        np.testing.assert_array_equal(
            arrays.anchor_mask[span], anchor_mask(sample.loss_mask, sample.truncated, 4)
        )
        assert (arrays.conversation[span] == place).all()
        assert arrays.position[span].tolist() == list(range(tokens))
        assert (arrays.start[span] == begin).all()
        begin += tokens
    assert arrays.conversation[20:].tolist() == [-1] * 4
    assert arrays.start[20:].tolist() == [20, 21, 22, 23]
    for name in ("input_ids", "loss_mask", "anchor_mask", "position"):
        assert not getattr(arrays, name)[20:].any()


def test_pack_arrays_are_exactly_the_budget_long_and_typed() -> None:
    arrays = build_pack(samples(), Pack((1,), 9), token_budget=16, block_size=4)
    for name in ("input_ids", "conversation", "position", "start"):
        assert getattr(arrays, name).dtype == np.int32
        assert getattr(arrays, name).shape == (16,)
    for name in ("loss_mask", "anchor_mask"):
        assert getattr(arrays, name).dtype == np.bool_
        assert getattr(arrays, name).shape == (16,)


def test_no_anchor_is_the_last_token_of_its_conversation() -> None:
    made = [
        Sample(str(index), np.ones(4, np.int32), np.ones(4, np.bool_), False) for index in range(3)
    ]
    arrays = build_pack(made, Pack((0, 1, 2), 12), token_budget=12, block_size=4)
    # A block that began there would take the next conversation's tokens as labels.
    anchors = np.flatnonzero(arrays.anchor_mask)
    assert anchors.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert (arrays.conversation[anchors] == arrays.conversation[anchors + 1]).all()


def test_a_plan_made_for_other_samples_is_caught() -> None:
    with pytest.raises(AssertionError, match="other samples"):
        build_pack(samples(), Pack((1,), 8), token_budget=16, block_size=4)


def test_the_data_room_imports_neither_torch_nor_transformers() -> None:
    heavy = "('torch', 'transformers', 'tokenizers')"
    code = f"import sys, draftline.data.packing; print([n for n in {heavy} if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
