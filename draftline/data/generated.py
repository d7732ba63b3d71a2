"""Answers as the ids that the target generated, and what must agree before they are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer of the target: `messages[turn]` as the ids it was given and the ids it gave.

    `complete` says that `answer_ids` end with the token with which the target stopped.
    """

    turn: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    complete: bool


def template_sha256(chat_template: Any) -> str:
    """The first 16 hex digits of the template's SHA-256; of several named ones, of their JSON."""
    text = (
        chat_template
        if isinstance(chat_template, str)
        else json.dumps(chat_template, sort_keys=True)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normal_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Template arguments as they compare between a row and a run: JSON values, sorted by key."""
    normal: dict[str, Any] = json.loads(json.dumps(arguments or {}, sort_keys=True, default=str))
    return normal
