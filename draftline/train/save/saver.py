"""The checkpoints of one run: what is in them, and that the last one is there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from draftline.checkpoint.store import CheckpointWriter
from draftline.config.schema import Config
from draftline.environment import provenance
from draftline.errors import CheckpointError
from draftline.runlog import RunLog
from draftline.train.features.feed import Position
from draftline.train.plan.inputs import Inputs
from draftline.train.save.snapshot import Snapshot
from draftline.train.step.step import TrainStep


class Saver(AbstractContextManager["Saver"]):
    """Writes the lead drafter's state, which is every drafter's, in the background.

    Leaving the context by an error finishes the checkpoint that is being written; a second Ctrl-C
    waits for nothing.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        lead: TrainStep,
        runlog: RunLog,
        *,
        features: str,
        packs_per_step: int,
        total_steps: int,
    ) -> None:
        self._config, self._inputs, self._runlog = config, inputs, runlog
        self._key = features
        self._packs_per_step, self._total_steps = packs_per_step, total_steps
        fixed = {"feature_scale": lead.drafter.feature_scale}
        if inputs.token_ids is not None:
            fixed["token_ids"] = inputs.token_ids
        self._snapshot = Snapshot(lead.optimizer, fixed)
        directory = runlog.directory / "checkpoints"
        self._writer = CheckpointWriter(directory, config.train.keep_checkpoints)
        self._saved_step: int | None = None

    def save(self, step: int, position: Position, seconds: float) -> None:
        """Queues a checkpoint after `step` steps; the next step begins at `position`."""
        state = {
            "config": self._config.model_dump(mode="json"),
            "config_digest": self._config.digest(),
            "shape": self._inputs.shape.to_dict(),
            "taps": list(self._inputs.facts.taps),
            "num_target_layers": self._inputs.facts.num_layers,
            "features": self._key,
            "epoch": position.epoch,
            "next_pack": position.place,
            "next_number": position.number,
            "packs_per_step": self._packs_per_step,
            "total_steps": self._total_steps,
            "seconds": seconds,
            "provenance": provenance(),
        }
        # The buffers of the snapshot are in use until the last one is written.
        self._writer.wait()
        self._snapshot.begin()
        self._writer.save(step, self._snapshot.groups, state)
        self._saved_step = step
        self._runlog.event("checkpoint", {"step": step})

    def end(self) -> Exception | None:
        """Waits for the checkpoint that is being written; returns why it could not be."""
        try:
            self._writer.wait()
        except Exception as error:
            return error
        return self._writer.failure

    def finish(self, step: int, position: Position, seconds: float) -> Path:
        """The checkpoint of the last `step`, written if it is not yet; raises CheckpointError."""
        failure = self.end()
        if self._saved_step != step or failure is not None:
            self.save(step, position, seconds)
            failure = self.end()
        if failure is not None or self._writer.last is None:
            raise CheckpointError(f"the run's last state is lost: {failure}")
        return self._writer.last

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.end()
