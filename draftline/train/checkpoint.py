"""Checkpoints that survive a crash, a full disk and half a file.

A checkpoint is a directory `step-00000123` with safetensors files and `state.json`, which names every
file's SHA-256. It is written under another name and renamed when it is complete and on disk, so a
directory of that name is a whole checkpoint or was damaged later, which the hashes show.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.errors import CheckpointError

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors`: file stem -> named tensors on the CPU; `state`: everything else, JSON-clean."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def checkpoint_paths(directory: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: p.name, reverse=True)


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes `directory/step-...` atomically, then removes the oldest beyond `keep`.

    Raises CheckpointError, with the older checkpoints untouched, when it cannot be written.
    """
    path = directory / f"step-{step:08d}"
    scratch = directory / f".{path.name}.tmp"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        digests = {}
        for stem, group in tensors.items():
            file = scratch / f"{stem}.safetensors"
            save_file({k: v.contiguous() for k, v in group.items()}, file)
            _sync(file)
            digests[file.name] = _digest(file)
        text = json.dumps({**state, "step": step, "sha256": digests}, indent=1)
        (scratch / "state.json").write_text(text, encoding="utf-8")
        _sync(scratch / "state.json")
        if path.exists():
            shutil.rmtree(path)
        _sync(scratch)
        scratch.replace(path)
        _sync(directory)
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


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every file compared with its hash; raises CheckpointError."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        digests: dict[str, str] = state["sha256"]
        tensors = {}
        for name, digest in digests.items():
            if _digest(path / name) != digest:
                raise CheckpointError(f"{path / name} does not have the hash it was written with")
            tensors[name.removesuffix(".safetensors")] = load_file(path / name)
        return Checkpoint(path, int(state["step"]), state, tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None


def latest_checkpoint(directory: Path) -> Checkpoint:
    """The newest checkpoint that is whole; says which damaged ones it passed over.

    Raises CheckpointError when there is none.
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
        self,
        step: int,
        groups: Callable[[], Mapping[str, Mapping[str, Tensor]]],
        state: Mapping[str, Any],
    ) -> None:
        """Writes what `groups()` gives, called on the writer's thread; one write at a time."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(step, groups, dict(state)), name="checkpoint-writer"
        )
        self._thread.start()

    def _write(
        self,
        step: int,
        groups: Callable[[], Mapping[str, Mapping[str, Tensor]]],
        state: dict[str, Any],
    ) -> None:
        try:
            self.last = save_checkpoint(self.directory, step, groups(), state, self._keep)
            self.failure = None
        except CheckpointError as error:
            self.failure = error
            log.warning("%s; training goes on", error)
        except Exception as error:
            self._crash = error

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Puts a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
