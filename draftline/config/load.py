"""Reading a configuration: one YAML file plus dotted overrides, and errors that name the right key."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from draftline.config.faults import explain, shown
from draftline.config.schema import Config
from draftline.config.yaml_text import parse_yaml, read_yaml_text
from draftline.errors import ConfigError

_MOST_SECTIONS = 16
_YAML_WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    datetime.date: "date",
    Any: "value",
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with dotted `key=value` overrides applied, checked whole.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type, clashing keys.
    """
    try:
        text = read_yaml_text(path)
    except FileNotFoundError:
        raise ConfigError(
            f"config {path} does not exist; README.md has one to begin with"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from None
    tree = parse_yaml(text, f"config {path}")
    if tree is None:
        raise ConfigError(f"config {path} is empty; README.md has one to begin with")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else f"only {str(tree)[:40]!r}"
        raise ConfigError(f"config {path} holds {kind}, not keys with their values")
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
    item = shown(item)
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
            raise ConfigError(
                f"override {item}: {section} is {shown(child)} here, not a section with keys"
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
        default = (
            "required"
            if field.is_required()
            else json.dumps(field.get_default(call_default_factory=True))
        )
        yield KeyHelp(
            name=prefix + name,
            type=_type_words(annotation),
            default=default,
            meaning=field.description or "",
        )


def _type_words(annotation: Any) -> str:
    """A type as somebody who writes YAML reads it: the values that may stand there."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is NoneType:
        return "null"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(_type_words, arguments))
    if origin is list:
        return f"[{_type_words(arguments[0])}, ...]"
    if origin is tuple:
        return f"[{', '.join(map(_type_words, arguments))}]"
    if origin is dict:
        return f"{{{_type_words(arguments[0])}: {_type_words(arguments[1])}}}"
    return _YAML_WORDS[annotation]
