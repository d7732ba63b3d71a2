"""The bench of a pipeline runs `train` itself and compares it with its slower side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.bench.pipeline import PipelineBench, bench_pipeline
from draftline.config.load import build_config
from tests.bench.test_step import tree


def test_two_drafters_and_two_targets_are_timed_alone_and_together(
    target_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["topology.targets=[cpu,cpu]", "topology.drafters=[cpu,cpu]"]
    config = build_config(tree(target_dir("qwen3")), overrides)
    found = bench_pipeline(config, steps=20)
    assert found.steps == 20
    assert found.target_ms > 0
    # Both sides share the one CPU, so what is slower is their sum.
    assert found.slower_ms == pytest.approx(found.target_ms + found.drafter_ms)
    assert found.rows_per_s == pytest.approx(found.tokens_per_s / 64 * 32)
    assert found.memory == []
    assert list(tmp_path.iterdir()) == [], "the run's files are scratch"
    assert any("2 target(s) on cpu, cpu" in line for line in found.lines())


def test_efficiency_is_the_slower_side_over_the_run() -> None:
    bench = PipelineBench("p", 400.0, 100.0, 400.0, 410.0, 30, 1.0, 1.0, 0.0, 70.0, [])
    assert bench.efficiency_pct == pytest.approx(97.56, abs=0.01)
    assert "97.6 % of the slower side" in bench.lines()[2]
    assert bench.to_dict()["efficiency_pct"] == bench.efficiency_pct
