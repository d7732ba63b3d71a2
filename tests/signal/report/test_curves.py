"""Curves that are thinned and broken, and texts that are made harmless."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.report.curves import Clock, curve, label, thin

CLOCK = Clock(100.0, 60.0, "min", True)
VALUES = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=1, max_size=400)


@given(VALUES, st.integers(8, 60))
def test_thinning_keeps_ends_extremes_and_order(values: list[float], most: int) -> None:
    column = np.array(values)
    kept = thin(column, most)
    assert len(kept) <= most
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert (np.diff(kept) > 0).all()
    known = column[np.isfinite(column)]
    if len(known):
        assert np.nanmin(column[kept]) == known.min()
        assert np.nanmax(column[kept]) == known.max()
    assert bool(np.isnan(column[kept]).any()) == bool(np.isnan(column).any())


def test_every_spike_of_a_long_curve_survives() -> None:
    values = np.full(300_000, 5.0)
    spikes = np.arange(1_000, 300_000, 7_777)
    values[spikes] = np.where(np.arange(len(spikes)) % 2, 9.0, 1.0)
    kept = thin(values)
    assert len(kept) <= 4000
    assert set(spikes.tolist()) <= set(kept.tolist())


def test_a_curve_is_broken_where_nothing_was_recorded() -> None:
    time_s = np.array([100.0, 101, 102, 103, 500, 501, 502])
    line = curve(CLOCK, time_s, np.arange(7.0), name="x", unit="GiB")
    assert line["y"] == [0, 1, 2, 3, None, 4, 5, 6]
    assert line["x"][0] == 0
    assert line["x"][-1] == 6.7
    assert line["hovertemplate"].endswith(" GiB")


def test_parts_of_a_stack_share_their_moments() -> None:
    random = np.random.default_rng(1)
    whole, part = random.random(20_000), random.random(20_000)
    time_s = 100.0 + np.arange(20_000)
    lines = [
        curve(CLOCK, time_s, column, name="x", by=whole, step=time_s) for column in (whole, part)
    ]
    assert lines[0]["x"] == lines[1]["x"]
    assert lines[0]["customdata"] == lines[1]["customdata"]
    assert lines[0]["y"] != lines[1]["y"]


def test_texts_of_a_run_become_plain_labels() -> None:
    said = label('<a href="javascript:x">y</a> & \u202e\ud800\x00 ' + "long " * 100)
    assert "<a" not in said
    assert "&lt;a href=" in said
    assert "&amp;" in said
    assert not {"\u202e", "\ud800", "\x00"} & set(said)
    assert said.endswith("...")
    assert "<br>" in said
    said.encode()
