"""Whole runs that hold conversations out: measured when due, and trained as if they were not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import ConfigError, DataError
from draftline.train.loop import train
from draftline.train.plan.inputs import prepare
from draftline.train.step.step import TrainStep
from tests.support.runs import (
    CtrlC,
    after,
    assert_same,
    configured,
    events,
    metrics,
    workers,
    write_talks,
)

FIELDS = ("accept_length_heldout", "accept_length_chain", "loss_heldout", "heldout_rounds")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_talks(tmp_path / "talks.jsonl")


@pytest.fixture
def config(tmp_path: Path, data: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    def build(*overrides: str, run: str = "run") -> Config:
        held = ("data.heldout=0.25", "train.eval_every=3")
        return configured(tmp_path / run, target_dir("llama"), data, *held, *overrides)

    return build


def scores(run_dir: Path) -> dict[int, list[float]]:
    return {
        line["step"]: [line[field] for field in FIELDS]
        for line in metrics(run_dir)
        if FIELDS[0] in line
    }


def test_measured_when_due_and_trained_as_if_they_were_not_there(
    config: Callable[..., Config], data: Path, tmp_path: Path
) -> None:
    held = config()
    inputs = prepare(held, Choices())
    assert (len(inputs.samples), len(inputs.heldout)) == (9, 3)
    done = train(held)
    assert list(scores(done.run_dir)) == [3, 6, 8]
    # Steps that are measured are reported, whatever log_every says.
    assert [line["step"] for line in metrics(done.run_dir)] == [2, 3, 4, 6, 8]
    assert done.heldout is not None
    assert scores(done.run_dir)[8][0] == done.heldout.accept_length_heldout
    said = [e for e in events(done.run_dir) if e.get("what") == "data.heldout"]
    assert said[0]["got"] == "3 of 12 conversations"
    kept = {sample.id for sample in inputs.samples}
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rest = tmp_path / "rest.jsonl"
    rest.write_text("".join(json.dumps(row) + "\n" for row in rows if row["id"] in kept))
    alone = train(config("data.heldout=null", f"data.train=[{rest}]", run="alone"))
    assert alone.heldout is None
    assert not scores(alone.run_dir)
    assert_same(done.checkpoint, alone.checkpoint)  # type: ignore[arg-type]
    # Named in a file they are the same conversations, though training's own file has them too.
    named = tmp_path / "named.jsonl"
    named.write_text("".join(json.dumps(row) + "\n" for row in rows if row["id"] not in kept))
    filed = train(config(f"data.heldout=[{named}]", run="filed"))
    assert scores(filed.run_dir) == scores(done.run_dir)
    assert_same(done.checkpoint, filed.checkpoint)  # type: ignore[arg-type]


def test_measuring_more_often_trains_no_other_weights(config: Callable[..., Config]) -> None:
    often = train(config("train.eval_every=1", run="often"))
    seldom = train(config("train.eval_every=100", run="seldom"))
    assert list(scores(often.run_dir)) == list(range(1, 9))
    assert list(scores(seldom.run_dir)) == [8]
    assert scores(often.run_dir)[8] == scores(seldom.run_dir)[8]
    assert_same(often.checkpoint, seldom.checkpoint)  # type: ignore[arg-type]


def test_a_resumed_run_measures_the_same(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config(run="whole"))
    parts = config(run="parts")
    with monkeypatch.context() as patch:
        press, count = CtrlC(patch), 0

        def updated(*_: object) -> None:
            nonlocal count
            count += 1
            if count == 4:
                press()

        after(patch, TrainStep, "update", updated)
        first = train(parts)
    assert (first.interrupted, first.step) == (True, 4)
    second = train(parts, resume=True)
    assert_same(whole.checkpoint, second.checkpoint)  # type: ignore[arg-type]
    assert scores(second.run_dir) == scores(whole.run_dir)


@pytest.mark.parametrize("source", ["online", "memory"])
def test_several_workers_measure_the_same(config: Callable[..., Config], source: str) -> None:
    more = (f"features.source={source}", "train.packs_per_step=4", "train.ema=null")
    one = train(config(*more, run="one"))
    several = train(config(*more, *workers(2, 2), run="several"))
    assert scores(one.run_dir).keys() == scores(several.run_dir).keys()
    for step, values in scores(one.run_dir).items():
        assert scores(several.run_dir)[step] == pytest.approx(values, rel=1e-4)


def test_a_share_of_few_is_none_and_said(config: Callable[..., Config]) -> None:
    choices = Choices()
    assert not prepare(config("data.heldout=0.02"), choices).heldout
    (said,) = [entry for entry in choices.entries if entry.what == "data.heldout"]
    assert said.got == "0 of 12 conversations"
    assert "less than one" in said.reason


@pytest.mark.parametrize("value", ["0", "0.0", "0.6", "-0.1", "[]", "yes"])
def test_what_is_no_share_and_no_file_is_refused(config: Callable[..., Config], value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.heldout"):
        config(f"data.heldout={value}")


def test_all_of_the_data_cannot_be_held_out(config: Callable[..., Config], data: Path) -> None:
    with pytest.raises(DataError, match="nothing is left to train on"):
        prepare(config(f"data.heldout=[{data}]"), Choices())
