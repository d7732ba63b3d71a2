"""The file of a disk cache: every sample's features back to back, then a hash of each, then one of those.

Without them a byte that a disk changed would be trained on. The rows come first and page-aligned, so that
they can be mapped.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from draftline.locks import is_free, keep

# Of a sample's SHA-256, which one core computes at 1 to 2 GiB/s.
_DIGEST_BYTES = 16
_HASHERS = min(8, os.cpu_count() or 1)
_READ_BYTES = 1 << 22


class FeatureFile:
    """The file `path` of features that `about` names: any text that is theirs alone.

    `sizes` are the bytes of each sample's; `bytes` is what the whole file takes.
    """

    def __init__(self, path: Path, about: str, sizes: Sequence[int]) -> None:
        self.path = path
        self._about = f"1 {about} {list(sizes)}".encode()
        self._offsets = [0, *accumulate(sizes)]
        self.bytes = self._offsets[-1] + _DIGEST_BYTES * len(sizes) + hashlib.sha256().digest_size

    def damage(self, progress: Callable[[int], None]) -> str | None:
        """Why the file is not what was written for these samples; None where every hash fits.

        `progress(sample)` is called behind each sample, in order. Raises OSError when it cannot be opened.
        """
        with self.path.open("rb") as file, ThreadPoolExecutor(_HASHERS, "feature-hash") as pool:
            descriptor = file.fileno()
            if (size := os.fstat(descriptor).st_size) != self.bytes:
                return f"it has {size} bytes instead of {self.bytes}: cut, or made without hashes"
            trailer = os.pread(descriptor, self.bytes - self._offsets[-1], self._offsets[-1])
            ends = range(_DIGEST_BYTES, _DIGEST_BYTES * len(self._offsets), _DIGEST_BYTES)
            stored = [trailer[end - _DIGEST_BYTES : end] for end in ends]
            if trailer != self._trailer(stored):
                return "the hashes at its end are damaged, or it holds other features"
            found = pool.map(lambda span: _read_digest(descriptor, *span), pairwise(self._offsets))
            for sample, digest in enumerate(found):
                if digest != stored[sample]:
                    pool.shutdown(wait=False, cancel_futures=True)
                    return f"the features of sample {sample} do not have the hash they were written with"
                progress(sample)
        return None

    @contextmanager
    def part(self) -> Iterator[tuple[Path, int]]:
        """A new file beside this one and its descriptor, of full size on disk, for `finish`.

        It is gone afterwards unless finished. Raises OSError where there is no room.
        """
        # Under a name of its own until it is whole: others may fill the same directory.
        own = f".{self.path.name}.{socket.gethostname()}.{os.getpid()}.tmp"
        part = self.path.with_name(own)
        try:
            with part.open("w+b") as file:
                keep(file.fileno())
                # Writing into a mapping that the disk cannot back kills the process: back it now.
                os.posix_fallocate(file.fileno(), 0, self.bytes)
                yield part, file.fileno()
        finally:
            part.unlink(missing_ok=True)

    def finish(self, part: tuple[Path, int], digests: Sequence[bytes]) -> None:
        """Makes a part, whose samples' rows have these digests, the file."""
        path, descriptor = part
        os.pwrite(descriptor, self._trailer(digests), self._offsets[-1])
        os.fsync(descriptor)
        path.replace(self.path)

    def remove_abandoned(self) -> None:
        """Frees what killed fills of this file left behind on this machine."""
        for part in self.path.parent.glob(f".{self.path.name}.{socket.gethostname()}.*.tmp"):
            # Whoever fills one holds it from before its first byte.
            if part.stat().st_size and is_free(part):
                part.unlink(missing_ok=True)

    def _trailer(self, digests: Iterable[bytes]) -> bytes:
        joined = b"".join(digests)
        return joined + hashlib.sha256(self._about + joined).digest()


class Hashers:
    """Threads that hash features while others compute the next; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_HASHERS, "feature-hash")

    def digests(self, rows: Iterable[Tensor]) -> list[bytes]:
        """The hash of each of the contiguous host tensors, in their order."""
        return list(self._pool.map(_digest, rows))

    def __enter__(self) -> Hashers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _digest(rows: Tensor) -> bytes:
    return hashlib.sha256(rows.view(torch.uint8).numpy().data).digest()[:_DIGEST_BYTES]


def _read_digest(descriptor: int, begin: int, end: int) -> bytes:
    """The hash of a stretch of a file; b"" where the disk does not give it back."""
    digest = hashlib.sha256()
    try:
        while begin < end:
            piece = os.pread(descriptor, min(_READ_BYTES, end - begin), begin)
            if not piece:
                return b""
            digest.update(piece)
            begin += len(piece)
    except OSError:
        return b""
    return digest.digest()[:_DIGEST_BYTES]
