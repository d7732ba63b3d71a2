"""Reading a configuration: one YAML file plus dotted overrides, and errors that name the right key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from draftline.config import Config
from draftline.config_yaml import parse_yaml, read_yaml_text
from draftline.errors import ConfigError

_MOST_SHOWN = 300
_MOST_SECTIONS = 16
_MOST_LINES = 20


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with dotted `key=value` overrides applied, checked whole.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type, clashing keys.
    """
    try:
        text = read_yaml_text(path)
    except FileNotFoundError:
        raise ConfigError(f"config {path} does not exist; see configs/ for examples") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    tree = parse_yaml(text, f"config {path}")
    if tree is None:
        raise ConfigError(f"config {path} is empty; see configs/ for examples")
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path} holds {type(tree).__name__}, not a mapping of keys")
    return build_config(tree, overrides)


def build_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from nested mappings and dotted overrides; raises ConfigError."""
    try:
        merged: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"configuration: no plain values: {error}") from None
    for item in overrides:
        _apply_override(merged, item)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, sections before their keys."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Dotted key -> (old value, new value) wherever two configuration trees differ."""
    changed: dict[str, Any] = {}
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed |= changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed[prefix + key] = (before, after)
    return changed


def _apply_override(tree: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    item = _cut(repr(item))
    if not equals or not key:
        raise ConfigError(f"override {item} is not key=value, such as train.steps=200")
    value = parse_yaml(text, f"override {item}: the value")
    node = tree
    *sections, leaf = key.split(".")
    if len(sections) > _MOST_SECTIONS:
        raise ConfigError(f"override {item}: no key lies in {len(sections)} sections")
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {item}: {section} is a value, not a section")
        node = child
    node[leaf] = value


def _explain(error: ValidationError) -> str:
    lines = []
    errors = error.errors()
    for item in errors[:_MOST_LINES]:
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {_cut(key)}{_suggest(key)}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing and has no default")
        elif item["type"] == "value_error":
            lines.append(_cut(str(item["ctx"]["error"])))
        else:
            seen = _cut(repr(item["input"]))
            lines.append(f"{key}={seen}: {item['msg'][0].lower()}{item['msg'][1:]}")
    if len(errors) > _MOST_LINES:
        lines.append(f"and {len(errors) - _MOST_LINES} more")
    return "configuration: " + "; ".join(lines)


def _cut(text: str) -> str:
    """Text that may be shown: a value can be as long as its file."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _suggest(key: str) -> str:
    keys = list(known_keys())
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    head = key.rpartition(".")[0]
    section = [k for k in keys if head and k.startswith(f"{head}.")]
    near = difflib.get_close_matches(key, section, n=1, cutoff=0.9) or same_leaf
    near = near or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        by_leaf = {k.rsplit(".", 1)[-1]: k for k in keys}
        near = [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)]
    return f"; did you mean {near[0]}?" if near else "; see `draftline config schema`"


class KeyHelp(BaseModel):
    """One line of the schema for people."""

    name: str
    type: str
    default: str
    meaning: str


def describe_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[KeyHelp]:
    """Every key with its type, default and meaning, in the order of the file."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from describe_keys(annotation, f"{prefix}{name}.")
            continue
        kind = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        default = (
            "required"
            if field.is_required()
            else repr(field.get_default(call_default_factory=True))
        )
        yield KeyHelp(
            name=prefix + name,
            type=kind.replace("typing.", ""),
            default=default,
            meaning=field.description or "",
        )
