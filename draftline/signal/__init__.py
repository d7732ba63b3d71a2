"""Says whether a program's GPU memory is flat, and if not, why. For any PyTorch program:

    from draftline import signal

    for batch in loader:
        with signal.step():
            train(batch)

writes `signal-<pid>.jsonl`, which `draftline diagnose` judges. Nothing heavy is imported for it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftline.signal.recorder.marks import Phase, Step
    from draftline.signal.recorder.record import Recorder


def start(
    path: Path | str | None = None,
    *,
    expects: Collection[str] = (),
    hz: float = 5.0,
    own_peak: bool = False,
) -> Recorder:
    """Begins to record this program, to `./signal-<pid>.jsonl` without a `path`; see Recorder for the
    options. Without it, the first step or phase begins. Raises ConfigError while one records."""
    from draftline.signal.recorder.session import SESSION

    return SESSION.start(path, expects, hz, own_peak)


def step(tokens: int | None = None) -> Step:
    """Goes around one step (`with signal.step():`), or decorates the function that makes one."""
    from draftline.signal.recorder.marks import Step, check_tokens
    from draftline.signal.recorder.session import SESSION

    return Step(SESSION.recorder, check_tokens(tokens))


def mark_step(tokens: int | None = None) -> None:
    """Says that a step has just ended, for a loop that cannot be wrapped."""
    from draftline.signal.recorder.session import SESSION

    SESSION.recorder().mark_step(tokens=tokens)


def phase(name: str) -> Phase:
    """Marks that a phase begins (load, warm, run, evaluate, checkpoint, end, or another name). Used in
    `with`, the phase before it goes on afterwards."""
    from draftline.signal.recorder.session import SESSION

    return SESSION.recorder().phase(name)


def stop() -> None:
    """Ends the recording; the end of the program does the same."""
    from draftline.signal.recorder.session import SESSION

    SESSION.stop()
