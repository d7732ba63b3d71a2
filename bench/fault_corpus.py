"""A corpus on disk: directories of signal.jsonl, nvidia-smi.csv and label.json; thinned, split, packed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

MAX_BYTES = 3 << 20
FILES = ("signal.jsonl", "nvidia-smi.csv", "label.json")
_DIGITS = 3
_PATH = re.compile(r"(?:/[\w.+@~-]+){2,}")
_DEVICE = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def plain(value: Any) -> Any:
    """`value` with floats rounded, absolute paths cut to their last part and device uuids replaced:
    what a machine calls itself is nobody's business."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, str):
        text = _PATH.sub(lambda found: found.group().rsplit("/", 1)[1], value)
        return _DEVICE.sub(lambda m: f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, m.group())}", text)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def thin(path: Path) -> None:
    """Rewrites a recording as `plain` lines; a line cut off by a kill stays as it is."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.dumps(plain(json.loads(line)), separators=(",", ":")))
        except ValueError:
            lines.append(line)
    path.write_text("\n".join(lines) + "\n")


def labels(directory: Path) -> dict[str, dict[str, Any]]:
    """Recording -> its label, of those whose program did what it says, in order of name."""
    found = {
        path.parent.name: json.loads(path.read_text()) for path in directory.glob("*/label.json")
    }
    return {name: found[name] for name in sorted(found) if found[name]["ok"]}


def split(found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Recordings for tuning and for the test: half of each cause, in the order of a hash of the name,
    the odd one going by the hash of the cause."""
    sides: dict[str, list[str]] = {"tuning": [], "test": []}
    causes: dict[str, list[str]] = defaultdict(list)
    for name, label in found.items():
        causes[label["cause"]].append(name)
    for cause, names in causes.items():
        first = _hash(cause)[0] % 2
        for index, name in enumerate(sorted(names, key=_hash)):
            sides["tuning" if (index + first) % 2 else "test"].append(name)
    return {side: sorted(names) for side, names in sides.items()}


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def pack(directory: Path) -> Path:
    """Writes split.json and corpus.tar.xz of the recordings in `directory`, the same bytes for the
    same recordings; returns the archive."""
    found = labels(directory)
    (directory / "split.json").write_text(json.dumps(split(found), indent=1) + "\n")
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
