"""Where a run's numbers go: the JSONL log, TensorBoard, Weights & Biases, and the terminal."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftline.errors import ConfigError
from draftline.progress import QUIET_S
from draftline.runlog import RunLog

log = logging.getLogger(__name__)


class Trackers:
    """Sends each metrics line everywhere; a context manager that owns the writers. `shown` is another.

    A tracker that fails, as on a full disk, is dropped: said once, and the run goes on without it. The
    JSONL log counts the lines it loses and goes on too.
    """

    def __init__(
        self,
        runlog: RunLog,
        names: Sequence[str],
        config: Mapping[str, Any],
        total: int,
        *,
        quiet: bool = False,
    ) -> None:
        """`names` are those of train.trackers; `quiet` shows nothing on the terminal.

        Raises ConfigError for a tracker that cannot be started.
        """
        self._runlog = runlog
        self._trackers: dict[str, TensorBoardFile | WandbRun] = {}
        if "tensorboard" in names:
            self._trackers["tensorboard"] = TensorBoardFile(runlog.directory / "tensorboard")
        if "wandb" in names:
            self._trackers["wandb"] = WandbRun(runlog.directory, config)
        self._bar = None if quiet else TerminalProgress(total)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the metrics up to and including `step`."""
        self._runlog.metrics({"step": step, **values})
        flat = {k: v for k, v in values.items() if isinstance(v, int | float)}
        for slot, accuracy in enumerate(values.get("slot_accuracy", ()), 1):
            flat[f"slot_accuracy/{slot}"] = accuracy
        finite = {k: float(v) for k, v in flat.items() if math.isfinite(v)}
        for name, tracker in list(self._trackers.items()):
            if not self._works(name, partial(tracker.write, step, finite)):
                del self._trackers[name]
        if self._bar is not None and not self._works(
            "the terminal", partial(self._bar.update, step, values)
        ):
            self._bar = None

    def _works(self, name: str, call: Callable[[], None]) -> bool:
        # Whatever a library raises, from a network or a service of its own: no number of a tracker is
        # worth the run.
        try:
            call()
        except Exception as error:
            words = error.strerror if isinstance(error, OSError) else None
            log.warning(
                "%s failed (%s); the run goes on without it, and metrics.jsonl keeps the numbers",
                name,
                words or f"{type(error).__name__}: {error}",
            )
            self._runlog.event("tracker_dropped", {"tracker": name, "error": str(error)})
            return False
        return True

    def reached(self, step: int) -> None:
        """Shows `step`, whose numbers are not known yet, on the terminal; meant to be called often."""
        if self._bar is not None:
            try:
                self._bar.reached(step)
            except OSError:  # the terminal is gone, the run is not
                self._bar = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Shows progress on the terminal inside."""
        if self._bar is not None:
            self._bar.start()
        try:
            yield
        finally:
            if self._bar is not None:
                self._works("the terminal", self._bar.stop)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in self._trackers.items():
            self._works(name, partial(tracker.close, failed=kind is not None))


class TensorBoardFile:
    """An event file that TensorBoard reads, written by whoever calls.

    torch's SummaryWriter writes on a thread of its own, whose errors come late, once as a traceback and
    once out of a later call.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        now = time.time()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(now):010d}.draftline.{os.getpid()}"
            self._file = (directory / name).open("ab")
        except OSError as error:
            raise ConfigError(
                f"train.trackers: {directory} cannot be written ({error.strerror}); make room or set "
                "train.trackers=[]"
            ) from None
        self._records = RecordWriter(self._file)
        self._header: Event | None = Event(wall_time=now, file_version="brain.Event:2")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One event with every value, on its way to the disk when this returns; raises OSError."""
        event = self._event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        try:
            if self._header is not None:
                self._put(self._header)
                self._header = None
            self._put(event)
            self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def close(self, *, failed: bool) -> None:
        self._file.close()


class WandbRun:
    """A run at Weights & Biases."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb

            self._run: Any = wandb.init(
                project="draftline", dir=str(directory), config=dict(config)
            )
        except Exception as error:
            raise ConfigError(
                f"train.trackers: wandb cannot be started ({error}); try `wandb login`, or set "
                "train.trackers=[tensorboard]"
            ) from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class _Console(Console):
    """Standard error, of which a reader that went away ends nothing."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class TerminalProgress:
    """A bar on a terminal; where the output is a file, one line every ten seconds, and the last one."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._console = _Console(stderr=True)
        self._total, self._clock = total, clock
        # When a line was printed, and from which step and time on rates are counted.
        self._said = self._clock()
        self._first: tuple[int, float] | None = None
        self._step = 0
        self._text = self._rate = self._heldout = ""
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
        measured = "accept_length_heldout" in values
        if measured:
            self._heldout = (
                f"held-out {values['accept_length_heldout']:.3f} uniform / "
                f"{values['accept_length_chain']:.3f} chain  "
            )
        self._text = (
            f"loss {values['loss']:.3f}  accept {values['accept_length_forced']:.3f}  "
            f"{self._heldout}{values['tokens_per_s']:.0f} tok/s  {values['rows_per_s']:.0f} rows/s"
        )
        self._eta_s = values["eta_s"]
        self._show(max(step, self._step), self._text, now=measured or step == self._total)

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
            self._rate = f"{step_s:.2f} s per step"
            self._eta_s = step_s * (self._total - step)
        first_done = self._step == begin < step
        self._step = step
        self._show(step, self._text or self._rate, now=first_done)

    def _show(self, step: int, text: str, now: bool = False) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
        elif now or self._clock() >= self._said + QUIET_S:
            eta = f"  ETA {self._eta_s / 60:.1f} min" if self._eta_s else ""
            # A file is as wide as its lines.
            line = f"step {step}/{self._total}  {text}{eta}"
            self._console.print(line, highlight=False, soft_wrap=True)
            self._said = self._clock()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
