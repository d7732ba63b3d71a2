"""Whether, and from where, a run directory is continued."""

from __future__ import annotations

from pathlib import Path

from draftline.config import Config
from draftline.config_file import changed_keys
from draftline.errors import ResumeError
from draftline.train.checkpoint import Checkpoint, checkpoint_paths, latest_checkpoint

# Keys that say where and how often, not what is computed.
_FREE_KEYS = ("run.dir", "evaluate.", "train.log_every", "train.checkpoint_every",
              "train.keep_checkpoints", "train.trackers")  # fmt: skip


def find_checkpoint(
    config: Config, run_dir: Path, resume: bool, accept_changes: bool
) -> Checkpoint | None:
    """The checkpoint that a run of `config` starts from, or None for a new run.

    Raises ResumeError when the directory holds one and `resume` is not asked for, when it holds none
    and it is, and when the configuration differs in more than where and how often it writes.
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
        raise ResumeError(f"--resume: {run_dir} holds no checkpoint; start it without --resume")
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    changes = {
        key: pair
        for key, pair in changed_keys(
            checkpoint.state["config"], config.model_dump(mode="json")
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
