"""How answers are drawn: temperatures, the truncation of the distribution, and the noise."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from draftline.errors import ConfigError, TargetError
from draftline.model.target.source import resolve_target

log = logging.getLogger(__name__)

# Settings of a generation_config.json that change what a server draws and are not followed here,
# with the value at which they change nothing.
_NOT_FOLLOWED = {
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """`temperatures` that conversations are spread over (0 is greedy), and the truncation of each.

    Of a distribution the `top_k` most likely tokens stay, and of those the fewest whose share is at
    least `top_p`; None leaves either out. Raises ConfigError for a value outside its range.
    """

    temperatures: tuple[float, ...] = (0.0,)
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [t for t in self.temperatures if not (math.isfinite(t) and t >= 0)]
        if wrong or not self.temperatures:
            seen = ", ".join(map(str, self.temperatures)) or "nothing"
            raise ConfigError(f"temperature {seen}: give numbers from 0 (greedy), such as 0,0.7,1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is a share: above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top-k {self.top_k} is a number of tokens, at least 1")

    def temperature_of(self, conversation: str) -> float:
        """The temperature of the conversation with this id; the same in every call."""
        return self.temperatures[_number(self.seed, conversation) % len(self.temperatures)]

    def noise_of(self, turn: int, conversations: Iterable[str]) -> int:
        """A seed for the answers to `turn` of the conversations that are decoded together."""
        return _number(self.seed, turn, *conversations)

    def facts(self, conversation: str) -> dict[str, Any]:
        """The sampling of one conversation as its row records it."""
        return {
            "temperature": self.temperature_of(conversation),
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }


def target_sampling(path: str, seed: int) -> Sampling:
    """The sampling that the target's own generation_config.json asks for.

    `do_sample: false` is greedy; a temperature that is not named is 1, a top_p or top_k that is not
    named truncates nothing, as in servers. Raises TargetError where the file is missing or names
    none of them; what it asks for beyond that is logged as not followed.
    """
    from transformers import GenerationConfig

    try:
        asked = GenerationConfig.from_pretrained(resolve_target(path)).to_diff_dict()
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split()[:40])
        raise TargetError(
            f"target.path={path}: its generation_config.json cannot be read: {first}; give the "
            "temperature yourself"
        ) from None
    for key, neutral in _NOT_FOLLOWED.items():
        if asked.get(key) not in (None, neutral):
            log.warning("generation_config.json asks for %s=%s: not followed", key, asked[key])
    if asked.get("do_sample") is False:
        return Sampling(seed=seed)
    named = {key: asked.get(key) for key in ("do_sample", "temperature", "top_p", "top_k")}
    if all(value is None for value in named.values()):
        raise TargetError(
            f"target.path={path}: its generation_config.json names no temperature, top_p or top_k, "
            "so there are no defaults to follow; give the temperature yourself"
        )
    temperature = 1.0 if named["temperature"] is None else float(named["temperature"])
    # Some files write 0, or -1, for a top_k that is off.
    top_k = named["top_k"] if named["top_k"] and named["top_k"] > 0 else None
    return Sampling((temperature,), named["top_p"], top_k, seed)


def _number(*parts: object) -> int:
    digest = hashlib.sha256("\0".join(map(str, parts)).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
