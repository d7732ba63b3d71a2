"""A second model over the same weights, so that two threads can each run one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def replicate(model: Any, device: torch.device, *, without: Callable[..., Any]) -> Any:
    """New module objects over `model`'s parameters and buffers; forward hooks `without` left out.

    Tensors that lie on `device` are shared, others copied there once, so tied weights stay tied.
    `without(hook)` says of a forward hook whether it belongs to the original alone: a copied module
    keeps its hooks, and those would go on reporting to the original's owner.
    """
    # deepcopy takes what the memo holds under an object's id for the copy of that object.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _moved(parameter, device)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to(device)
    with torch.no_grad():
        twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if without(hook)]:
                del hooks[key]
    return twin


def _moved(parameter: nn.Parameter, device: torch.device) -> Tensor:
    if parameter.device == device:
        return parameter
    return nn.Parameter(parameter.detach().to(device), requires_grad=False)
