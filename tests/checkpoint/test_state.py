"""What `state.json` says of a run comes back as it was, from earlier releases too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import zeros

from draftline.checkpoint.state import RunState
from draftline.checkpoint.store import load_checkpoint, save_checkpoint
from draftline.errors import CheckpointError
from tests.checkpoint.test_store import reseal
from tests.support.states import run_state


def written(state: RunState) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(state.to_json()))
    return tree


def test_a_state_comes_back_as_it_was() -> None:
    state = run_state(3)
    assert RunState.from_json(written(state)) == state
    assert written(state)["config_digest"] == state.config.digest()


def test_a_key_that_an_earlier_release_did_not_have_has_its_default() -> None:
    tree = written(run_state(3))
    del tree["config"]["signal"], tree["config"]["train"]["ema"], tree["shape"]["rms_norm_eps"]
    assert RunState.from_json(tree) == run_state(3)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"hidden_size": 3}},
        {"taps": None},
        {"config": {"train": {"steps": 5}, "no_such_key": 1}},
    ],
)
def test_another_versions_state_is_refused_by_its_commit(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = save_checkpoint(tmp_path, run_state(3), {"drafter": {"a": zeros(1)}}, keep=2)
    reseal(path, json.loads((path / "state.json").read_text()) | change)
    with pytest.raises(CheckpointError, match=r"another version.*\(commit abc123\)"):
        load_checkpoint(path)
