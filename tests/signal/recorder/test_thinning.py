"""What of a long recording is written."""

from __future__ import annotations

from draftline.signal.recorder.thinning import FULL, Thinning


def kept(values: list[dict[str, float]]) -> list[int]:
    thinning = Thinning()
    return [place for place, line in enumerate(values) if thinning.keeps(line)]


def test_a_short_recording_is_written_whole() -> None:
    assert kept([{"frames": 3}] * FULL) == list(range(FULL))


def test_later_a_line_in_four_of_what_stands_still() -> None:
    places = kept([{"frames": 3, "allocator_calls": n} for n in range(FULL + 12)])
    assert [place - FULL for place in places if place >= FULL] == [3, 7, 11]


def test_what_moves_is_always_written() -> None:
    lines = [{"reserved_bytes": 5.0, "frames": 3.0} for _ in range(FULL + 10)]
    lines[FULL + 1]["reserved_bytes"] = 6.0  # there and back
    lines[FULL + 6]["frames"] = 4.0
    places = [place - FULL for place in kept(lines) if place >= FULL]
    assert {1, 2, 6, 7} <= set(places)


def test_a_reading_that_becomes_unknown_is_a_change() -> None:
    lines: list[dict[str, float]] = [{"used_bytes": 5.0}] * FULL
    assert kept([*lines, {}])[-1] == FULL
