"""What the tests of plausible programs share: how they are built, and what is said of them."""

from __future__ import annotations

import numpy as np

from draftline.signal.judge.verdict import judge
from draftline.signal.trace import Trace
from tests.support.faulty_runs import STEPS

AT = np.arange(STEPS)
QUIET = {"healthy", "pause", "unknown"}


def causes(trace: Trace) -> set[str]:
    return {cause.cause for device in judge(trace).devices for cause in device.causes}


def said(trace: Trace) -> str:
    return judge(trace).line


def compiled_at(*steps: int, **options: object) -> dict[str, object]:
    return {"compiles": [0, *steps], "frames": [0, *steps], "frames_ok": [0, *steps], **options}


def slow(steps: list[int], seconds: float) -> dict[int, float]:
    return {-1: 0.04} | dict.fromkeys(steps, seconds)
