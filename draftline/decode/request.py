"""How the target is asked: all that an answer depends on beside the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftline.data.generated import normal_arguments
from draftline.decode.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """How the target is asked: its path as given, the template's arguments, and the sampling."""

    target: str
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 512

    def facts(self, conversation: str) -> dict[str, Any]:
        """What the row of `conversation` records of it."""
        return {
            "target": self.target,
            "template": normal_arguments(self.template),
            **self.sampling.facts(conversation),
            "max_new_tokens": self.max_new_tokens,
        }
