"""Targets; `Target` and `load_target` are found here too, and loaded when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftline.model.target.target import Target, load_target

__all__ = ["Target", "load_target"]


def __getattr__(name: str) -> Any:
    # Not at import: facts about a target are read without torch (train/plan/named.py).
    if name not in __all__:
        raise AttributeError(name)
    from draftline.model.target import target

    return getattr(target, name)
