"""YAML as a configuration needs it: plain values of bounded size, and the line of whatever is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from draftline.errors import ConfigError

# A configuration has some KiB, four levels and at most some hundreds of values. What is far beyond was
# made by a mistake or to stop its reader: ten lines of aliases can stand for more than a memory holds.
_MOST_BYTES = 1 << 18
_MOST_LEVELS = 32
_MOST_VALUES = 20_000
_MOST_DIGITS = 64
_TAG = "tag:yaml.org,2002:"
# libyaml's, ten times as fast, where PyYAML was built with it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BYTE_ORDERS = (b"\xff\xfe", b"\xfe\xff")


def read_yaml_text(path: Path) -> str:
    """The text of `path`; raises OSError, or ValueError that says what it holds instead."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 10} KiB, which no configuration is")
    if data.startswith(_BYTE_ORDERS):
        raise ValueError("it is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"line {line} is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        ) from None


def parse_yaml(text: str, what: str) -> object:
    """What `text` says: mappings with text as keys, lists, text, flags, null and finite numbers.

    Raises ConfigError, with `what` and the line, for what is no YAML, stands for too much, has a key
    twice, or is of another kind.
    """
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {_words(error, text)}") from None
    except ConfigError as error:
        raise ConfigError(f"{what}, {error}") from None


def _words(error: yaml.YAMLError, text: str) -> str:
    """On one line, without the name that PyYAML gives to a text; the usual slips by their names."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if problem and "'\\t'" in problem:
        problem = "a tab, which YAML allows for no indentation; use spaces"
    if mark is None or problem is None:
        return " ".join(str(error).replace('in "<unicode string>", ', "").split())
    here = text.split("\n")[min(mark.line, text.count("\n"))]
    if "\t" in here[: len(here) - len(here.lstrip())]:
        return f"line {mark.line + 1} is indented with a tab; use spaces"
    if mark.line and text.startswith("{") and here.startswith("{"):
        return "it looks like JSONL; name a data file in data.train, and give a configuration here"
    context = getattr(error, "context", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {context + ', ' if context else ''}{problem}"


def _check_size(text: str) -> None:
    """Follows the events, which take no more time than the text is long, before anything is built."""
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"with {len(text) >> 10} KiB, is no value of a key")
    # Values and levels below each open collection, and of each anchor that is complete.
    open_values, open_levels, open_anchors = [0], [0], [""]
    anchored: dict[str, tuple[int, int]] = {}
    for event in yaml.parse(text, Loader=_Base):
        line = _line(event)
        values = levels = 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append(1)
            open_levels.append(1)
            open_anchors.append(event.anchor or "")
        elif isinstance(event, yaml.CollectionEndEvent):
            values, levels = open_values.pop(), open_levels.pop()
            if anchor := open_anchors.pop():
                anchored[anchor] = values, levels
        elif isinstance(event, yaml.ScalarEvent):
            values = 1
            if event.anchor:
                anchored[event.anchor] = 1, 0
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                raise ConfigError(
                    f"line {line}: *{event.anchor} stands inside of what it stands for"
                )
            values, levels = anchored.get(event.anchor or "", (0, 0))
        open_values[-1] += values
        if not isinstance(event, yaml.CollectionStartEvent):
            open_levels[-1] = max(open_levels[-1], levels + 1)
        if len(open_levels) - 1 + open_levels[-1] - 1 > _MOST_LEVELS:
            raise ConfigError(f"line {line}: nested more than {_MOST_LEVELS} levels deep")
        if sum(open_values) > _MOST_VALUES:
            raise ConfigError(
                f"line {line}: more than {_MOST_VALUES} values, those counted that aliases stand for"
            )


class _Loader(_Base):  # type: ignore[misc]
    """Plain values only. YAML silently keeps the last of two equal keys; a configuration must not."""


def _refuse(node: yaml.Node, what: str) -> ConfigError:
    return ConfigError(f"line {_line(node)}: {what}")


def _line(place: yaml.Node | yaml.Event) -> int:
    assert place.start_mark is not None, "what was read has a place"
    return int(place.start_mark.line) + 1


def _shown(node: yaml.ScalarNode) -> str:
    text = node.value
    return text if len(text) <= 40 else f"{text[:40]}..."


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        _check_key(key)
        if key.value in seen:
            raise _refuse(key, f"key {_shown(key)!r} stands twice; keep one of them")
        seen.add(key.value)
    loader.flatten_mapping(node)  # after the check: a key may override one that << merges in
    for key, _ in node.value:
        _check_key(key)
    return {key.value: loader.construct_object(value, deep=True) for key, value in node.value}


def _check_key(key: yaml.Node) -> None:
    if not isinstance(key, yaml.ScalarNode):
        raise _refuse(key, "a key must be a plain word; put quotes around {{ }}")
    kind = key.tag.removeprefix(_TAG)
    if kind not in ("str", "merge", "value"):
        raise _refuse(
            key, f"the key {_shown(key)} is read as {kind}, not text; put quotes around it"
        )


def _scalar(loader: _Loader, node: yaml.Node) -> Any:
    """A flag or a number, as PyYAML reads it from text that is one."""
    kind = node.tag.removeprefix(_TAG)
    if not isinstance(node, yaml.ScalarNode):
        raise _refuse(node, f"a list or mapping is no {kind}")
    if len(node.value) > _MOST_DIGITS:
        raise _refuse(
            node, f"{_shown(node)} has {len(node.value)} digits; no key takes such a number"
        )
    try:
        value = getattr(loader, f"construct_yaml_{kind}")(node)
    except (ValueError, LookupError, ArithmeticError):
        raise _refuse(node, f"{_shown(node)!r} is no {kind}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise _refuse(node, f"{_shown(node)} is not a finite number")
    return value


def _text(_loader: _Loader, node: yaml.Node) -> str:
    """Text, and a date as it was written."""
    if not isinstance(node, yaml.ScalarNode):
        raise _refuse(node, f"a list or mapping is no {node.tag.removeprefix(_TAG)}")
    if "\0" in node.value:
        raise _refuse(node, "text with a NUL character, which no path or word has")
    return str(node.value)


def _other(_loader: _Loader, node: yaml.Node) -> object:
    raise _refuse(node, f"!!{node.tag.removeprefix(_TAG)} is no kind of value that a key takes")


_Loader.add_constructor(f"{_TAG}map", _mapping)
for _kind in ("bool", "int", "float"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _scalar)
for _kind in ("str", "timestamp"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _text)
for _kind in ("binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _other)
