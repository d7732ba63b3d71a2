"""Where the parts of a target go that is too large for one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from draftline.errors import TargetError


def device_map(model: Any, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Module name -> device, in the form of accelerate's `dispatch_model`.

    Decoder layers are whole and in order, balanced by bytes; everything else (embedding, head, final
    norm, a vision tower) is on the first device, so that embedding and head are together. `model` may
    be on the meta device. Raises TargetError when there are more devices than layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) < len(devices):
        found = f"{len(layers)} decoder layers" if isinstance(layers, nn.ModuleList) else "none"
        raise TargetError(
            f"{type(model).__name__} cannot span {len(devices)} devices "
            f"({', '.join(map(str, devices))}): it needs a list of at least as many decoder layers "
            f"and has {found}; name fewer devices"
        )
    sizes = [_bytes(layer) for layer in layers]
    places = spread_layers(sizes, _bytes(model) - sum(sizes), len(devices))
    place_of = {id(layer): devices[place] for layer, place in zip(layers, places, strict=True)}
    found_at: dict[str, torch.device] = {}

    def walk(name: str, module: nn.Module) -> None:
        if id(module) in place_of:
            found_at[name] = place_of[id(module)]
        elif any(id(inner) in place_of for inner in module.modules()):
            for child, inner in module.named_children():
                walk(f"{name}.{child}" if name else child, inner)
        else:
            found_at[name] = devices[0]

    walk("", model)
    return found_at


def spread_layers(layer_bytes: Sequence[int], other_bytes: int, devices: int) -> list[int]:
    """The device of every layer, ascending, such that the fullest device holds the least possible.

    Device 0 also holds `other_bytes`.
    """
    low, high = max(layer_bytes), other_bytes + sum(layer_bytes)
    while low < high:
        middle = (low + high) // 2
        if _filled(layer_bytes, other_bytes, middle)[-1] < devices:
            high = middle
        else:
            low = middle + 1
    return _filled(layer_bytes, other_bytes, low)


def _filled(layer_bytes: Sequence[int], used: int, limit: int) -> list[int]:
    """The device of every layer when each is filled up to `limit` bytes before the next."""
    places, device = [], 0
    for size in layer_bytes:
        if used + size > limit:
            device, used = device + 1, 0
        used += size
        places.append(device)
    return places


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
