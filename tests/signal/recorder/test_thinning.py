"""What of a long recording is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.signal.judge.verdict import judge
from draftline.signal.readers.read import read_trace
from draftline.signal.recorder import journal, thinning
from draftline.signal.recorder.journal import Journal
from draftline.signal.recorder.nvml import Reading
from draftline.signal.recorder.thinning import FULL, MOST_APART_S, Thinning

GIB = 2**30


def line(number: int, period_s: float = 0.2, **values: Any) -> dict[str, Any]:
    time_s = round(1.7e9 + period_s * number, 4)
    return {"kind": "step", "time_s": time_s, "device": "0", "step": number, **values}


def kept(lines: list[dict[str, Any]]) -> list[int]:
    thinned = Thinning()
    return [place for place, each in enumerate(lines) if thinned.take(each)]


def test_a_short_recording_is_written_whole_and_as_it_is() -> None:
    thinned = Thinning()
    lines = [line(n, frames=3) for n in range(FULL)]
    assert all(thinned.take(each) for each in lines)


def test_what_stands_still_is_written_the_more_rarely_the_longer_it_lasts() -> None:
    places = np.array(kept([line(n, frames=3) for n in range(200_000)]))
    apart = np.diff(places)
    assert (np.diff(apart) >= -1).all()
    assert apart[0] == 1
    assert MOST_APART_S - 0.2 <= 0.2 * apart[-1] <= MOST_APART_S
    # A distance that is rare looks like a pause: it must not be three times the usual one.
    for count in range(2, len(apart), 97):
        assert apart[count - 1] < 3 * np.median(apart[:count])


@pytest.mark.parametrize("period_s", [0.005, 0.2, 1.0, 2.5, 3.0, 5.0])
def test_a_minute_always_has_enough_lines_for_a_verdict(period_s: float) -> None:
    places = kept([line(n, period_s, frames=3) for n in range(60_000)])
    assert max(np.diff(places)) * period_s <= max(60 / 14, period_s)


def test_a_week_of_eight_devices_is_some_hundred_megabytes() -> None:
    """Of the first hours, and lines like the last of these at the distance that they come to have."""
    steps = dict.fromkeys(thinning._MOVES, 123_456) | {"frames_ok": 12, "tokens": 16384}
    device = {"used_bytes": 10**11, "total_bytes": 10**11, "processes": {"1234": 10**11}}
    week = 0.0
    for still, moving in (
        (steps, ("step", "wall_ms", "graph_replays", "allocator_calls")),
        (device, ("util_pct",)),
    ):
        thinned = Thinning()
        sizes = []
        for n in range(40_000):
            time_s = round(1.7e9 + 0.2 * n, 4)
            each = {"kind": "device", "device": "0", "time_s": time_s} | still
            each |= dict.fromkeys(moving, 1_000_000 + n)
            if thinned.take(each):
                sizes.append(len(json.dumps(each, separators=(",", ":"))) + 1)
        week += sum(sizes) + 7 * 86_400 / (MOST_APART_S - 0.2) * float(np.mean(sizes[-100:]))
    assert 8 * week < 800e6


def test_what_moves_is_always_written() -> None:
    lines = [line(n, reserved_bytes=5.0, frames=3.0) for n in range(20 * FULL)]
    lines[-50]["reserved_bytes"] = 6.0  # there and back
    for later in lines[-9:]:
        later["frames"] = 4.0
    lines[-3].pop("frames")
    places = [place - len(lines) for place in kept(lines)]
    assert {-50, -49, -9, -3, -2} <= set(places)


def test_what_moves_at_every_line_is_thinned_in_the_end_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thinning, "_MOST_MOVES", 2 * FULL)
    lines = [line(n, reserved_bytes=n, compiles=int(n >= 29_001)) for n in range(30_000)]
    places = kept(lines)
    assert places[: 2 * FULL] == list(range(2 * FULL))
    assert len(places) < 20_000
    assert 29_001 in places


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(journal, "now_s", lambda: now[0])
    return lambda time_s: now.__setitem__(0, time_s)


@pytest.mark.parametrize("count", [FULL + 300, 3 * FULL, 40_000])
def test_a_thinned_recording_is_read_whole_and_judged_as_before(
    tmp_path: Path, clock: Callable[[float], None], count: int
) -> None:
    clock(1.7e9)
    written = Journal(tmp_path / "signal.jsonl")
    written.start("p", ["compiled", "captured"], {}, {}, pid=5)
    written.phase("run")
    values = {"frames": 4, "frames_ok": 4, "compiles": 4, "captures": 1, "tokens": 9}
    values |= {"reserved_bytes": 8 * GIB, "allocated_bytes": 6 * GIB, "retries": 0}
    for n in range(count):
        clock(1.7e9 + 0.2 * (n + 1))
        written.step("0", n, 0.2, {**values, "graph_replays": n, "allocator_calls": 8 * n})
        written.sample(Reading("0", 1.7e9 + 0.2 * n, 9 * GIB, 20 * GIB, n % 7, {5: 8 * GIB}))
        if n % 1000 == 0:
            written.file.flush()
    seen = written.trace()
    written.file.close()
    trace = read_trace([written.file.path])
    (steps,), (samples,) = trace.steps, trace.samples
    assert len(steps.number) < count
    for name, column in steps.values.items():
        assert np.isfinite(column).all(), name
    np.testing.assert_array_equal(steps.values["graph_replays"], steps.number)
    assert set(steps.values) == set(seen.steps[0].values)
    assert set(samples.by_process[5]) == {8.0 * GIB}
    assert set(samples.used_bytes) == {9.0 * GIB}
    assert judge(trace).verdict == judge(seen).verdict == "healthy"


def test_a_long_recording_can_be_read_line_by_line(tmp_path: Path) -> None:
    """By pandas and jq, say: no line leaves out what an earlier one holds."""
    written = Journal(tmp_path / "signal.jsonl")
    for n in range(2 * FULL):
        written.step("0", n, 0.2, {"frames": 3, "tokens": 5})
    written.file.close()
    rows = [json.loads(each) for each in written.file.path.read_text().splitlines()]
    assert {tuple(sorted(row)) for row in rows} == {
        ("device", "frames", "kind", "step", "time_s", "tokens", "wall_ms")
    }


def test_the_short_lines_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    first = line(0, frames=3, tokens=5)
    like = {"kind": "step", "device": "0", "like_ms": 200}
    short = [
        {**like, "time_s": round(1.7e9 + 0.2 * n, 4), "step": n, "tokens": 5 + n} for n in (1, 2, 3)
    ]
    short[-1]["frames"] = None  # no longer known
    for name, lines in (("whole", [first, *short]), ("torn", [first, short[1]])):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
    whole, torn = (read_trace([tmp_path / name]).steps[0] for name in ("whole", "torn"))
    np.testing.assert_array_equal(whole.values["frames"], [3, 3, 3, np.nan])
    np.testing.assert_array_equal(whole.values["tokens"], [5, 6, 7, 8])
    # The line that it is like was lost: it says only what it holds.
    np.testing.assert_array_equal(torn.values["frames"], [3, np.nan])
