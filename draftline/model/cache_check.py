"""Whether a target computes with draftline's cache what it computes without one.

Models tell their cache new things from release to release of transformers; a cache that misunderstands
one would decode something else than the target, so that is found out before the first prompt.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftline.errors import TargetError
from draftline.model.kv_cache import StaticKV

# Enough that every token but the first sees another one.
_MOST_TOKENS = 8
# Of the features' norm. Rounding leaves under 0.02 in bfloat16; a cache that is ignored leaves more
# than 0.3.
_MOST_DIFFERENCE = 0.1


class Cached(Protocol):
    """What of a target is checked."""

    vocab_size: int
    device: torch.device

    def features(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]: ...
    def extend(
        self, input_ids: Tensor, positions: Tensor, cache: StaticKV, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


@torch.no_grad()
def check_cache(target: Cached, slots: int = _MOST_TOKENS) -> None:
    """Raises TargetError where the taps of a few tokens (`slots` at most) differ with and without the
    cache, or where the model asks the cache for what it does not have."""
    length = max(2, min(slots, _MOST_TOKENS))
    prefill = length // 2
    ids = torch.arange(1, 2 * length, 2, device=target.device)[None] % target.vocab_size
    positions = torch.arange(length, device=target.device)[None]
    cache = StaticKV(1, length, target.device)
    before, after = positions[:, :prefill], positions[:, prefill:]
    try:
        cache.begin_prefill(prefill)
        _, first = target.extend(ids[:, :prefill], before, cache, None)
        cache.begin(after, length)
        mask = positions[None, None] <= after[:, None, :, None]
        _, second = target.extend(ids[:, prefill:], after, cache, mask)
    except (AttributeError, TypeError, NotImplementedError) as error:
        import transformers

        raise TargetError(
            f"the target cannot be decoded with draftline's cache under transformers "
            f"{transformers.__version__}: {error}; it can be trained for, and served elsewhere, or "
            "try the release of transformers in constraints.txt"
        ) from error
    plain, _ = target.features(ids)
    for rows, cached in ((plain[:, :prefill], first), (plain[:, prefill:], second)):
        difference = float((cached - rows).float().norm() / rows.float().norm().clamp_min(1e-12))
        if not difference < _MOST_DIFFERENCE:
            raise TargetError(
                f"the target computes something else with a key/value cache than without (its taps "
                f"differ by {100 * difference:.0f} % of their size); it can be trained for, but not "
                "decoded here"
            )
