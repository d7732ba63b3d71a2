"""Where a run's numbers go: the JSONL log, TensorBoard, Weights & Biases, and the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.errors import ConfigError
from draftline.progress import QUIET_S
from draftline.runlog import RunLog


class Trackers:
    """Sends each metrics line everywhere; a context manager that owns the writers."""

    def __init__(
        self,
        runlog: RunLog,
        names: Sequence[str],
        config: Mapping[str, Any],
        total: int,
        *,
        quiet: bool = False,
    ) -> None:
        """`names` are those of train.trackers; `quiet` shows nothing on the terminal."""
        self._runlog = runlog
        self._tensorboard: Any = None
        self._wandb: Any = None
        if "tensorboard" in names:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(runlog.directory / "tensorboard"))
        if "wandb" in names:
            try:
                import wandb
            except ImportError:
                raise ConfigError(
                    "train.trackers names wandb, which is not installed: "
                    "pip install 'draftline[wandb]'"
                ) from None
            self._wandb = wandb.init(
                project="draftline", dir=str(runlog.directory), config=dict(config)
            )
        self._bar = None if quiet else TerminalProgress(total)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the metrics up to and including `step`."""
        self._runlog.metrics({"step": step, **values})
        flat = {k: v for k, v in values.items() if isinstance(v, int | float)}
        for slot, accuracy in enumerate(values.get("slot_accuracy", ()), 1):
            flat[f"slot_accuracy/{slot}"] = accuracy
        finite = {k: v for k, v in flat.items() if math.isfinite(v)}
        if self._tensorboard is not None:
            for name, value in finite.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(finite, step=step)
        if self._bar is not None:
            self._bar.update(step, values)

    def reached(self, step: int) -> None:
        """Shows `step`, whose numbers are not known yet, on the terminal; meant to be called often."""
        if self._bar is not None:
            try:
                self._bar.reached(step)
            except OSError:  # the terminal is gone, the run is not
                self._bar = None

    def __enter__(self) -> Trackers:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)


class TerminalProgress:
    """A bar on a terminal; where the output is a file a line every ten seconds, and the last one."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._console = Console(stderr=True)
        self._total, self._clock = total, clock
        # When a line was printed, and from which step and time on rates are counted.
        self._said = self._clock()
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._text = self._rate = ""
        self._eta_s = 0.0
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=total, text="")

    def start(self) -> None:
        if self._progress is not None:
            self._progress.start()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        self._text = (
            f"loss {values['loss']:.3f}  accept {values['accept_length_forced']:.3f}  "
            f"{values['tokens_per_s']:.0f} tok/s  {values['rows_per_s']:.0f} rows/s"
        )
        self._eta_s = values["eta_s"]
        self._show(max(step, self._step), self._text, now=step == self._total)

    def reached(self, step: int) -> None:
        """Shows `step` with the rate from the first step on, until numbers are known."""
        now = self._clock()
        if self._first is None:
            self._first, self._step = (step, now), step
        begin, since = self._first
        if step == begin:
            self._rate = f"the first step is under way, {now - since:.0f} s"
        elif step > self._step:
            step_s = (now - since) / (step - begin)
            self._rate = f"{step_s:.2f} s a step"
            self._eta_s = step_s * (self._total - step)
        first_done = self._step == begin < step
        self._step = step
        self._show(step, self._text or self._rate, now=first_done)

    def _show(self, step: int, text: str, now: bool = False) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
        elif now or self._clock() >= self._said + QUIET_S:
            eta = f"  ETA {self._eta_s / 60:.1f} min" if self._eta_s else ""
            self._console.print(f"step {step}/{self._total}  {text}{eta}", highlight=False)
            self._said = self._clock()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
