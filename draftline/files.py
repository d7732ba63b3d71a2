"""Files as their readers need them: on disk when that is claimed, and readable by whom the umask lets."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Puts a file, or the names in a directory, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def irregular(path: Path) -> str | None:
    """What `path` is where something else than a regular file is there, such as "a device".

    Renaming a new file over it would succeed for a device, and take it from everybody. Raises OSError
    where that cannot be told.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_to_others(directory: Path) -> None:
    """Gives every file in `directory` the mode of a newly made one, directories below included.

    Libraries that write through private temporary files leave files that only their owner can read.
    """
    # A file shows what umask and default access lists make of it; asking for the umask sets it, for
    # all threads.
    with tempfile.TemporaryDirectory(dir=directory) as inside:
        probe = Path(inside) / "probe"
        probe.touch()
        mode = probe.stat().st_mode & 0o777
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
