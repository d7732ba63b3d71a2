"""Shapes of curves: at any sample rate, offset and time the same, and never a crash."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from draftline.signal.judge.shape import SHAPES, Shape, find_shape
from draftline.signal.trace import MIB, Column

SPAN_S = 64.0
GIB = 2**30


def levels(*parts: tuple[float, float]) -> Callable[[Column], Column]:
    """A curve of steps: from each share of the span on, so many MiB."""
    starts, heights = zip(*parts, strict=True)

    def curve(share: Column) -> Column:
        at = np.searchsorted(np.array(starts), share, side="right") - 1
        return np.array(heights, dtype=np.float64)[np.maximum(at, 0)]

    return curve


def spikes(count: int, width: float, height: float) -> Callable[[Column], Column]:
    return lambda share: np.where((share * count + 0.6) % 1.0 < width * count, height, 0.0)


CURVES: dict[str, tuple[str, Callable[[Column], Column]]] = {
    "constant": ("flat", lambda u: 0.0 * u),
    "trembling": ("flat", lambda u: 3.0 * np.sin(40 * u)),
    "a warm-up": ("flat", levels((0, 0), (0.1, 900), (0.3, 1100))),
    "a warm-up and a tremble": ("flat", lambda u: 2 * np.sin(99 * u) + 500 * np.minimum(8 * u, 1)),
    "one late rise": ("flat", levels((0, 0), (0.85, 700))),
    "one late fall": ("flat", levels((0, 700), (0.85, 0))),
    "evaluations": ("flat", spikes(4, 0.05, 4000)),
    "one flush": ("flat", levels((0, 900), (0.45, 0), (0.5, 900))),
    "irregular stairs": (
        "staircase",
        levels((0, 0), (0.11, 60), (0.37, 900), (0.6, 950), (0.9, 1300)),
    ),
    "two late stairs": ("staircase", levels((0, 0), (0.57, 300), (0.8, 700))),
    "a leak": ("slope", lambda u: 800 * u),
    "a small leak": ("slope", lambda u: 40 * u),
    "a leak in segments": ("slope", lambda u: 64 * np.floor(u * 16)),
    "a leak and a tremble": ("slope", lambda u: 800 * u + 15 * np.sin(200 * u)),
    "a linear saw": ("sawtooth", lambda u: 900 * (u * 8 % 1.0)),
    "flushes": ("sawtooth", lambda u: np.where(u * 12 % 1.0 < 0.4, 300.0, 1200.0)),
    "a wave": ("sawtooth", lambda u: 500 * np.sin(2 * np.pi * 7 * u)),
    "changing floors": (
        "volatile",
        levels((0, 0), (0.1, 900), (0.3, 500), (0.4, 1400), (0.55, 200), (0.7, 700), (0.8, 50)),
    ),
    "a growing saw": ("slope", lambda u: 900 * u + 700 * (u * 8 % 1.0)),
}
named = pytest.mark.parametrize("name", CURVES)


def shape_of(name: str, period_s: float = 0.25, start_s: float = 1.8e9, offset: float = 0) -> Shape:
    times = np.arange(0.0, SPAN_S, period_s)
    level = np.round(MIB * CURVES[name][1](times / SPAN_S)) + offset
    return find_shape(start_s + times, level, [(start_s, start_s + SPAN_S)])


@named
@pytest.mark.parametrize("period_s", [0.0625, 0.25, 0.5])
@pytest.mark.parametrize("offset", [0, 3 * GIB, 130 * GIB])
def test_each_shape_at_three_rates_and_offsets(name: str, period_s: float, offset: float) -> None:
    assert shape_of(name, period_s, offset=offset).kind == CURVES[name][0]


@named
@given(
    offset=st.integers(0, 2**41),
    start_s=st.integers(0, 2**33),
    period_s=st.floats(0.05, 0.6),
)
@settings(max_examples=10, deadline=None)
def test_shapes_depend_on_neither_offset_time_nor_rate(
    name: str, offset: int, start_s: int, period_s: float
) -> None:
    assert shape_of(name, period_s, float(start_s), offset).kind == CURVES[name][0]


@named
@given(times=st.integers(2, 6))
@settings(max_examples=5, deadline=None)
def test_readings_that_are_held_change_nothing(name: str, times: int) -> None:
    moments = np.arange(0.0, SPAN_S, 0.25)
    level = np.round(MIB * CURVES[name][1](moments / SPAN_S))
    finer = np.arange(0.0, SPAN_S, 0.25 / times)
    assert find_shape(finer, np.repeat(level, times), [(0, SPAN_S)]).kind == CURVES[name][0]


@named
@given(hidden=st.sets(st.integers(1, 254), max_size=60))
@settings(max_examples=10, deadline=None)
def test_a_reading_that_is_missing_is_not_a_reading_of_zero(name: str, hidden: set[int]) -> None:
    moments = np.arange(0.0, SPAN_S, 0.25)
    level = np.round(MIB * CURVES[name][1](moments / SPAN_S)) + 5 * GIB
    level[list(hidden)] = np.nan
    found = find_shape(moments, level, [(0, SPAN_S)])
    assert found.low_bytes >= 4 * GIB or np.isnan(found.low_bytes)
    if len(hidden) < 12 and name not in ("evaluations", "one flush"):
        assert found.kind == CURVES[name][0]


bytes_of_curves = arrays.arrays(np.int64, st.integers(8, 60), elements=st.integers(0, 400)).map(
    lambda mib: mib * float(MIB)
)


@given(level=bytes_of_curves, offset=st.integers(0, 2**20), start_s=st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_any_curve_is_the_same_elsewhere(level: Column, offset: int, start_s: int) -> None:
    times = 0.25 * np.arange(len(level))
    first = find_shape(times, level, [(0, 1e9)])
    moved = find_shape(times + start_s, level + offset * MIB, [(start_s, start_s + 1e9)])
    assert (moved.kind, moved.words) == (first.kind, first.words)
    assert (moved.net_bytes, moved.rises, moved.cycles) == (
        first.net_bytes,
        first.rises,
        first.cycles,
    )


@given(level=bytes_of_curves)
@settings(max_examples=60, deadline=None)
def test_the_mirror_image_has_the_mirrored_net(level: Column) -> None:
    times = 0.25 * np.arange(len(level))
    first = find_shape(times, level, [(0, 1e9)])
    upside_down = find_shape(times, 400 * MIB - level, [(0, 1e9)])
    backwards = find_shape(times, level[::-1], [(0, 1e9)])
    assert upside_down.net_bytes == backwards.net_bytes == -first.net_bytes
    assert (first.kind == "flat" and not first.rises) or np.ptp(level) > 0


@given(size=st.floats(0, 2e11), count=st.integers(8, 300))
@settings(max_examples=50, deadline=None)
def test_constants_are_flat(size: float, count: int) -> None:
    found = find_shape(np.arange(count, dtype=float), np.full(count, size), [(0, count)])
    assert (found.kind, found.net_bytes, found.rises, found.cycles) == ("flat", 0, 0, 0)


anything = st.one_of(st.just(np.nan), st.floats(-1e300, 1e300))


@given(
    level=arrays.arrays(np.float64, st.integers(0, 80), elements=anything),
    gaps=st.lists(st.floats(0, 1e6), min_size=80, max_size=80),
    windows=st.lists(st.tuples(anything, anything), max_size=4),
    whole=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_no_array_of_floats_crashes_it(
    level: Column, gaps: list[float], windows: list[tuple[float, float]], whole: bool
) -> None:
    times = np.cumsum(gaps)[: len(level)]
    with np.errstate(all="ignore"):
        found = find_shape(times, level, [(0.0, 1e9)] if whole else windows)
    assert found.kind in SHAPES
    assert found.words
    assert "\n" not in found.words
    assert found.rises >= 0
    assert found.cycles >= 0


def test_what_lies_between_two_windows_is_left_out() -> None:
    times = np.arange(0.0, 60.0, 0.5)
    level = np.where((times > 20) & (times < 30), 9000.0, 500.0) * MIB
    level[times >= 30] += 700 * MIB  # what a pause left is not what the steps took
    assert find_shape(times, level, [(0, 60)]).net_bytes == 700 * MIB
    cut = find_shape(times, level, [(0, 20), (30, 60)])
    assert (cut.kind, cut.net_bytes, cut.rises) == ("flat", 0, 0)


def test_a_leak_on_both_sides_of_a_pause_is_one_slope() -> None:
    times = np.arange(0.0, 60.0, 0.25)
    level = MIB * (10 * times + np.where(times > 30, 5000, 0))
    found = find_shape(times, level, [(0, 29), (33, 60)])
    assert found.kind == "slope"
    assert found.bytes_per_s == pytest.approx(10 * MIB, rel=0.02)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_readings_are_no_shape(count: int) -> None:
    found = find_shape(np.arange(count, dtype=float), np.zeros(count), [(0, 99)])
    assert (found.kind, found.words) == ("unknown", f"only {count} readings in the steady state")


def test_words_name_what_was_seen() -> None:
    assert shape_of("a leak").words == "grows by 12 MiB per second, 797 MiB in 1 min 4 s"
    assert shape_of("two late stairs").words == (
        "grew in 2 rises by 700 MiB in 1 min 4 s and gave nothing back"
    )
    assert shape_of("flushes").words.startswith("11 falls of up to 900 MiB in 1 min 4 s, each to")
    assert shape_of("one late fall").words == "one fall by 700 MiB, otherwise still"
    assert "4 short excursions of up to 4,000 MiB" in shape_of("evaluations").words


def test_a_flat_curve_has_levels_too() -> None:
    found = shape_of("trembling", offset=GIB)
    assert found.low_bytes == pytest.approx(GIB - 3 * MIB, rel=1e-4)
    assert found.range_bytes == pytest.approx(6 * MIB, rel=0.01)


def test_the_figures_of_a_slope() -> None:
    found = shape_of("a leak in segments")
    assert found.bytes_per_s == pytest.approx(16 * MIB, rel=0.05)
    assert found.net_bytes == found.range_bytes == 15 * 64 * MIB
    assert found.rises == 15
