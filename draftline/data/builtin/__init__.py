"""The embedded default: conversations and prompts that ship with the package."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import DataError

_FILES = {
    "builtin:demo-train": "train.jsonl.gz",
    "builtin:demo-heldout": "heldout.jsonl.gz",
}
_FOLDER = Path(__file__).resolve().parent


def demo_config() -> Path:
    """The configuration that `draftline demo` runs."""
    return _FOLDER / "demo.yaml"


def resolve_data(name: str) -> list[Path]:
    """The files behind an entry of `data.train` or `evaluate.prompts`, globs expanded.

    Raises DataError when there is none.
    """
    if name in _FILES:
        return [_FOLDER / _FILES[name]]
    if name.startswith("builtin:"):
        raise DataError(f"{name} is not embedded; there are {', '.join(_FILES)}")
    path = Path(name).expanduser()
    if any(mark in path.name for mark in "*?["):
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise DataError(f"{name} matches no file")
        return found
    return [path]
