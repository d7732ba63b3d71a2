"""A converted model in the cache: whole when its hashes say so, made aside, and never a leftover.

`draftline.json` beside its files holds the SHA-256 of each 64 MiB of each of them, so that several threads
compare them, and one of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from draftline.files import open_to_others
from draftline.locks import is_free, keep

_SEAL = "draftline.json"
_LOCK = ".lock"
_PIECE_BYTES = 1 << 26
_READ_BYTES = 1 << 22
# What every command reads of a model; weights are compared when they are loaded.
_SMALL_BYTES = 1 << 25


def damage(directory: Path, *, weights: bool) -> str | None:
    """Why the model in `directory` is not as it was converted, or None; `weights`: the large files too."""
    try:
        text = (directory / _SEAL).read_bytes()
        body, _, digest = text.rstrip(b"\n").rpartition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return f"{_SEAL} does not have its own hash"
        files: dict[str, list[str]] = json.loads(body)
        for name, pieces in files.items():
            path = directory / name
            if (weights or path.stat().st_size < _SMALL_BYTES) and _pieces(path) != pieces:
                return f"{name} does not have the hash it was written with"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is not there"
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return str(error)
    return None


@contextmanager
def making(directory: Path) -> Iterator[Path]:
    """An empty directory for the files of `directory`, which takes their place at the end.

    Others may make the same at once: what is whole stays. Raises OSError.
    """
    own = f".{directory.name}.{socket.gethostname()}"
    for left in directory.parent.glob(f"{own}.*"):
        # Whoever fills one holds it; without the file somebody is about to make or to remove it.
        if (left / _LOCK).exists() and is_free(left / _LOCK):
            shutil.rmtree(left, ignore_errors=True)
    scratch = directory.with_name(f"{own}.{os.getpid()}")
    try:
        scratch.mkdir(parents=True)
        with (scratch / _LOCK).open("wb") as lock:
            keep(lock.fileno())
            yield scratch
            (scratch / _LOCK).unlink()
            files = {path.name: _pieces(path) for path in sorted(scratch.iterdir())}
            body = json.dumps(files, indent=1)
            digest = hashlib.sha256(body.encode()).hexdigest()
            (scratch / _SEAL).write_text(f"{body}\n{digest}\n", encoding="utf-8")
            open_to_others(scratch)
            if directory.exists() and damage(directory, weights=True) is not None:
                shutil.rmtree(directory)
            try:
                scratch.replace(directory)
            except OSError:
                if damage(directory, weights=True) is not None:
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pieces(path: Path) -> list[str]:
    """The SHA-256 of each piece of a file."""
    with path.open("rb") as file, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        descriptor = file.fileno()
        starts = range(0, os.fstat(descriptor).st_size, _PIECE_BYTES)
        return list(pool.map(lambda start: _piece(descriptor, start), starts))


def _piece(descriptor: int, start: int) -> str:
    digest = hashlib.sha256()
    for at in range(start, start + _PIECE_BYTES, _READ_BYTES):
        digest.update(os.pread(descriptor, _READ_BYTES, at))
    return digest.hexdigest()
