"""A corpus on disk: directories of signal.jsonl, nvidia-smi.csv and label.json; thinned, split, packed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 3 << 20
FILES = ("signal.jsonl", "nvidia-smi.csv", "label.json")
_DIGITS = 3
_PATH = re.compile(r"(?<![\w.~@+-])(?:/[\w.+@~-]+)+")
_DEVICE = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What is kept of a machine. Its kernel, its limits and how it is run are nobody's business.
_FACTS = (
    *("python", "platform", "versions", "cuda", "driver", "driver_cuda", "gpus", "variables"),
    *("stance", "dynamo_disabled"),
)
_VARIABLE = re.compile(
    r"CUDA_VISIBLE_DEVICES|TORCH_(?:COMPILE\w*|LOGS)|(?:TORCHDYNAMO|TORCHINDUCTOR|PYTORCH)_\w+"
)
_PLACE = re.compile(r"_(?:DIR|PATH|HOME|FILE|OUT)$")


class Scrubber:
    """Takes out of the lines of one recording what tells machines apart: floats are rounded, absolute
    paths cut to their last part; devices' uuids and process ids are numbered from 1 in the order in
    which they appear, which begins with the recording's own process."""

    def __init__(self) -> None:
        self._devices: dict[str, str] = {}
        self._pids: dict[int, int] = {}

    def line(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """`row` as it may be shown; scrubbing it again changes nothing."""
        found: dict[str, Any] = self._plain(dict(row))
        if isinstance(found.get("pid"), int):
            found["pid"] = self._pid(found["pid"])
        if isinstance(held := found.get("processes"), dict):
            found["processes"] = {str(self._pid(int(pid))): used for pid, used in held.items()}
        if isinstance(facts := found.get("facts"), dict):
            found["facts"] = {name: facts[name] for name in facts if name in _FACTS}
            if isinstance(known := row["facts"].get("variables"), dict):
                found["facts"]["variables"] = {
                    name: self._plain(value) for name, value in known.items() if _told(name, value)
                }
        return found

    def _plain(self, value: Any) -> Any:
        if isinstance(value, float):
            return round(value, _DIGITS)
        if isinstance(value, str):
            text = _PATH.sub(lambda found: found.group().rsplit("/", 1)[1], value)
            return _DEVICE.sub(lambda found: self._device(found.group()), text)
        if isinstance(value, list):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {name: self._plain(item) for name, item in value.items()}
        return value

    def _device(self, uuid: str) -> str:
        fake = f"GPU-00000000-0000-0000-0000-{len(self._devices) + 1:012d}"
        return self._devices.setdefault(uuid, fake)

    def _pid(self, pid: int) -> int:
        return self._pids.setdefault(pid, len(self._pids) + 1)


def _told(name: str, value: object) -> bool:
    """Whether an environment variable is one of PyTorch's or its compiler's, and no place on a disk."""
    return bool(_VARIABLE.fullmatch(name)) and not _PLACE.search(name) and "/" not in str(value)


def thin(path: Path) -> None:
    """Scrubs a recording in place; a line that a kill cut off is left out."""
    scrubber, lines = Scrubber(), []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        lines.append(json.dumps(scrubber.line(row), separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n")


def labels(directory: Path) -> dict[str, dict[str, Any]]:
    """Recording -> its label, of those whose program did what it says, in order of name."""
    found = {
        path.parent.name: json.loads(path.read_text()) for path in directory.glob("*/label.json")
    }
    return {name: found[name] for name in sorted(found) if found[name]["ok"]}


def split(
    found: Mapping[str, Mapping[str, Any]], before: Mapping[str, list[str]] | None = None
) -> dict[str, list[str]]:
    """Recordings for tuning and for the test: half of each cause, in the order of a hash of the name,
    the odd one going by the hash of the cause. Whatever is in `before` stays on its side."""
    sides: dict[str, list[str]] = {
        side: [name for name in (before or {}).get(side, []) if name in found]
        for side in ("tuning", "test")
    }
    causes: dict[str, list[str]] = defaultdict(list)
    for name, label in found.items():
        causes[label["cause"]].append(name)
    for cause, names in causes.items():
        order = ("tuning", "test") if _hash(cause)[0] % 2 else ("test", "tuning")
        for name in sorted(names, key=_hash):
            if not any(name in kept for kept in sides.values()):
                # The side with fewer of this cause, the first one where both have as many.
                held = [len(set(names).intersection(sides[side])) for side in order]
                sides[order[held[0] > held[1]]].append(name)
    return {side: sorted(names) for side, names in sides.items()}


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def pack(directory: Path) -> Path:
    """Scrubs the recordings in `directory`, writes split.json (recordings in one that is there stay
    on their side) and corpus.tar.xz, the same bytes for the same recordings; returns the archive."""
    found = labels(directory)
    for path in directory.glob("*/signal.jsonl"):
        thin(path)
    sides = directory / "split.json"
    before = json.loads(sides.read_text()) if sides.exists() else None
    sides.write_text(json.dumps(split(found, before), indent=1) + "\n")
    archive = directory / "corpus.tar.xz"
    names = ["split.json", *(f"{name}/{file}" for name in found for file in FILES)]
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for name in names:
            if (directory / name).exists():
                data = (directory / name).read_bytes()
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), 0o644
                tar.addfile(entry, io.BytesIO(data))
    return archive


def unpack(archive: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """Puts the recordings of an archive into `directory`; returns their labels."""
    with tarfile.open(archive) as tar:
        for entry in tar:
            data, path = tar.extractfile(entry), directory / entry.name
            if data is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read())
    return labels(directory)
