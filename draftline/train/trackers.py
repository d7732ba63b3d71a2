"""Where a run's numbers go: the JSONL log, TensorBoard, Weights & Biases, and the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.errors import ConfigError
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
    """A bar on a terminal; a line now and then where the output is a file."""

    def __init__(self, total: int, every: int = 20) -> None:
        self._console = Console(stderr=True)
        self._total = total
        self._lines = max(1, total // every)
        self._next_line = 0
        self._heldout = ""
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
        measured = "accept_length_heldout" in values
        if measured:
            self._heldout = (
                f"held-out {values['accept_length_heldout']:.3f} uniform / "
                f"{values['accept_length_chain']:.3f} chain  "
            )
        text = (
            f"loss {values['loss']:.3f}  accept {values['accept_length_forced']:.3f}  "
            f"{self._heldout}{values['tokens_per_s']:.0f} tok/s  {values['rows_per_s']:.0f} rows/s"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
        elif step >= self._next_line or step == self._total or measured:
            remaining = values["eta_s"]
            self._console.print(
                f"step {step}/{self._total}  {text}  ETA {remaining / 60:.1f} min", highlight=False
            )
            self._next_line = step + self._lines

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
