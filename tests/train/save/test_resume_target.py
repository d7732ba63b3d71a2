"""A run is not continued for another target, which is said by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.checkpoint.store import Checkpoint
from draftline.errors import ResumeError
from draftline.train.save.resume import check_state
from tests.support.states import run_state


@pytest.mark.parametrize(
    ("now", "said"), [("b-1", "trained for another target"), ("a-2", "trained on other data")]
)
def test_what_changed_is_named(now: str, said: str) -> None:
    checkpoint = Checkpoint(Path("step"), run_state(1, features="a-1", packs_per_step=1), {})
    check_state(checkpoint, features="a-1", packs_per_step=1, accept_changes=False)
    with pytest.raises(ResumeError, match=said):
        check_state(checkpoint, features=now, packs_per_step=1, accept_changes=False)
