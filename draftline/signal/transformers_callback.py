"""Records a run of the Hugging Face Trainer and says in its log when memory is not flat."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from draftline.signal.monitor import Monitor
from draftline.signal.recorder.record import Recorder

log = logging.getLogger(__name__)

# Steps that may still compile, capture and fill the allocator's cache: the Trainer marks no warm-up.
WARM_STEPS = 10
_JUDGE_S = 30.0  # between two looks at the run


class SignalCallback:
    """A callback of the Trainer: `Trainer(..., callbacks=[SignalCallback()])`.

    Records to `path`, by default `signal.jsonl` in the Trainer's output directory (`signal-rank1.jsonl`
    and so on for the other ranks). Once a verdict is not flat it is a warning in the log; nothing else
    is changed or said. `expects` is the Recorder's. Raises ConfigError where the file cannot be opened.

    transformers is not imported for it: the Trainer asks for its methods by name.
    """

    def __init__(self, path: Path | str | None = None, expects: Collection[str] = ()) -> None:
        self._path = path
        self._expects = expects
        self._recorder: Recorder | None = None
        self._monitor: Monitor | None = None
        self._phase = ""
        self._tokens = 0
        self._steps = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other event of the Trainer, of this release or a later one: nothing is done."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder is not None:  # the run before was broken off
            self._recorder.stop()
        rank = int(getattr(args, "process_index", 0))
        name = f"signal-rank{rank}.jsonl" if rank else "signal.jsonl"
        self._recorder = Recorder(self._path or Path(args.output_dir) / name, expects=self._expects)
        self._monitor = Monitor(self._recorder.trace)
        self._steps, self._phase = 0, ""
        self._tokens = _seen_tokens(state)
        self._recorder.start()
        self._enter("warm")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._enter("run" if self._steps >= WARM_STEPS else "warm")
        if self._recorder is not None:
            self._recorder.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder is None:
            return
        tokens, self._tokens = _seen_tokens(state) - self._tokens, _seen_tokens(state)
        self._recorder.mark_step(state.global_step, tokens or None)
        self._steps += 1
        self._pause(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pause(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pause(control)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        due = self._monitor is not None and self._monitor.due(time.monotonic(), _JUDGE_S)
        if due and self._steps >= 2 * WARM_STEPS:
            self._judge()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._recorder is not None:
            self._enter("end")
            self._judge()
            self._recorder.stop()
            self._recorder = None

    def _pause(self, control: Any) -> None:
        """What the Trainer is about to do besides a step; the next step ends it."""
        if control.should_evaluate:
            self._enter("evaluate")
        elif control.should_save:
            self._enter("checkpoint")

    def _enter(self, phase: str) -> None:
        if self._recorder is not None and phase != self._phase:
            self._phase = phase
            self._recorder.phase(phase)

    def _judge(self) -> None:
        if self._recorder is None or self._monitor is None:
            return
        found = self._monitor.look(time.monotonic())
        if found is not None and found.is_bad and self._monitor.is_news():
            log.warning("memory: %s (recorded in %s)", found.line, self._recorder.path)


def _nothing(*_arguments: Any, **_named: Any) -> None:
    return


def _seen_tokens(state: Any) -> int:
    """Tokens so far, 0 where the Trainer does not count them (include_num_input_tokens_seen)."""
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)
