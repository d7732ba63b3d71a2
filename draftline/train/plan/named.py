"""Whether what a configuration names is there: target, data files, prompts, trackers, run directory.

Nothing is loaded and nothing is made, so this takes a moment, and torch is not imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from draftline.config.schema import Config
from draftline.data.builtin import resolve_data
from draftline.errors import ConfigError, UserError
from draftline.model.target.source import locate_target


def check_named(config: Config, *, prompts: bool = True) -> None:
    """Raises ConfigError with every name of `config` that cannot be used; `prompts` counts those of
    evaluate.prompts too."""
    if faults := find_faults(config, prompts=prompts):
        raise ConfigError("; ".join(faults))


def find_faults(config: Config, *, prompts: bool = True) -> list[str]:
    """One line for each name that cannot be used: a target that is not there, a file that is missing
    or unreadable, a tracker's package, a run directory that cannot be written."""
    found = [_fault(lambda: locate_target(config.target.path))]
    for name in config.data.train:
        found += _file_faults("data.train", name)
    if prompts:
        for key, name in config.evaluate.prompts.items():
            found += _file_faults(f"evaluate.prompts.{key}", name)
    found += [_package_fault(name) for name in config.train.trackers]
    found.append(_directory_fault("run.dir", Path(config.run.dir)))
    if config.features.dir is not None:
        found.append(_directory_fault("features.dir", Path(config.features.dir)))
    return [fault for fault in found if fault]


def _fault(check: Callable[[], object]) -> str:
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def _file_faults(key: str, name: str) -> list[str]:
    try:
        files = resolve_data(name)
    except UserError as error:
        return [f"{key}: {error}"]
    return [f"{key}: {fault}" for path in files if (fault := _file_fault(path))]


def _file_fault(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory; name its files, such as {path}/*.jsonl"
    if not path.exists():
        return f"{path} does not exist"
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read by this user"
    return ""


def _package_fault(name: str) -> str:
    try:
        if importlib.util.find_spec(name) is not None:
            return ""
    except ValueError:  # it is loaded, and nothing says from where
        return ""
    return (
        f"train.trackers names {name}, which is not installed: pip install {name}, or take it out of "
        "train.trackers"
    )


def _directory_fault(key: str, path: Path) -> str:
    instead = f"choose another with {key}=PATH"
    # The nearest part that exists is where the rest would be made.
    for part in (path, *path.absolute().parents):
        if part.is_dir():
            allowed = os.access(part, os.W_OK | os.X_OK)
            return "" if allowed else f"{key}={path}: {part} cannot be written; {instead}"
        if part.exists():
            return f"{key}={path}: {part} is a file; {instead}"
    return ""
