"""Locks that the kernel holds for a process, so that a kill frees them: one writer for each place."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftline.errors import ConfigError

log = logging.getLogger(__name__)


@contextmanager
def hold(path: Path, what: str, instead: str) -> Iterator[None]:
    """Keeps everybody else, threads of this process too, from `what` while the context lasts.

    `path` is the lock file; it says who holds it and goes with the context. A killed process leaves
    the file but not the lock. Raises ConfigError, which names the holder and ends with `instead`, when
    somebody else has it or its folder cannot be written. On a file system without locks (some network
    mounts) that is said and nothing is held.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except BlockingIOError:
        raise ConfigError(
            f"{what} is being written by {_holder(path)}; wait for it or stop it, or {instead}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written: {error.strerror or error}; {instead}"
        ) from None
    try:
        yield
    finally:
        # Before the lock goes: whoever opens the path from now on makes a file of its own.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_free(path: Path) -> bool:
    """Whether no living process holds `path` by `keep`; True also where it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def keep(descriptor: int) -> None:
    """Holds an open file until it is closed, so that others see it is in use; see `is_free`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        log.warning("no lock can be taken (%s); others may take the file for a leftover", error)


def _locked(path: Path) -> int:
    """A descriptor of `path` that holds its lock; raises BlockingIOError where another does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s); see to it that nobody else writes here",
                path.parent,
                error.strerror,
            )
        if _same(descriptor, path):
            break
        os.close(descriptor)  # its last holder removed it in between
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
    return descriptor


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _myself() -> dict[str, object]:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join([name, *sys.argv[1:]])[:200],
    }


def _holder(path: Path) -> str:
    try:
        who = json.loads(path.read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']} since {who['since']} ({who['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
