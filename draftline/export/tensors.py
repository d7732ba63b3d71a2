"""The tensors of an exported drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.checkpoint.zlab import fold_embedding_scale
from draftline.errors import ParityError
from draftline.model.drafter.backbone import Drafter

# More than float16 or bfloat16 ever lose in a tensor of normal numbers (2 ** -9 at the most).
_WORST_ROUNDING = 2**-7


def export_tensors(
    drafter: Drafter,
    head: Tensor,
    token_ids: Tensor | None,
    dtype: torch.dtype,
    folded: float = 1.0,
) -> dict[str, Tensor]:
    """The checkpoint's tensors: bare names, the feature scale folded into `fc.weight`, and the
    embedding scale `folded` into those of `fold_embedding_scale`.

    With a draft vocabulary also `d2t [draft_vocab]` int64, target id minus draft id, and
    `lm_head.weight [draft_vocab, hidden]`, its rows of the target's `head [vocab, hidden]`: without
    them vLLM drafts with the first rows of the head whatever `d2t` says. Raises ParityError where a
    weight is not finite in `dtype`, or too small for it.
    """
    tensors = {name: value.detach().float().cpu() for name, value in drafter.state_dict().items()}
    tensors["fc.weight"] = tensors["fc.weight"] * drafter.feature_scale.float().cpu()
    tensors = fold_embedding_scale(tensors, folded)
    if token_ids is not None:
        tensors["lm_head.weight"] = head[token_ids.to(head.device)].detach().float().cpu()
    exact, named = tensors, str(dtype).removeprefix("torch.")
    tensors = {name: value.to(dtype).contiguous() for name, value in exact.items()}
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise ParityError(
                f"tensor {name} is not finite in {named}: the training diverged, or the folded feature "
                "scale is too large for float16; export bfloat16 or float32"
            )
        lost = float((value.float() - exact[name]).norm())
        if lost > _WORST_ROUNDING * float(exact[name].norm()):
            raise ParityError(
                f"tensor {name} loses {100 * lost / float(exact[name].norm()):.1f} % of its norm in "
                f"{named}: its numbers are below what the type can tell apart, as happens when a large "
                "scale is folded; export bfloat16 or float32"
            )
    if token_ids is not None:
        ids = token_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
    return tensors
