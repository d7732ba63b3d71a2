"""A training run on one device, from an empty or interrupted run directory to its last checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.config import Config
from draftline.data.conversations import write_rejects
from draftline.data.packing import Pack, build_pack, plan_packs
from draftline.errors import CheckpointError, ResumeError, RunError
from draftline.model.losses import LossSpec
from draftline.runlog import RunLog, provenance, source_diff
from draftline.runtime.compiled import CompileGate
from draftline.runtime.devices import describe_device, synchronize
from draftline.train.checkpoint import (
    Checkpoint,
    CheckpointWriter,
)
from draftline.train.inputs import Inputs, prepare
from draftline.train.interrupts import interrupts
from draftline.train.optim import MasterAdamW
from draftline.train.plan import plan_run
from draftline.train.resume import find_checkpoint
from draftline.train.start import feature_source, first_drafter
from draftline.train.step import PackTensors, TrainStep
from draftline.train.trackers import Trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trained:
    """How a run ended: `step` of `total`, whether it was interrupted, and its last checkpoint."""

    run_dir: Path
    checkpoint: Path
    step: int
    total: int
    interrupted: bool
    seconds: float


def train(
    config: Config,
    *,
    resume: bool = False,
    accept_changes: bool = False,
    choices: Choices | None = None,
    inputs: Inputs | None = None,
) -> Trained:
    """Trains as configured and returns where the last checkpoint is.

    `resume` continues the newest whole checkpoint of `run.dir`, bit for bit on a CPU; without it the
    directory must hold none. `inputs` are those of `prepare(config)` when the caller has them.
    Raises the errors of its parts; a failed step raises RunError and leaves the last checkpoint.
    """
    choices = choices or Choices(strict=config.run.strict_choices)
    run_dir = Path(config.run.dir)
    checkpoint = find_checkpoint(config, run_dir, resume, accept_changes)
    with RunLog(run_dir) as runlog:
        choices.follow(runlog.event)
        runlog.write("config.yaml", config.to_yaml())
        runlog.event("start", {"config": config.digest(), "resume": resume, **provenance()})
        if (diff := source_diff()) is not None:
            runlog.write("source.diff", diff)
        inputs = inputs or prepare(config, choices)
        runlog.event("device", {"device": describe_device(inputs.device)})
        log.info(inputs.summary())
        write_rejects(inputs.rejects, run_dir / "rejects.jsonl")
        with CompileGate(inputs.device, choices) as gate:
            run = _Run(config, inputs, choices, runlog, gate)
            if checkpoint is not None:
                run.load(checkpoint)
            return run.go()


class _Run:
    """The state of one run between its steps."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        choices: Choices,
        runlog: RunLog,
        gate: CompileGate,
    ) -> None:
        self.config, self.inputs, self.runlog, self.gate = config, inputs, runlog, gate
        self.lengths = [len(s.input_ids) for s in inputs.samples]
        self.plan = plan_run(config, inputs, self._packs(0))
        for line in (*self.plan.lines(), f"device: {describe_device(inputs.device)}"):
            log.info(line)
        self.source = feature_source(config, inputs)
        self.drafter = first_drafter(config, inputs, self.source, choices)
        self.optimizer = MasterAdamW(
            self.drafter,
            peak=config.train.learning_rate,
            total_steps=self.plan.steps,
            warmup_ratio=config.train.warmup_ratio,
            min_ratio=config.train.min_lr_ratio,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            clip=config.train.clip,
            ema=config.train.ema,
            working_dtype=inputs.target.dtype,
        )
        self.generator = torch.Generator(inputs.device).manual_seed(config.run.seed + 1)
        self.step = TrainStep(
            self.drafter,
            self.optimizer,
            inputs.target,
            gate,
            loss=LossSpec(
                kind=config.loss.kind,
                gamma=config.gamma,
                alpha=config.loss.alpha,
                soft_labels=config.loss.soft_labels,
                chunk_rows=config.loss.chunk_rows,
            ),
            max_anchors=config.max_anchors,
            token_ids=inputs.token_ids,
            noise=config.features.noise,
            generator=self.generator,
        )
        self.writer = CheckpointWriter(
            runlog.directory / "checkpoints", config.train.keep_checkpoints
        )
        self.done_steps = 0
        self.epoch = 0
        self.next_pack = 0
        self._saved_step: int | None = None
        self._spent_before = 0.0
        self._began = time.perf_counter()

    def load(self, checkpoint: Checkpoint) -> None:
        """Takes up the state that a checkpoint holds."""
        state = checkpoint.state
        if state["features"] != self.inputs.key:
            raise ResumeError(
                f"{checkpoint.path} was trained on other data, another target or other taps (files "
                "behind the same names may have changed); start a new run"
            )
        tensors = checkpoint.tensors
        self.drafter.feature_scale.copy_(tensors["drafter"]["feature_scale"])
        optimizer = dict(tensors["optimizer"])
        self.generator.set_state(optimizer.pop("generator"))
        masters = tensors.get("masters", tensors["drafter"])
        self.optimizer.load(masters, optimizer)
        self.done_steps, self.epoch = checkpoint.step, int(state["epoch"])
        self.next_pack = int(state["next_pack"])
        self._spent_before = float(state["seconds"])
        log.info("resumed %s", checkpoint.path)

    def go(self) -> Trained:
        """Runs to the last step, or to the next step boundary after Ctrl-C."""
        config, total = self.config, self.plan.steps
        self._fill_cache()
        with interrupts() as interrupted:
            packs = self._remaining()
            self._warm()
            self._began = time.perf_counter()
            trackers = Trackers(
                self.runlog, config.train.trackers, config.model_dump(mode="json"), total
            )
            pending: tuple[int, int, float] | None = None
            logged, since = self.done_steps, time.perf_counter()
            with trackers:
                while self.done_steps < total and not interrupted.is_set():
                    pack = next(packs)
                    self.step(self._tensors(pack))
                    self.done_steps += 1
                    if pending is not None:
                        self._log(trackers, *pending)
                        pending = None
                    if self.done_steps % config.train.log_every == 0 or self.done_steps == total:
                        self.step.totals.begin_read()
                        now = time.perf_counter()
                        pending = (self.done_steps, self.done_steps - logged, now - since)
                        logged, since = self.done_steps, now
                    if self.done_steps % config.train.checkpoint_every == 0:
                        self._save()
                if pending is not None:
                    self._log(trackers, *pending)
            synchronize(self.inputs.device)
            self.gate.check()
            stopped = interrupted.is_set() and self.done_steps < total
            return self._finish(stopped)

    def _finish(self, interrupted: bool) -> Trained:
        self.writer.wait()
        if self._saved_step != self.done_steps or self.writer.failure is not None:
            self._save()
            self.writer.wait()
        if self.writer.failure is not None or self.writer.last is None:
            raise CheckpointError(f"the run's last state is lost: {self.writer.failure}")
        seconds = self._seconds()
        self.runlog.event(
            "end", {"step": self.done_steps, "interrupted": interrupted, "seconds": seconds}
        )
        return Trained(
            run_dir=self.runlog.directory,
            checkpoint=self.writer.last,
            step=self.done_steps,
            total=self.plan.steps,
            interrupted=interrupted,
            seconds=seconds,
        )

    def _seconds(self) -> float:
        return self._spent_before + time.perf_counter() - self._began

    def _packs(self, epoch: int) -> Any:
        return plan_packs(
            self.lengths,
            token_budget=self.config.token_budget,
            max_batch_size=self.config.max_batch_size,
            seed=self.config.run.seed,
            epoch=epoch,
        )

    def _remaining(self) -> Iterator[Pack]:
        while True:
            packs = self._packs(self.epoch).packs
            while self.next_pack < len(packs):
                self.next_pack += 1
                yield packs[self.next_pack - 1]
            self.epoch, self.next_pack = self.epoch + 1, 0

    def _tensors(self, pack: Pack) -> PackTensors:
        arrays = build_pack(
            self.inputs.samples, pack, self.config.token_budget, self.config.block_size
        )
        features, last_hidden = self.source.pack(
            self.inputs.samples, pack, self.config.token_budget
        )
        return PackTensors(
            **PackTensors.move(arrays, self.inputs.device),
            features=features,
            last_hidden=last_hidden,
        )

    def _fill_cache(self) -> None:
        config = self.config
        if config.features.source == "online":
            return
        folder = None
        if config.features.source == "disk":
            folder = Path(config.features.dir or self.runlog.directory / "features")
        began = time.perf_counter()
        shown = 0

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if done * 10 // total > shown:
                shown = done * 10 // total
                log.info("features: %d of %d tokens", done, total)

        self.source.fill(self.inputs.samples, folder, self.inputs.key, progress)
        log.info("features: ready in %.0f s", time.perf_counter() - began)

    def _warm(self) -> None:
        self.step.warm(self._tensors(self._packs(0).packs[0]))
        synchronize(self.inputs.device)
        self.gate.seal()

    def _log(self, trackers: Trackers, step: int, steps: int, seconds: float) -> None:
        values: dict[str, Any] = self.step.totals.finish_read()
        if values["bad_steps"]:
            raise RunError(
                f"{values['bad_steps']:.0f} of the {steps} steps up to {step} had a non-finite loss "
                "or gradient (those updates were skipped); lower train.learning_rate or look for "
                "damaged features, then continue with --resume"
            )
        self.gate.check()
        rate = steps / max(seconds, 1e-9)
        values |= {
            # Worked out on the host: reading the device's would wait for the step just queued.
            "learning_rate": float(self.optimizer.rate_at(torch.tensor(step - 1))),
            "epoch": self.epoch,
            "seconds": self._seconds(),
            "step_ms": 1000 / rate,
            "tokens_per_s": rate * self.config.token_budget,
            "rows_per_s": rate * self.plan.rows,
            "eta_s": (self.plan.steps - step) / rate,
        }
        trackers.metrics(step, values)

    def _save(self) -> None:
        drafter: dict[str, Tensor] = {
            **self.optimizer.best_tensors(),
            "feature_scale": self.drafter.feature_scale,
        }
        if self.inputs.token_ids is not None:
            drafter["token_ids"] = self.inputs.token_ids
        optimizer = {**self.optimizer.state(), "generator": self.generator.get_state()}
        groups = {"drafter": drafter, "optimizer": optimizer}
        if self.optimizer.average is not None:
            groups["masters"] = self.optimizer.master_tensors()
        state = {
            "config": self.config.model_dump(mode="json"),
            "config_digest": self.config.digest(),
            "shape": self.inputs.shape.to_dict(),
            "taps": list(self.inputs.target.taps),
            "num_target_layers": self.inputs.target.num_layers,
            "features": self.inputs.key,
            "epoch": self.epoch,
            "next_pack": self.next_pack,
            "total_steps": self.plan.steps,
            "seconds": self._seconds(),
            "provenance": provenance(),
        }
        self.writer.save(self.done_steps, groups, state)
        self._saved_step = self.done_steps
        self.runlog.event("checkpoint", {"step": self.done_steps})
