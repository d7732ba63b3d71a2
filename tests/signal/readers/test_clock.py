"""Stamps in every form that loggers write, and rows put in the order in which they happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.readers.clock import (
    Stamp,
    median_period,
    read_daytime,
    read_epoch,
    read_stamp,
    spread,
    straighten,
)

NOON = 1795953600.0  # 2026-11-29 12:00:00 UTC


@pytest.mark.parametrize(
    ("text", "seconds", "zoned"),
    [
        ("2026/11/29 12:00:00.851", NOON + 0.851, False),
        ("2026-11-29T12:00:00Z", NOON, True),
        ("2026-11-29 12:00:00,5", NOON + 0.5, False),
        ("2026-11-29 14:00:00+02:00", NOON, True),
        ("2026-11-29T06:30:00-0530", NOON, True),
        ("20261129 12:00:00", NOON, False),
        ("Sun Nov 29 12:00:00 2026       ", NOON, False),
        ("Sun Nov 29 12:00:00 UTC 2026", NOON, True),
        ("Sun Nov 29 12:00:00 PM CET 2026", NOON, False),
        ("Sun 29 Nov 2026 01:00:00 PM UTC", NOON + 3600, True),
        ("Sun, 29 Nov 2026 12:00:00 +0000", NOON, True),
        ("Every 2.0s: nvidia-smi       host: Sun Nov 29 12:00:00 2026", NOON, False),
        ("1795953600.25", NOON + 0.25, True),
    ],
)
def test_read_stamp(text: str, seconds: float, zoned: bool) -> None:
    assert read_stamp(text) == Stamp(seconds, zoned)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026/13/29 12:00:00",
        "2026/11/29 25:00:00",
        "Sun Abc 29 12:00:00 2026",
        "1225 MiB",
        "12:00",
    ],
)
def test_read_stamp_none(text: str) -> None:
    assert read_stamp(text) is None


def test_long_text_is_not_searched() -> None:
    assert read_stamp("a" * 1_000_000 + " Sun Nov 29 12:00:00 2026") is None


def test_read_daytime() -> None:
    assert read_daytime("13:05:09") == 13 * 3600 + 5 * 60 + 9
    assert read_daytime("24:00:00") is None


@pytest.mark.parametrize("scale", [1, 1e3, 1e6, 1e9])
def test_read_epoch_units(scale: float) -> None:
    assert read_epoch(NOON * scale) == pytest.approx(NOON)


def test_straighten_leaves_what_rises() -> None:
    times = np.array([1.0, 2.0, 2.0, 5.0])
    straight = straighten(times, times)
    assert straight.stepped_s == ()
    assert straight.moved == 0
    np.testing.assert_array_equal(straight.time_s, times)


def test_clock_set_back_moves_what_follows() -> None:
    times = NOON + np.arange(0, 60, 0.2)
    stepped = np.concatenate([times[:150], times[150:] - 20])
    straight = straighten(stepped, times)
    np.testing.assert_array_equal(straight.order, np.arange(len(times)))
    assert straight.stepped_s == (pytest.approx(20.0),)
    assert (np.diff(straight.time_s) > 0).all()


def test_clock_set_back_beyond_the_start() -> None:
    times = np.concatenate([NOON + np.arange(100), NOON - 3600 + np.arange(50)])
    straight = straighten(times, times)
    np.testing.assert_array_equal(straight.order, np.arange(150))
    assert len(straight.stepped_s) == 1


def test_chunk_out_of_order_is_put_back() -> None:
    times = NOON + np.arange(0, 60, 0.2)
    order = np.r_[0:50, 100:150, 50:100, 150:300]
    straight = straighten(times[order], order * 1.0)
    np.testing.assert_array_equal(straight.time_s, times)
    assert straight.stepped_s == ()
    assert straight.moved == 100


def test_parts_in_the_wrong_order() -> None:
    times = NOON + np.arange(0, 60, 0.2)
    order = np.r_[100:300, 0:100]
    straight = straighten(times[order], order * 1.0)
    np.testing.assert_array_equal(straight.time_s, times)


def test_repeated_chunk_stays_beside_itself() -> None:
    times = NOON + np.arange(0, 60, 0.2)
    order = np.r_[0:100, 50:300]
    straight = straighten(times[order], order * 1.0)
    assert straight.stepped_s == ()
    assert len(np.unique(straight.time_s)) == len(times)


def test_shuffled_rows_are_sorted() -> None:
    times = NOON + np.arange(200.0)
    shuffled = np.random.default_rng(0).permutation(times)
    np.testing.assert_array_equal(straighten(shuffled, shuffled).time_s, times)


def test_spread_shares_a_second() -> None:
    times = np.array([0.0, 0, 0, 0, 1, 1, 2, 9])
    np.testing.assert_allclose(spread(times), [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 9])


@given(st.lists(st.floats(0, 4e9), min_size=2, max_size=60))
def test_times_always_rise(times: list[float]) -> None:
    straight = straighten(np.array(times + times), np.zeros(2 * len(times)))
    assert (np.diff(spread(straight.time_s)) > 0).all()
    assert sorted(straight.order) == list(range(2 * len(times)))


def test_median_period() -> None:
    assert median_period(np.array([0.0, 1, 3, 5, 5])) == 2
    assert median_period(np.array([7.0])) == 1
