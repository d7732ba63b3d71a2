"""The directory of an export: replaced whole, and only where what it replaces is an export of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from draftline import __version__
from draftline.errors import ConfigError
from draftline.files import open_to_others, sync
from draftline.locks import hold

# What an export may hold; anything else beside it is somebody's.
FILES = frozenset({"config.json", "model.safetensors"})
# Written into the weights' header, where nothing but a reader of this file looks.
_MARK = "draftline"


def metadata() -> dict[str, str]:
    """What the header of an exported `model.safetensors` says beside its tensors."""
    return {"format": "pt", _MARK: __version__}


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Raises ConfigError where `out` is there and is not to be replaced, or is no export of draftline."""
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ConfigError(f"{out} exists; choose another directory or pass --overwrite")
    try:
        foreign = _foreign(out)
    except OSError as error:
        foreign = f"{error.filename} cannot be read ({error.strerror})"
    if foreign is not None:
        raise ConfigError(
            f"{out} is not an exported drafter of draftline and nothing else: {foreign}. --overwrite "
            "replaces only those; choose another directory, or move this one away"
        )


def _foreign(out: Path) -> str | None:
    """What shows that `out` is something else than an export, or None."""
    if out.is_symlink() or not out.is_dir():
        return "it is a link" if out.is_symlink() else "it is no directory"
    names = {entry.name for entry in out.iterdir()}
    if not names:
        return None
    if others := sorted(names - FILES):
        return f"it holds {', '.join(others[:3])}"
    if absent := sorted(FILES - names):
        return f"it has no {' and no '.join(absent)}"
    for name in names:
        if (out / name).is_symlink() or not (out / name).is_file():
            return f"{name} is not a plain file"
    try:
        config = json.loads((out / "config.json").read_bytes())
        with safe_open(out / "model.safetensors", "pt") as weights:
            header = weights.metadata() or {}
    except (ValueError, RecursionError, SafetensorError) as error:
        return f"its files cannot be read ({error})"
    if not isinstance(config, dict) or "dflash_config" not in config:
        return "config.json has no dflash_config"
    if _MARK not in header:
        return "model.safetensors does not say that draftline wrote it"
    return None


@contextmanager
def replacing(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty directory that becomes `out` at the end; an error before leaves `out` as it was.

    Raises ConfigError as `check_replaceable` does, when another process writes `out`, and when it cannot
    be written.
    """
    place = out.resolve()
    lock, scratch, aside = (place.with_name(f".{place.name}.{e}") for e in ("lock", "tmp", "old"))
    with hold(lock, str(out), "choose another directory"):
        check_replaceable(out, overwrite)
        try:
            for left in (scratch, aside):
                shutil.rmtree(left, ignore_errors=True)
            scratch.mkdir()
            yield scratch
            open_to_others(scratch)
            for file in (*scratch.iterdir(), scratch):
                sync(file)
            if place.exists():
                place.replace(aside)
            try:
                scratch.replace(place)
            except OSError:
                if aside.exists():
                    aside.replace(place)
                raise
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{out} cannot be written: {error}") from None
        finally:
            for left in (scratch, aside):
                shutil.rmtree(left, ignore_errors=True)
