"""What transformers says while it reads a checkpoint: its errors as ours, its tables kept back."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftline.errors import TargetError


@contextmanager
def reading(path: str, part: str, verb: str) -> Iterator[None]:
    """Turns whatever transformers raises inside into one TargetError that names path and part.

    Its code paths are as many as there are model types, and so are the exceptions of a file that
    one of them did not expect.
    """
    try:
        yield
    except (TargetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TargetError(
            f"target.path={path}: its {part} cannot be {verb}: {_first_sentence(error)}"
        ) from None


@contextmanager
def named(path: str) -> Iterator[None]:
    """Puts the target's name before a TargetError that only speaks of its classes."""
    try:
        yield
    except TargetError as error:
        raise TargetError(f"target.path={path}: {error}") from None


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it needs code that comes with the model; read it, and run it with "
            "target.trust_remote_code=true"
        )
    sentence = re.split(r"(?<=[^.\d]{4})\. (?=[A-Z])", text, maxsplit=1)[0]
    return " ".join(sentence.split()[:60]) or type(error).__name__


@contextmanager
def no_report() -> Iterator[None]:
    """transformers' table of unread and missing weights is kept back: `check_read` says it."""
    logger = logging.getLogger("transformers.modeling_utils")

    def severe(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(severe)
    try:
        yield
    finally:
        logger.removeFilter(severe)


@contextmanager
def silent() -> Iterator[None]:
    """Nor a progress bar, for what takes no time."""
    from transformers.utils import logging as own

    shown = own.is_progress_bar_enabled()
    own.disable_progress_bar()
    try:
        with no_report():
            yield
    finally:
        if shown:
            own.enable_progress_bar()
