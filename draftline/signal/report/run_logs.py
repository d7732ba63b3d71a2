"""The files that a training leaves in its run directory: configuration, events, metrics."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.signal.trace import Column, one_line

_MOST_EVENTS = 10_000
_MOST_COLUMNS = 200
_MOST_CONFIG_BYTES = 64 << 10  # a training's own has some thousand
_MOST_LETTERS = 2000  # of a text
_MOST_LEVELS = 20  # of nested values
_MOST_NUMBER = 2**63  # a larger whole number can be too long for a text, or for a float


@dataclass(frozen=True, slots=True)
class Metrics:
    """A training log's numbers by name, all [n] in order of steps, NaN where one was not written.

    `time_s` is seconds since 1970 where `dated`, else seconds of training.
    """

    time_s: Column
    step: Column
    columns: Mapping[str, Column]
    dated: bool

    def known(self, name: str) -> Column | None:
        """The column, or None where it is absent or holds nothing but NaN."""
        column = self.columns.get(name)
        return None if column is None or not np.isfinite(column).any() else column

    def usual(self, name: str) -> float | None:
        """The median over the second half of the run, None where it is unknown."""
        column = self.known(name)
        if column is None:
            return None
        late = column[len(column) // 2 :]
        late = late[np.isfinite(late)]
        return float(np.median(late)) if len(late) else None


def read_config(path: Path, missing: list[str]) -> Mapping[str, Any]:
    """A run's configuration with texts that may be shown; empty, and said, where it is absent or
    cannot be read. A file larger than any configuration, or with aliases, is not read: a few lines of
    these can stand for more than a memory holds."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_CONFIG_BYTES + 1)
        if len(data) > _MOST_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_MOST_CONFIG_BYTES >> 10} KiB")
        tree = _load_yaml(data.decode("utf-8", "replace"))
    except FileNotFoundError:
        missing.append(f"no {path.name}")
        return {}
    except (OSError, ValueError) as error:
        missing.append(one_line(f"a {path.name} that cannot be read: {error}"))
        return {}
    return shown(tree) if isinstance(tree, dict) else {}


def _load_yaml(text: str) -> object:
    """What the text says; raises ValueError where it is no YAML, has aliases, or is nested deeper than
    a configuration (which takes PyYAML for ever)."""
    import yaml

    level = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > _MOST_LEVELS:
                raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias (*{event.anchor})")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    # What its constructors let through for values that are not what their tag says.
    except (RecursionError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def shown(value: Any, level: int = 0) -> Any:
    """`value` with every text in it as it may be shown, and "..." for what is nested too deep and for
    numbers that count nothing."""
    if isinstance(value, str):
        return one_line(value, _MOST_LETTERS)
    if isinstance(value, (dict, list)) and level == _MOST_LEVELS:
        return "..."
    if isinstance(value, int) and abs(value) >= _MOST_NUMBER:
        return "..."
    if isinstance(value, dict):
        return {one_line(str(key)): shown(inner, level + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner, level + 1) for inner in value]
    return value


def _lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON-lines file; what is none is counted and said."""
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    bad += 1
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    if bad:
        notes.append(f"{path.name}: {bad} lines are no JSON objects")


def read_events(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    events: list[Mapping[str, Any]] = []
    dropped = 0
    for event in _lines(path, notes):
        if len(events) < _MOST_EVENTS:
            events.append(shown(event))
        else:
            dropped += 1
    if dropped:
        notes.append(f"{path.name}: {dropped} events beyond {_MOST_EVENTS:,} are left out")
    return tuple(events)


def read_metrics(path: Path, notes: list[str]) -> Metrics | None:
    columns: dict[str, array[float]] = {}
    count = 0
    for line in _lines(path, notes):
        values = {one_line(key): _number(value) for key, value in line.items() if _is_number(value)}
        for key, value in values.items():
            column = columns.get(key)
            if column is None:
                if len(columns) >= _MOST_COLUMNS:
                    continue
                column = columns[key] = array("d", [math.nan]) * count
            column.append(value)
        count += 1
        for column in columns.values():
            if len(column) < count:
                column.append(math.nan)
    if not count or "step" not in columns:
        return None
    read = {key: np.array(column) for key, column in columns.items()}
    kept = _newest(read["step"])
    if len(kept) < count:
        notes.append(f"{path.name}: {count - len(kept)} lines are of steps that were made again")
    read = {key: column[kept] for key, column in read.items()}
    dated = "time_s" in read and bool(np.isfinite(read["time_s"]).all())
    time_s = read.get("time_s") if dated else read.get("seconds")
    step = read.pop("step")
    for name in ("time_s", "seconds", "eta_s"):
        read.pop(name, None)
    return Metrics(step if time_s is None else time_s, step, read, dated)


def _newest(step: Column) -> npt.NDArray[np.intp]:
    """Indices of the lines that count: a resumed run makes steps again that it had logged."""
    counts = np.isfinite(step)
    later = np.minimum.accumulate(np.where(counts, step, np.inf)[::-1])[::-1]
    counts[:-1] &= step[:-1] < later[1:]
    return np.flatnonzero(counts)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: float) -> float:
    """As a float that a chart can show: NaN for what is not finite."""
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
