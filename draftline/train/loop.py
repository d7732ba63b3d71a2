"""A training run, from an empty or interrupted run directory to its last checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.data.conversations import write_rejects
from draftline.environment import provenance, source_diff
from draftline.errors import UserError
from draftline.library_warnings import LIBRARY_WARNINGS
from draftline.locks import hold
from draftline.model.target.target import Target
from draftline.runlog import RunLog
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.devices import visible_devices
from draftline.runtime.nodes import Nodes
from draftline.runtime.workers import out_of_memory
from draftline.train.interrupts import ending, interrupts
from draftline.train.plan.inputs import Inputs, prepare
from draftline.train.plan.named import check_named
from draftline.train.plan.placement import device_type
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.report.trackers import Trackers
from draftline.train.run import Run, Trained, plan_here
from draftline.train.save.resume import dated, find_checkpoint, is_finished, kept_date

log = logging.getLogger(__name__)

# What a run writes before it holds anything that was computed.
_LOGS = {
    ".lock",
    "config.yaml",
    "events.jsonl",
    "metrics.jsonl",
    "rejects.jsonl",
    "signal.jsonl",
    "source.diff",
}


def train(
    config: Config,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    choices: Choices | None = None,
    inputs: Inputs | None = None,
    target: Target | None = None,
) -> Trained:
    """Trains as configured and returns where the last checkpoint is.

    `resume` continues the newest whole checkpoint of `run.dir`, bit for bit on a CPU; without it the
    directory must hold none. `inputs` are those of `prepare(config)` and `target` the loaded target
    when the caller has them. Under torchrun every machine calls this. A
    directory that another training is writing is a ConfigError that names it. Raises the errors of its
    parts; a failed step raises RunError and leaves the last checkpoint.
    """
    choices = choices or Choices(strict=config.run.strict_choices)
    available = visible_devices(choices)
    kind = device_type(config, available)
    assert kind in ("cpu", "cuda")
    nodes = Nodes.from_environment(kind, config.topology.deadline_s)  # type: ignore[arg-type]
    with (
        ending(),
        nodes or contextlib.nullcontext(),
        _no_trace_of_a_refusal(Path(config.run.dir)),
    ):
        try:
            with _alone(config, nodes):
                return _train(config, resume, accept_changes, choices, inputs, target, nodes, kind)
        except Exception as error:
            if nodes is not None:
                nodes.fail(str(error))
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory("before the first step", error) from error
            raise


def _alone(config: Config, nodes: Nodes | None) -> contextlib.AbstractContextManager[None]:
    """Keeps a second training out of the run directory. The first machine holds it for all: the others
    write below it, and start and end with it."""
    if nodes is not None and not nodes.is_first:
        return contextlib.nullcontext()
    directory = Path(config.run.dir)
    instead = "choose another with run.dir=PATH"
    return hold(directory / ".lock", f"run directory {directory}", instead)


@contextlib.contextmanager
def _no_trace_of_a_refusal(run_dir: Path) -> Iterator[None]:
    """Takes away the run directory that a refused run has made, unless there is more than logs in it."""
    made = not run_dir.exists()
    try:
        yield
    except UserError:
        left = list(run_dir.iterdir()) if made and run_dir.is_dir() else []
        if (
            made
            and run_dir.is_dir()
            and all(path.name in _LOGS and path.is_file() for path in left)
        ):
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _train(
    config: Config,
    resume: bool,
    accept_changes: bool,
    choices: Choices,
    inputs: Inputs | None,
    target: Target | None,
    nodes: Nodes | None,
    kind: str,
) -> Trained:
    run_dir = Path(config.run.dir)
    first = nodes is None or nodes.is_first
    # Of the code that runs, whatever becomes of its files later.
    made_by = provenance()
    checkpoint = find_checkpoint(config, run_dir, resume, accept_changes) if first else None
    if nodes is None and checkpoint is not None and is_finished(checkpoint, config):
        log.info("%s: all steps are done, nothing is left to train", checkpoint.path)
        return Trained(
            run_dir=run_dir,
            checkpoint=checkpoint.path,
            step=checkpoint.step,
            total=checkpoint.step,
            interrupted=False,
            seconds=checkpoint.state.seconds,
        )
    if checkpoint is not None:
        config = kept_date(config, checkpoint)
    today = datetime.date.today()
    if nodes is not None:
        # Each machine has a clock of its own, and near midnight another day.
        today, date = nodes.broadcast_object((today, config.data.date))
        config = dated(config, date)
    check_named(config, prompts=False)
    own_dir = run_dir if first or nodes is None else run_dir / f"machine-{nodes.rank}"
    with (
        RunLog(own_dir) as runlog,
        LIBRARY_WARNINGS.written_to(runlog.event, str(own_dir / "events.jsonl")),
    ):
        choices.follow(runlog.event)
        if not first:
            # What the first machine says holds for all; warnings are each one's own.
            logging.getLogger("draftline").setLevel(logging.WARNING)
        runlog.write("config.yaml", config.to_yaml())
        runlog.event("start", {"config": config.digest(), "resume": resume, **made_by})
        if (diff := source_diff()) is not None:
            runlog.write("source.diff", diff)
        try:
            inputs = inputs or prepare(config, choices, today=today)
            if inputs.date != config.data.date and inputs.date is not None:
                config = dated(config, inputs.date)
                runlog.write("config.yaml", config.to_yaml())
            log.info(inputs.summary())
            write_rejects(inputs.rejects, own_dir / "rejects.jsonl")
            with (
                CompileGate(choices, deadline_s=config.topology.deadline_s) as gate,
                MemoryWatch(config.signal, runlog, kind, choices) as watch,
            ):
                planned = plan_here(config, inputs, choices, runlog, nodes)
                names = config.train.trackers if first else ()
                tree = config.model_dump(mode="json")
                # A tracker that cannot be started is known before anything is loaded.
                with Trackers(runlog, names, tree, planned.plan.steps, quiet=not first) as trackers:
                    run = Run(
                        config,
                        inputs,
                        planned,
                        choices=choices,
                        runlog=runlog,
                        trackers=trackers,
                        gate=gate,
                        watch=watch,
                        nodes=nodes,
                        target=target,
                        made_by=made_by,
                    )
                    run.load(checkpoint, accept_changes)
                    checkpoint = None  # its tensors are as large as the optimizer
                    # To the end of the last checkpoint: a signal while that is written must not lose it.
                    with interrupts() as interrupted:
                        return run.go(interrupted)
        except BaseException as error:
            runlog.event("failed", {"error": f"{type(error).__name__}: {error}"})
            raise
