"""Whether what a configuration names is there: target, data files, prompts, trackers, run directory.

Nothing is loaded and nothing that is made stays, so this takes a moment, and torch is not imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from draftline.config.schema import Config
from draftline.data.builtin import resolve_data
from draftline.errors import ConfigError, UserError
from draftline.model.target.source import locate_target
from draftline.model.target.taps import check_taps, choose_taps


def check_named(config: Config, *, prompts: bool = True) -> None:
    """Raises ConfigError with every name of `config` that cannot be used; `prompts` counts those of
    evaluate.prompts too."""
    if faults := find_faults(config, prompts=prompts):
        raise ConfigError("; ".join(faults))


def find_faults(config: Config, *, prompts: bool = True) -> list[str]:
    """One line for each name that cannot be used: a target that is not there, a file that is missing
    or unreadable, a tracker's package, a run directory that cannot be written."""
    found = [_fault(lambda: _check_target(config))]
    for name in config.data.train:
        found += _file_faults("data.train", name)
    if isinstance(config.data.heldout, list):
        for name in config.data.heldout:
            found += _file_faults("data.heldout", name)
    if prompts:
        found += _prompt_faults(config)
    found += [_package_fault(name) for name in config.train.trackers]
    found.append(_directory_fault("run.dir", Path(config.run.dir)))
    if config.features.dir is not None:
        found.append(_directory_fault("features.dir", Path(config.features.dir)))
    return [fault for fault in found if fault]


def check_prompts(config: Config) -> None:
    """Raises ConfigError with every file of evaluate.prompts that cannot be read."""
    if faults := _prompt_faults(config):
        raise ConfigError("; ".join(faults))


def _prompt_faults(config: Config) -> list[str]:
    named = config.evaluate.prompts.items()
    return [fault for key, name in named for fault in _file_faults(f"evaluate.prompts.{key}", name)]


def _check_target(config: Config) -> None:
    """Raises TargetError where the target is not there, or has too few layers for the taps."""
    place = locate_target(config.target.path)
    if not isinstance(place, Path) or not place.is_dir():
        return
    try:
        tree = json.loads((place / "config.json").read_text(encoding="utf-8"))
        layers = int(tree.get("text_config", tree)["num_hidden_layers"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # said in full where it is read
    if config.target.tap_layers is None:
        choose_taps(layers, config.target.num_taps)
    else:
        check_taps(config.target.tap_layers, layers)


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
            if not os.access(part, os.W_OK | os.X_OK):
                return f"{key}={path}: {part} cannot be written; {instead}"
            try:
                # Tried, since to the superuser, or in a kernel's directory, permissions say nothing.
                tempfile.TemporaryDirectory(prefix=".draftline-", dir=part).cleanup()
            except OSError as error:
                return f"{key}={path}: {part} cannot be written ({error.strerror}); {instead}"
            return ""
        if part.exists():
            return f"{key}={path}: {part} is a file; {instead}"
    return ""
