"""Checkpoints that survive a crash, a full disk and half a file.

A checkpoint is a directory `step-00000123` with safetensors files, `state.json`, which names every one
of these's SHA-256, and `state.json.sha256`, which holds its own (`sha256sum -c` reads it). It is written
under another name and renamed when it is complete and on disk, so a directory of that name is a whole
checkpoint or was damaged later, which the hashes show: no byte of it is outside of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.checkpoint.state import RunState
from draftline.errors import CheckpointError, ConfigError
from draftline.files import open_to_others, sync

log = logging.getLogger(__name__)

# Raised when a checkpoint's files mean something else than before. 1 had no number, and no hash of its
# state.
_FORMAT = 2
# What reading a file that is not as it was written can raise.
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors`: file stem -> named tensors on the CPU; `state`: everything else."""

    path: Path
    state: RunState
    tensors: dict[str, dict[str, Tensor]]

    @property
    def step(self) -> int:
        return self.state.step


def checkpoint_paths(directory: Path) -> list[Path]:
    """Checkpoints of a run, newest first; raises ConfigError where they may not be listed."""
    try:
        found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise _not_ours(directory, error) from None
    return sorted(found, key=lambda p: p.name, reverse=True)


def save_checkpoint(
    directory: Path,
    state: RunState,
    tensors: Mapping[str, Mapping[str, Tensor]],
    keep: int,
) -> Path:
    """Writes `directory/step-...` atomically, then removes the oldest beyond `keep`.

    Nobody else may write into `directory` meanwhile: what an earlier process left there half written is
    removed. Raises CheckpointError, with the older checkpoints untouched, when it cannot be written.
    """
    path = directory / f"step-{state.step:08d}"
    scratch, aside = (directory / f".{path.name}{end}.tmp" for end in ("", ".old"))
    try:
        for left in directory.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        scratch.mkdir(parents=True)
        digests = {}
        for stem, group in tensors.items():
            file = scratch / f"{stem}.safetensors"
            save_file({k: v.contiguous() for k, v in group.items()}, file)
            sync(file)
            digests[file.name] = _digest(file)
        text = json.dumps({"format": _FORMAT, **state.to_json(), "sha256": digests}, indent=1)
        (scratch / "state.json").write_text(text, encoding="utf-8")
        _seal(scratch).write_text(_seal_text(text.encode()), encoding="ascii")
        open_to_others(scratch)
        for file in (scratch / "state.json", _seal(scratch), scratch):
            sync(file)
        if path.exists():
            path.replace(aside)
        scratch.replace(path)
        sync(directory)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {path} could not be written: {error}; earlier checkpoints are untouched"
        ) from None
    # Damaged ones that a resume passed over can be newer; they take no place from this one.
    older = [p for p in checkpoint_paths(directory) if p.name < path.name]
    for old in older[keep - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_checkpoint(path: Path, only: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint at `path`, every file that is read compared with its hash.

    `only`: the stems of the files that are wanted, None for all; the others are not opened. Raises
    CheckpointError for a damaged one and one of another format or version, ConfigError for one that this
    user may not read.
    """
    try:
        tree = _checked_state(path)
        tensors = {}
        for name, digest in tree["sha256"].items():
            stem = name.removesuffix(".safetensors")
            if only is not None and stem not in only:
                continue
            if _digest(path / name) != digest:
                raise ValueError(f"{name} does not have the hash it was written with")
            tensors[stem] = load_file(path / name)
        return Checkpoint(path, RunState.from_json(tree), tensors)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    except (*_BROKEN, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None


def _checked_state(path: Path) -> dict[str, Any]:
    """What `state.json` says, once its own hash is found right; raises as `load_checkpoint` does."""
    raw = (path / "state.json").read_bytes()
    try:
        seal = _seal(path).read_bytes()
    except FileNotFoundError:
        old = json.loads(raw)
        if "format" not in old and "sha256" in old:
            commit = old.get("provenance", {}).get("commit") or "unknown"
            raise CheckpointError(
                f"checkpoint {path} has format 1, whose state.json has no hash, so nothing can tell "
                f"whether it is as it was written; use the draftline that wrote it (commit {commit}), "
                "or train anew"
            ) from None
        raise
    if seal != _seal_text(raw).encode():
        raise ValueError(f"state.json does not have the hash in {_seal(path).name}")
    state: dict[str, Any] = json.loads(raw)
    if state["format"] != _FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {state['format']}, this draftline reads {_FORMAT}; use the "
            "draftline that wrote it"
        )
    # A copy may have any name, but one that says another step would pass for a newer or older state.
    if (name := _NAME.fullmatch(path.name)) and int(name[1]) != state["step"]:
        raise ValueError(f"it holds step {state['step']}: another checkpoint has got its name")
    return state


def latest_checkpoint(directory: Path) -> Checkpoint:
    """The newest checkpoint that is whole; says which damaged ones it passed over.

    Raises CheckpointError when there is none, ConfigError at one that this user may not read.
    """
    damaged = []
    for path in checkpoint_paths(directory):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s; falling back to the one before it", error)
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no whole checkpoint in {directory}: {'; '.join(damaged)}")
    raise CheckpointError(f"no checkpoint in {directory}")


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one at a time.

    A checkpoint that cannot be written (a full disk) is said and kept in `failure`; training goes
    on, because the weights in memory are worth more than the file. Any other error of the thread is
    raised by the next `wait` or `save`.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._crash: Exception | None = None
        self.failure: CheckpointError | None = None
        self.last: Path | None = None

    def save(
        self, state: RunState, groups: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    ) -> None:
        """Writes what `groups()` gives, called on the writer's thread; one write at a time."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(state, groups), name="checkpoint-writer"
        )
        self._thread.start()

    def _write(
        self, state: RunState, groups: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    ) -> None:
        try:
            self.last = save_checkpoint(self.directory, state, groups(), self._keep)
            self.failure = None
        except CheckpointError as error:
            self.failure = error
            log.warning("%s; training goes on", error)
        except Exception as error:
            self._crash = error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether nothing is being written any more, waiting at most `timeout_s` for it."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash
        return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(path: Path) -> Path:
    return path / "state.json.sha256"


def _seal_text(state: bytes) -> str:
    return f"{hashlib.sha256(state).hexdigest()}  state.json\n"


def _not_ours(path: Path, error: PermissionError) -> ConfigError:
    """A file that this user may not read is no damage, and an older checkpoint no substitute."""
    return ConfigError(
        f"checkpoint {path} cannot be read by user {os.getuid()}: {error.strerror} "
        f"({error.filename}); have its owner run chmod -R a+rX on it, or run as its owner"
    )
