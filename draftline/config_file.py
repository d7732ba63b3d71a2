"""Reading a configuration: one YAML file plus dotted overrides, and errors that name the right key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from draftline.config import Config
from draftline.config_faults import explain
from draftline.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML silently keeps the last of two equal keys; a configuration must not."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                f"line {line}: a key must be a plain word; put quotes around {{{{ }}}}"
            )
        if key_node.value in seen:
            raise ConfigError(f"line {line}: key {key_node.value!r} stands twice; keep one of them")
        seen.add(key_node.value)
    loader.flatten_mapping(node)  # after the check: a key may override one that << merges in
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with dotted `key=value` overrides applied, checked whole.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type, clashing keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config {path} does not exist; see configs/ for examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path} is not YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"config {path}, {error}") from None
    if tree is None:
        raise ConfigError(f"config {path} is empty; see configs/ for examples")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else f"only {str(tree)[:40]!r}"
        raise ConfigError(f"config {path} holds {kind}, not keys with their values")
    return build_config(tree, overrides)


def build_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from nested mappings and dotted overrides; raises ConfigError."""
    merged: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    for item in overrides:
        _apply_override(merged, item)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


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
    if not equals or not key:
        raise ConfigError(f"override {item!r} is not key=value, such as train.steps=200")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: the value is not YAML: {error}") from None
    node = tree
    *sections, leaf = key.split(".")
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"override {item!r}: {section} is {child!r} here, not a section with keys"
            )
        node = child
    node[leaf] = value


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
