"""What a program puts around its steps and phases."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from draftline.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# The end of a loop or of the program, not a fault of the step.
_ENDINGS = (StopIteration, StopAsyncIteration)


def check_tokens(tokens: int | None) -> int | None:
    """`tokens` itself; raises ConfigError for the function of a decorator without parentheses."""
    if callable(tokens):
        raise ConfigError(f"@step on {tokens!r}: it takes parentheses, write @signal.step()")
    return tokens


class Recording(Protocol):
    """What marks need of a Recorder."""

    def begin_step(self) -> None: ...

    def end_step(
        self, body_s: float | None, tokens: int | None, error: BaseException | None
    ) -> None: ...

    def phase(self, name: str) -> Phase: ...


class Step:
    """One step: `with recorder.step(): ...`, or a decorator of the function that makes a step.
    `find` gives the recording at the moment a step begins."""

    def __init__(self, find: Callable[[], Recording], tokens: int | None) -> None:
        self._find = find
        self._tokens = tokens

    def __enter__(self) -> None:
        self._recording = self._find()
        self._recording.begin_step()
        self._began_s = time.perf_counter()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, _ENDINGS):
            body_s = time.perf_counter() - self._began_s
            self._recording.end_step(body_s, self._tokens, error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def stepped(*args: P.args, **kwargs: P.kwargs) -> R:
            with Step(self._find, self._tokens):
                return function(*args, **kwargs)

        return stepped


class Phase:
    """A phase that has begun; at the end of its `with` block the one before goes on."""

    def __init__(self, recording: Recording, before: str) -> None:
        self._recording = recording
        self._before = before

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._recording.phase(self._before)
