"""The rows of a warm-up: what each came to, how they are shown, and the sign of life."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from draftline.runtime.compile.warmup import (
    CacheCounts,
    GraphRow,
    WarmRow,
    heartbeat,
    outcome,
    table_lines,
)

NONE = CacheCounts(0, 0)


@pytest.mark.parametrize(
    ("compiles", "after", "captured", "said"),
    [
        (0, NONE, False, "nothing to compile"),
        (2, NONE, False, "compiled"),  # a torch without counters
        (2, CacheCounts(0, 2), False, "compiled"),
        (2, CacheCounts(1, 1), False, "compiled"),  # a half-warm cache is no hit
        (2, CacheCounts(2, 0), False, "cache hit"),
        (2, CacheCounts(2, 0), True, "captured"),
        (0, NONE, True, "captured"),
    ],
)
def test_the_outcome(compiles: int, after: CacheCounts, captured: bool, said: str) -> None:
    assert outcome(compiles, NONE, after, captured=captured) == said


def test_only_what_changed_since_counts() -> None:
    before = CacheCounts(5, 7)
    assert outcome(1, before, CacheCounts(5, 8), captured=False) == "compiled"
    assert outcome(1, before, CacheCounts(6, 7), captured=False) == "cache hit"


def test_counters_are_read_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counter(fxgraph_cache_hit=3, fxgraph_cache_miss=2, fxgraph_cache_bypass=1)
    fake = SimpleNamespace(counters={"inductor": counted})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", fake)
    assert CacheCounts.now() == CacheCounts(hits=3, misses=3)
    for without in (SimpleNamespace(), SimpleNamespace(counters={})):
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", without)
        assert CacheCounts.now() == NONE
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert CacheCounts.now() == NONE


def test_the_table_is_aligned_and_ends_with_the_coverage() -> None:
    rows = [
        WarmRow("drafter forward+backward", "cuda:0", "compiled", 4, 61.04),
        WarmRow("step", "cuda:11", "captured", 0, 1.25, late=True),
    ]
    graphs = [
        GraphRow("drafter", "cuda:0", "forward", "compiled", 31.04),
        GraphRow("drafter", "cuda:0", "backward", "cache hit", 0.25),
    ]
    assert table_lines(rows, graphs, [("head", "cuda:0")]) == [
        "graph                     device   part      outcome         seconds",
        "drafter                   cuda:0   forward   compiled           31.0",
        "drafter                   cuda:0   backward  cache hit           0.2",
        "drafter forward+backward  cuda:0   whole     compiled           61.0",
        "step                      cuda:11  whole     captured, late      1.2",
        "head                      cuda:0   -         never called          -",
        "2 of 3 warmed in 62.3 s",
    ]


def test_a_table_of_nothing_still_says_so() -> None:
    assert table_lines([], [], [])[-1] == "0 of 0 warmed in 0.0 s"


class Beats(logging.Handler):
    """Says when the second line is there."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.twice = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 2:
            self.twice.set()


def test_a_long_warm_up_gives_signs_of_life_until_it_ends() -> None:
    beats = Beats()
    logger = logging.getLogger("draftline.runtime.compile.warmup")
    level = logger.level
    logger.addHandler(beats)
    logger.setLevel(logging.INFO)

    def fails_after_two() -> None:
        assert beats.twice.wait(30)
        assert [t.daemon for t in threading.enumerate() if "heartbeat" in t.name] == [True]
        raise ValueError("boom")

    try:
        with pytest.raises(ValueError, match="boom"), heartbeat("head on cuda:0", 0.001):
            fails_after_two()
        assert not [t for t in threading.enumerate() if "heartbeat" in t.name]
    finally:
        logger.removeHandler(beats)
        logger.setLevel(level)
    assert beats.lines[0] == "still warming head on cuda:0: 0 s"


def test_a_short_one_gives_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), heartbeat("head on cuda:0", 600.0):
        pass
    assert caplog.text == ""
