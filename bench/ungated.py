"""`draftline` without the order of its compile gate: every worker warms up when it pleases.

    python bench/ungated.py train CONFIG ...

Only for showing what the gate is for. Prints every thread's stack and exits 1 after 100 s.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

from draftline.cli.app import main
from draftline.runtime.compile.gate import CompileGate
from draftline.train.pipeline.pipeline import Pipeline
from draftline.train.step.step import TrainStep


def together(self, worker, name: str, call: Callable[[], None], captures: bool) -> None:
    worker.doing("warm-up", 0)
    if captures:
        # All drafters begin at the same moment, as threads that are started together do.
        with self._warm_condition:
            barrier = self.__dict__.setdefault("_start", threading.Barrier(len(self._steps)))
        barrier.wait()
    call()
    with self._warm_condition:
        self._warmed += 1
        self._warm_condition.notify_all()
        worker.wait_until(
            self._warm_condition, lambda: self._warmed == len(self._order), "the others' warm-up"
        )


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True, file=sys.stderr)
    Pipeline._warm = together
    # Nothing is captured: a capture would need the quiet that is missing.
    TrainStep.capture = lambda self: self._forget()
    CompileGate.seal = lambda self: None
    CompileGate.check = lambda self: None
    main()
