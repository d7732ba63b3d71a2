"""A chat template that writes the day: the run keeps the one that it began on."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftline.checkpoint.restore import restore
from draftline.choices import Choices
from draftline.errors import ResumeError
from draftline.train.loop import train
from draftline.train.plan.inputs import prepare, settle_date
from tests.support.fakes import CHATML, tiny_target_dir
from tests.support.runs import assert_same, configured, events, write_talks

DATED = "{{ 'today ' + strftime_now('%d %b %Y') + ' ' }}" + CHATML


def on(monkeypatch: pytest.MonkeyPatch, day: int) -> None:
    """Makes it that day of March 2026 for a run that starts."""
    date = SimpleNamespace(today=lambda: datetime.date(2026, 3, day))
    clock = SimpleNamespace(date=date)
    monkeypatch.setattr("draftline.train.loop.datetime", clock)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    target = tiny_target_dir(tmp_path / "target", template=DATED)
    data = write_talks(tmp_path / "talks.jsonl")

    def build(*overrides: str) -> Any:
        return configured(tmp_path / "run", target, data, *overrides)

    return build


def test_a_run_is_resumed_on_another_day_with_the_prompts_of_its_first(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = made("features.source=disk")
    on(monkeypatch, 30)
    whole = train(config).checkpoint
    assert whole is not None
    said = [
        e for e in events(tmp_path / "run") if e["event"] == "choice" and e["what"] == "data.date"
    ]
    assert [e["got"] for e in said] == ["2026-03-30"]
    assert "date: '2026-03-30'" in (tmp_path / "run/config.yaml").read_text()
    kept = tmp_path / "kept"
    whole.rename(kept)
    on(monkeypatch, 31)
    again = train(config, resume=True).checkpoint
    assert again is not None
    assert_same(kept, again)
    # The features on disk are those of the first day, so none are computed anew.
    assert len(list((tmp_path / "run/features").iterdir())) == 1
    assert restore(again).config.data.date == datetime.date(2026, 3, 30)
    with pytest.raises(ResumeError, match=r"data.date: '2026-03-30' -> '2026-04-01'"):
        train(made("features.source=disk", "data.date=2026-04-01"), resume=True)


def test_the_day_given_is_the_one_written_and_without_use_it_is_said(made: Any) -> None:
    choices = Choices()
    inputs = prepare(made("data.date=2020-01-02"), choices)
    assert inputs.date == datetime.date(2020, 1, 2)
    assert [c.got for c in choices.entries if c.what == "data.date"] == ["2020-01-02"]
    text = inputs.facts.tokenizer.decode(inputs.samples[0].input_ids)
    assert text.startswith("today 02 Jan 2020 ")
    plain = SimpleNamespace(chat_template=CHATML)
    assert settle_date(made("data.date=2020-01-02"), plain, choices) is None
    assert choices.entries[-1].got == "no date"
