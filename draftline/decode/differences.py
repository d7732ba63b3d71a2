"""Where speculative output first leaves plain decoding, and by how little the target preferred it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target

# Units of the largest logit's last place. On an H200 in bfloat16, a unit being about 0.2, the margins of
# 30 differences that only other kernels made were 0.001 to 0.16.
_NEAR_TIE_STEPS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Prompt `prompt` (from 0): new token `position` (from 0) is `plain` without a drafter and
    `speculative` with one.

    `margin` is how much the target's logit of the one lies above that of the other, in one forward
    over the common text, `rounding` the largest margin that the dtype's rounding explains. Of an
    output that only ends earlier the tokens and the margin are None.
    """

    prompt: int
    position: int
    plain: int | None
    speculative: int | None
    margin: float | None
    rounding: float

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and abs(self.margin) <= self.rounding

    def describe(self) -> str:
        """One clause for a person."""
        where = f"prompt {self.prompt} from new token {self.position}"
        if self.margin is None:
            return f"{where} (one output ends there: a fault)"
        kind = (
            "near-tie" if self.near_tie else "NO near-tie: a fault of the kernels or of draftline"
        )
        return f"{where} (margin {self.margin:+.3g}, rounding explains {self.rounding:.2g}: {kind})"


@torch.no_grad()
def first_differences(
    target: Target,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
) -> list[Difference]:
    """One entry for each of `outputs` (new token ids) that is not its `reference`, plain output."""
    found = []
    for index, (prompt, ours, plain) in enumerate(zip(prompts, outputs, reference, strict=True)):
        if list(ours) == list(plain):
            continue
        common = min(len(ours), len(plain))
        at = next((i for i in range(common) if ours[i] != plain[i]), common)
        ids = torch.tensor([[*prompt, *plain[:at]]], device=target.device)
        slots = ids.shape[1]
        cache = StaticKV(1, slots, target.device)
        cache.begin_prefill(slots)
        positions = torch.arange(slots, device=target.device)[None]
        hidden, _ = target.extend(ids, positions, cache, None)
        logits = target.head.logits(hidden[:, -1])[0]
        rounding = _NEAR_TIE_STEPS * torch.finfo(target.dtype).eps * float(logits.abs().max())
        if at == common:
            found.append(Difference(index, at, None, None, None, rounding))
            continue
        margin = float(logits[plain[at]] - logits[ours[at]])
        found.append(Difference(index, at, plain[at], ours[at], margin, rounding))
    return found
