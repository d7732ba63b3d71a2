"""Whether two targets are the same, wherever their files lie."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from draftline.model.target.target import Target

# Of each tensor; any further training moves nearly all of its values.
_VALUES = 64


def target_digest(target: Target) -> str:
    """16 hex digits of `target`'s weights, the same in every dtype that it may be loaded in.

    Values are rounded to bfloat16, which float32 and bfloat16 copies of one checkpoint share. Where
    scales were multiplied in while loading they may not, so there embedding and norms count alone.
    """
    digest = hashlib.sha256()
    for tensor in [target.embedding, *target.parameters()]:
        if target.dequantised and tensor.ndim > 1 and tensor is not target.embedding:
            continue
        digest.update(some_values(tensor.detach(), torch.bfloat16).numpy().tobytes())
    return digest.hexdigest()[:16]


def some_values(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values spread over `tensor`, float32 `[some]` on the host, rounded to `dtype`."""
    some = tensor.flatten()[:: max(1, tensor.numel() // _VALUES)]
    return some.to(dtype).float().cpu()


def digest_in(key: str) -> str | None:
    """The target's digest in a key of features, None in one of an earlier draftline."""
    target, dash, _ = key.partition("-")
    return target if dash else None
