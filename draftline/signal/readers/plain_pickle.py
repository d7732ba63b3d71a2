"""Values of a pickle that only builds lists, dicts, tuples, text and numbers. Nothing is ever called:
what could call is not implemented, and refused by name."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Iterator
from typing import Any

# Estimated bytes of memory per byte of the file. Honest files take six to nine.
_MOST_TIMES = 16
_FREE_BYTES = 1 << 20
_LONGEST_INT_BITS = 72  # an unsigned address of 64 bits takes nine bytes
_COSTS = {"EMPTY_LIST": 64, "EMPTY_DICT": 64, "TUPLE": 56, "TUPLE1": 48, "TUPLE2": 56, "TUPLE3": 64}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")


class PickleError(Exception):
    """The pickle is damaged, or is none of plain values."""


class HostilePickleError(PickleError):
    """The pickle would call something, or take far more memory than its size."""


def load_plain(data: bytes, keys: Collection[str]) -> Any:
    """The value pickled in `data`, its dicts without any key that is not in `keys`.

    Takes memory of at most 16 times the data and a constant, and time in proportion to it. Raises
    HostilePickleError for anything that calls or refers outside, and for declared sizes that the data
    does not hold; PickleError where it is damaged.
    """
    machine = _Machine(frozenset(keys), _MOST_TIMES * len(data) + _FREE_BYTES)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.value()
            machine.step(opcode.name, argument, position or 0)
    except (ValueError, EOFError, IndexError, TypeError, OverflowError) as error:
        raise PickleError(str(error) or type(error).__name__) from None
    raise PickleError("it has no end")


class _Machine:
    """The stack, the marks on it, and what was kept for a second use, in the order of keeping."""

    def __init__(self, keys: frozenset[str], most_bytes: int) -> None:
        self._keys = keys
        self._left = most_bytes
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._kept: list[Any] = []
        self._does: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "NONE": lambda _: self._stack.append(None),
            "NEWTRUE": lambda _: self._stack.append(True),
            "NEWFALSE": lambda _: self._stack.append(False),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_DICT": lambda _: self._stack.append({}),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "TUPLE": lambda _: self._stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self._stack.append(tuple(self._popped(1))),
            "TUPLE2": lambda _: self._stack.append(tuple(self._popped(2))),
            "TUPLE3": lambda _: self._stack.append(tuple(self._popped(3))),
            "APPEND": lambda _: self._extend(self._popped(1)),
            "APPENDS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._update(self._popped(2)),
            "SETITEMS": lambda _: self._update(self._marked()),
            "MEMOIZE": lambda _: self._kept.append(self._stack[-1]),
            "BINPUT": self._keep,
            "LONG_BINPUT": self._keep,
            "BINGET": lambda place: self._stack.append(self._kept[place]),
            "LONG_BINGET": lambda place: self._stack.append(self._kept[place]),
        }
        self._does |= dict.fromkeys(_NUMBERS, self._number) | dict.fromkeys(_TEXTS, self._text)

    def step(self, name: str, argument: Any, position: int) -> None:
        do = self._does.get(name)
        if do is None:
            what = f" {argument!r:.80}" if isinstance(argument, str) else ""
            raise HostilePickleError(f"it would run code ({name}{what} at byte {position})")
        self._spend(_COSTS.get(name, 8))
        do(argument)

    def value(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise PickleError("it ends within a value")
        return self._stack[0]

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise HostilePickleError("it would take far more memory than its size")

    def _popped(self, count: int) -> list[Any]:
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise PickleError("it takes a value that is not there")
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _marked(self) -> list[Any]:
        found = self._stack[self._marks[-1] :]
        del self._stack[self._marks.pop() :]
        return found

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError("it appends to what is no list")
        target.extend(values)

    def _update(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise PickleError("it sets items of what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) is str and key in self._keys:
                if not target:
                    self._spend(120)
                target[key] = value

    def _keep(self, place: int) -> None:
        if place != len(self._kept):
            raise HostilePickleError(f"it keeps a value at place {place} out of turn")
        self._kept.append(self._stack[-1])

    def _number(self, value: float) -> None:
        if isinstance(value, int) and value.bit_length() > _LONGEST_INT_BITS:
            raise HostilePickleError(f"it holds an integer of {value.bit_length()} bits")
        self._spend(28)
        self._stack.append(value)

    def _text(self, value: str) -> None:
        self._spend(48 + len(value))
        self._stack.append(value)


def items(values: Any, budget: list[int]) -> Iterator[Any]:
    """The values of a list, none of what is no list. Each takes one of `budget`, without which values
    that hold the same list again and again would be walked for ever."""
    for value in values if type(values) is list else ():
        budget[0] -= 1
        if budget[0] < 0:
            raise HostilePickleError("it refers to the same parts again and again")
        yield value
