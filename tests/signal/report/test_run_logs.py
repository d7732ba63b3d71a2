"""Logs as a training leaves them, whole and broken."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from draftline.signal.report.diff import compare_facts
from draftline.signal.report.run_facts import read_run
from tests.support.recorded_runs import write_run


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", without=["signal.jsonl"])
    rows = [
        {"time_s": 1.8e9 + i, "step": step, "loss": loss}
        for i, (step, loss) in enumerate([(2, 9.0), (4, 8.0), (6, 7.0), (4, 5.0), (6, 4.0)])
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_run([folder]).metrics
    assert metrics is not None
    assert metrics.step.tolist() == [2, 4, 6]
    assert metrics.columns["loss"].tolist() == [9.0, 5.0, 4.0]


def test_what_is_no_number_is_unknown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", without=["signal.jsonl", "metrics.jsonl"])
    lines = [
        '{"step": 2, "seconds": 1.0, "loss": NaN, "x": 1e999}',
        '{"step": 4, "seconds": 2.0, "loss": 3.5, "x": true, "y": ' + "9" * 400 + "}",
        "[" * 100_000,
        '{"step": 6, "seconds": 3.0, "lo',
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run([folder])
    metrics = run.metrics
    assert metrics is not None
    assert not metrics.dated
    assert metrics.time_s.tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(metrics.columns["loss"], [np.nan, 3.5])
    assert metrics.known("x") is None
    assert metrics.known("y") is None
    assert metrics.usual("loss") == 3.5
    assert "metrics.jsonl: 2 lines are no JSON objects" in run.notes


def test_a_broken_configuration_is_said(tmp_path: Path) -> None:
    run = read_run([write_run(tmp_path / "a", config="a: [1,\nb: }")])
    assert run.config == {}
    assert any("a config.yaml that cannot be read: " in what for what in run.missing)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(9 * [f'*{old}'])}]\n" for old, new in pairwise("abcdefghijklmnop")
)


@pytest.mark.parametrize(
    "config",
    [
        BOMB,
        BOMB.replace("[*", "{<<: [*").replace("*a]", "*a]}"),
        "a: &a {b: *a}",
        "a: " + "[" * 60_000,
        "a: " + "x" * 70_000,
        "a: 1970-99-99",
        "a: !!timestamp never",
        "a: !!bool never",
        "a: !!float _",
        "a: " + "9" * 5000,
    ],
    ids=range(10),
)
def test_a_hostile_configuration_is_said_and_reading_it_ends(tmp_path: Path, config: str) -> None:
    folder = write_run(tmp_path / "a", config=config)
    run = read_run([folder])

    assert run.config == {}
    [said] = [what for what in run.missing if "a config.yaml that cannot be read: " in what]
    assert said.isprintable()
    assert f"A has {said}" in compare_facts(run, run, names=("a", "b")).missing


def test_texts_and_numbers_of_a_run_can_be_shown(tmp_path: Path) -> None:
    config = '{"a\\e[2J": "b\\e[2J\\nc", "d": 0x' + "f" * 9000 + ', "e": [[["\\a"]]]}'
    folder = write_run(tmp_path / "a", config=config)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "failed", "error": "\x1b[2J"}) + "\n")
        file.write('{"event": "deep", "x\\u001b": ' + "[" * 200 + "]" * 200 + "}\n")
    run = read_run([folder])

    assert run.config == {"a [2J": "b [2J c", "d": "...", "e": [[[""]]]}
    assert run.failure == "[2J"
    assert str(run.events[-1]["x"]) == "[" * 19 + "'...'" + "]" * 19
