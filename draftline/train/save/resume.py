"""Whether a run is continued, from where, and with what state on every machine."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoint.state import RunState
from draftline.checkpoint.store import Checkpoint, checkpoint_paths, latest_checkpoint
from draftline.config.load import changed_keys
from draftline.config.schema import Config
from draftline.errors import ResumeError
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.identity import digest_in
from draftline.runtime.nodes import Nodes
from draftline.train.features.feed import Position
from draftline.train.save.snapshot import load_state
from draftline.train.step.step import TrainStep

log = logging.getLogger(__name__)

# Keys that say where, how often and what is watched, not what is computed.
_FREE_KEYS = (
    "run.dir",
    "run.device",
    "run.strict_choices",
    "topology.",
    "signal.",
    "evaluate.",
    "target.capture",
    "features.source",
    "features.dir",
    # Compared as a number of packs, which workers and this key make together.
    "train.packs_per_step",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.trackers",
)


def find_checkpoint(
    config: Config, run_dir: Path, resume: bool, accept_changes: bool
) -> Checkpoint | None:
    """The checkpoint that a run of `config` starts from, or None for a new run.

    With `resume` a directory that holds none starts a new run, which is said. Raises ResumeError when
    it holds one and `resume` is not asked for, and when the configuration differs in more than where
    and how often it writes.
    """
    present = checkpoint_paths(run_dir / "checkpoints")
    if not resume:
        if present:
            raise ResumeError(
                f"{run_dir} already holds {present[0].name}; continue it with --resume, or choose "
                "another run.dir"
            )
        return None
    if not present:
        log.info("--resume: %s holds no checkpoint, so this run starts from the beginning", run_dir)
        return None
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    config = kept_date(config, checkpoint)
    changes = {
        key: pair
        for key, pair in changed_keys(
            checkpoint.state.config.model_dump(mode="json"), config.model_dump(mode="json")
        ).items()
        if not key.startswith(_FREE_KEYS)
    }
    if changes and not accept_changes:
        listed = "; ".join(f"{k}: {old!r} -> {new!r}" for k, (old, new) in changes.items())
        raise ResumeError(
            f"{checkpoint.path} was trained with another configuration ({listed}); restore those "
            "keys, or continue all the same with --accept-changes"
        )
    return checkpoint


def kept_date(config: Config, checkpoint: Checkpoint) -> Config:
    """`config` with the day that the checkpoint's prompts were written on, unless it names one."""
    kept = checkpoint.state.config.data.date
    return config if kept is None or config.data.date is not None else dated(config, kept)


def dated(config: Config, date: datetime.date | None) -> Config:
    """`config` with `data.date` set."""
    return config.model_copy(update={"data": config.data.model_copy(update={"date": date})})


def is_finished(checkpoint: Checkpoint, config: Config) -> bool:
    """Whether the run of `checkpoint` has done all steps or epochs that `config` asks for."""
    done, asked = checkpoint.state.config.train, config.train
    same = (done.steps, done.epochs) == (asked.steps, asked.epochs)
    return same and checkpoint.step >= checkpoint.state.total_steps


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: the pack of its next step, the `step`s and `seconds` that it has behind it."""

    position: Position
    step: int
    seconds: float


BEGINNING = Start(Position(0, 0, 0), 0, 0.0)


def take_up(
    checkpoint: Checkpoint | None,
    steps: Sequence[TrainStep],
    nodes: Nodes | None,
    *,
    features: str,
    packs_per_step: int,
    accept_changes: bool,
) -> Start:
    """Puts the state that a checkpoint holds into every drafter of every machine (machine 0 has the
    checkpoint); returns where it was. Raises ResumeError when a run with these features and packs per
    step cannot go on from it."""
    state: RunState | None = None
    if checkpoint is not None:
        state = checkpoint.state
        check_state(checkpoint, features, packs_per_step, accept_changes)
        _check_weights(checkpoint, steps[0].drafter)
        for step in steps:
            step.drafter.feature_scale.copy_(checkpoint.tensors["drafter"]["feature_scale"])
            load_state(step.optimizer, checkpoint.tensors)
        log.info("resumed %s", checkpoint.path)
    if nodes is not None:
        state = nodes.broadcast_object(state)
        _share_state(nodes, steps)
    if state is None:
        return BEGINNING
    place = Position(state.next_number, state.epoch, state.next_pack)
    return Start(place, state.step, state.seconds)


def check_state(
    checkpoint: Checkpoint, features: str, packs_per_step: int, accept_changes: bool
) -> None:
    state = checkpoint.state
    if digest_in(state.features) not in (None, digest_in(features)):
        raise ResumeError(
            f"{checkpoint.path} was trained for another target: the weights behind target.path are not "
            "those it began with; restore them, or start a new run in another run.dir"
        )
    if state.features != features:
        raise ResumeError(
            f"{checkpoint.path} was trained on other data, other taps, another target.dtype or "
            "data.date (files behind the same names may have changed); start a new run"
        )
    if state.packs_per_step != packs_per_step and not accept_changes:
        raise ResumeError(
            f"{checkpoint.path} was trained with {state.packs_per_step} packs per step, these "
            f"workers take {packs_per_step}; set train.packs_per_step={state.packs_per_step}, or "
            "continue all the same with --accept-changes"
        )


def _check_weights(checkpoint: Checkpoint, drafter: Drafter) -> None:
    """Raises ResumeError when `drafter` has other weights than the checkpoint's, whatever was accepted:
    some would have no state to go on from, and others' would be lost."""
    saved = checkpoint.tensors["drafter"]
    beside = {"token_ids", *dict(drafter.named_buffers())}
    had = {name: tuple(t.shape) for name, t in saved.items() if name not in beside}
    if had == {name: tuple(t.shape) for name, t in drafter.named_parameters()}:
        return
    changed = changed_keys(checkpoint.state.shape.to_dict(), drafter.shape.to_dict())
    listed = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
    raise ResumeError(
        f"{checkpoint.path} has a drafter whose weights do not fit this one ({listed}); restore its "
        "shape, or start a new run in another run.dir"
    )


def _share_state(nodes: Nodes, steps: Sequence[TrainStep]) -> None:
    """Gives machine 0's first drafter's state to every drafter of every machine."""
    lead = steps[0]
    fixed = (lead.drafter.feature_scale, lead.optimizer.step_count, lead.optimizer.working)
    for tensor in (*lead.optimizer.buffers().values(), *fixed):
        nodes.broadcast(tensor)
    for other in steps[1:]:
        other.drafter.feature_scale.copy_(lead.drafter.feature_scale)
        other.optimizer.copy_from(lead.optimizer)
