"""Every sample once, every shape from the table, little padding; odd tables are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.batches import BatchTable, check_table, derive_table
from draftline.data.packing import plan_packs
from draftline.errors import ConfigError

lengths_of = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def padded_tokens(table: BatchTable, lengths: list[int]) -> int:
    return sum(b.shape[0] * b.shape[1] for b in table.split(lengths))


def check_split(table: BatchTable, lengths: list[int]) -> None:
    batches = table.split(lengths)
    assert sorted(m for b in batches for m in b.members) == list(range(len(lengths)))
    for batch in batches:
        rows, length = batch.shape
        assert batch.shape in table.shapes
        assert 1 <= len(batch.members) <= rows
        assert all(lengths[m] <= length for m in batch.members)


@settings(max_examples=60, deadline=None)
@given(lengths_of, lengths_of, st.integers(300, 2000), st.integers(1, 70), st.integers(1, 70))
def test_a_derived_table_splits_any_pack_of_its_data(
    data: list[int], pack: list[int], batch_tokens: int, most_rows: int, hint: int
) -> None:
    table = derive_table(
        data, batch_tokens=batch_tokens, most_rows=most_rows, pack_members_hint=hint
    )
    check_split(table, [min(n, max(data)) for n in pack])
    assert table.longest >= max(data)
    assert len(set(table.shapes)) == len(table.shapes)
    assert len(table.shapes) <= 64
    areas = [rows * length for rows, length in table.shapes]
    assert areas == sorted(areas, reverse=True)
    assert table.most_tokens == areas[0] <= batch_tokens
    for rows, length in table.shapes:
        assert rows & (rows - 1) == 0
        assert rows <= max(1, min(most_rows, hint))
        assert (1, length) in table.shapes
    # Its own check must find nothing to refuse.
    assert check_table(table.shapes, max(data), batch_tokens) == table


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 60)), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(1, 60), max_size=20),
)
def test_any_table_is_split_by_its_own_shapes(
    shapes: list[tuple[int, int]], lengths: list[int]
) -> None:
    table = BatchTable(tuple(shapes))
    check_split(table, [min(n, table.longest) for n in lengths])


def test_a_split_takes_the_cheapest_cut() -> None:
    table = BatchTable(((4, 1024), (1, 1024), (4, 256), (4, 128), (2, 128), (1, 128)))
    # A lone long sample does not drag short ones into its shape.
    shapes = [b.shape for b in table.split([200, 900, 256, 100, 30])]
    assert shapes == [(1, 1024), (4, 256)]
    # One empty row of this length is cheaper than one more forward.
    assert [b.shape for b in table.split([100, 100, 100])] == [(4, 128)]
    assert table.split([]) == []
    assert table.split([5, 7])[0].members == (1, 0)
    with pytest.raises(ConfigError, match=r"1025.*1024"):
        table.split([3, 1025])


@pytest.mark.parametrize(
    ("mean", "sigma", "wanted"), [(5.8, 0.8, 80), (6.4, 0.7, 83), (7.1, 0.6, 88)]
)
def test_conversations_fill_their_batches(mean: float, sigma: float, wanted: float) -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(mean, sigma, 3000), 16, 4096).astype(int).tolist()
    table = derive_table(lengths, batch_tokens=49152, most_rows=64, pack_members_hint=64)
    plan = plan_packs(lengths, token_budget=49152, max_batch_size=64, seed=0, epoch=0)
    packs = [[lengths[m] for m in pack.members] for pack in plan.packs]
    real = 100 * sum(map(sum, packs)) / sum(padded_tokens(table, pack) for pack in packs)
    assert real >= wanted
    # No group of samples has to be cut into very many forwards.
    assert max(len(table.split(pack)) for pack in packs) <= 24


def test_samples_of_one_length_are_not_padded() -> None:
    table = derive_table([2048] * 9, batch_tokens=16384, most_rows=64, pack_members_hint=9)
    assert {length for _, length in table.shapes} == {2048}
    assert padded_tokens(table, [2048] * 8) == 8 * 2048


def test_a_length_is_never_rounded_above_the_tokens_of_a_forward() -> None:
    table = derive_table([100, 47], batch_tokens=100, most_rows=4, pack_members_hint=4)
    assert table.longest == 100
    with pytest.raises(ConfigError, match=r"longest conversation has 101 tokens.*100"):
        derive_table([101], batch_tokens=100, most_rows=4, pack_members_hint=4)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], r"target.batches=\[\]"),
        ([(1, 64), (0, 8)], r"\[\[0, 8\]\].*1 or more"),
        ([(1, 64), (1, -8)], r"\[\[1, -8\]\].*1 or more"),
        ([(1, 64), (2, 8), (1, 64)], r"\[\[1, 64\]\] more than once"),
        ([(1, 64), (4, 33)], r"\[\[4, 33\]\].*token_budget=128"),
        ([(1, 48), (2, 32)], r"has 50 tokens and the longest shape 48; add \[1, 50\]"),
        ([(2, 64), (1, 32)], r"one row.*50 tokens.*add \[1, 64\]"),
    ],
)
def test_an_odd_table_is_refused(shapes: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_table(shapes, 50, 128)


def test_a_good_table_is_taken_largest_first() -> None:
    table = check_table([(1, 64), (2, 64), (4, 16)], 64, 128)
    assert table.shapes == ((2, 64), (1, 64), (4, 16))
