"""What a run directory or a recording says of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.report.run_facts import flatten, read_run
from tests.support.recorded_runs import STEPS, Row, write_run


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run([write_run(tmp_path / "my-run")])
    assert run.name == "my-run"
    assert run.missing == ()
    assert run.notes == ()
    assert run.config["token_budget"] == 4096
    assert [choice["what"] for choice in run.choices] == ["target forwards", "compile drafter"]
    assert run.sealed is not None
    assert run.sealed["seconds"] == 6.0
    assert run.failure is None
    assert run.metrics is not None
    assert run.metrics.step[-1] == STEPS
    assert run.metrics.dated
    assert run.verdict.verdict == "healthy"


def test_the_environment_is_that_of_the_log_and_the_recording(tmp_path: Path) -> None:
    told = read_run([write_run(tmp_path / "a")]).environment
    assert told["versions"] == {"draftline": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
    assert told["driver"] == "580.159.04"
    assert told["commit"] == "c0ffee"


@pytest.mark.parametrize("name", ["signal.jsonl", "events.jsonl", "metrics.jsonl", "config.yaml"])
def test_what_is_not_there_is_said(name: str, tmp_path: Path) -> None:
    run = read_run([write_run(tmp_path / "a", without=[name])])
    assert run.missing == (f"no {name}",)


def test_a_run_that_ended_before_its_first_step_still_has_its_events(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", without=["signal.jsonl", "metrics.jsonl"])
    failed = {"time_s": 1_800_000_009.0, "event": "failed", "error": "TargetError: no such layer"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    run = read_run([folder])
    assert run.failure == "TargetError: no such layer"
    assert run.metrics is None
    assert run.trace.devices == []


def test_choices_and_failure_are_of_the_last_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    text = (folder / "events.jsonl").read_text()
    failed = {"time_s": 1_800_000_001.0, "event": "failed", "error": "RunError"}
    (folder / "events.jsonl").write_text(f"{text}{json.dumps(failed)}\n{text}")
    run = read_run([folder])
    assert len(run.choices) == 2
    assert run.failure is None
    assert any("started 2 times" in note for note in run.notes)


def test_a_recording_alone(tmp_path: Path) -> None:
    run = read_run([write_run(tmp_path / "a") / "signal.jsonl"])
    assert run.name == "signal.jsonl"
    assert run.metrics is None
    assert run.missing == ()
    assert run.environment["stance"] == "default"


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no events\.jsonl"):
        read_run([tmp_path])
    with pytest.raises(ConfigError, match="no run was given"):
        read_run([])
    two = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    with pytest.raises(ConfigError, match="two runs"):
        read_run(two)


def test_flatten_keeps_the_order_and_ends() -> None:
    tree: Row = {"a": {"c": 1, "b": [2, 3]}, "d": {}, "e": None}
    assert list(flatten(tree).items()) == [("a.c", 1), ("a.b", [2, 3]), ("d", {}), ("e", None)]
    loop: Row = {"x": 1}
    loop["again"] = loop
    assert len(flatten(loop, most=50)) <= 50
