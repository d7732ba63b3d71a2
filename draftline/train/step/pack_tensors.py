"""A pack as tensors on a device, and its way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftline.data.packing import Pack, PackArrays, build_pack
from draftline.data.store import Sample
from draftline.runtime.devices import upload
from draftline.runtime.staging import Staging

_DTYPES = {
    "input_ids": torch.int32,
    "loss_mask": torch.bool,
    "anchor_mask": torch.bool,
    "conversation": torch.int32,
    "position": torch.int32,
    "start": torch.int32,
}
# Of everything but the features.
PACK_BYTES_A_TOKEN = sum(dtype.itemsize for dtype in _DTYPES.values())


@dataclass(frozen=True, slots=True)
class PackTensors:
    """A pack on a device: `[tokens]` tensors as in PackArrays, and `features [tokens, width]`, the
    taps followed by the target's last hidden state where the loss needs it."""

    input_ids: Tensor
    loss_mask: Tensor
    anchor_mask: Tensor
    conversation: Tensor
    position: Tensor
    start: Tensor
    features: Tensor

    @staticmethod
    def small(tokens: int, device: torch.device) -> dict[str, Tensor]:
        """Buffers of everything but the features, filled with zeros."""
        return {
            f.name: torch.zeros(tokens, dtype=_DTYPES[f.name], device=device)
            for f in fields(PackArrays)
        }

    @staticmethod
    def empty(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> PackTensors:
        """Buffers of a pack, filled with zeros."""
        features = torch.zeros(tokens, width, dtype=dtype, device=device)
        return PackTensors(**PackTensors.small(tokens, device), features=features)

    @staticmethod
    def build(arrays: PackArrays, features: Tensor) -> PackTensors:
        """A pack on the device of its features."""
        device = features.device
        small = {f.name: upload(getattr(arrays, f.name), device) for f in fields(PackArrays)}
        return PackTensors(**small, features=features)

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class PackStager:
    """A pack on its target's device, on the way to a slot."""

    def __init__(
        self, tokens: int, block_size: int, row: Tensor, device: torch.device, *, depth: int
    ) -> None:
        """`row` are the features, where the forwards leave them; `depth` packs may be queued."""
        self.pack = PackTensors.small(tokens, device) | {"features": row}
        self._budget, self._block_size = tokens, block_size
        self._staging = {
            f.name: Staging(self.pack[f.name].shape, self.pack[f.name].dtype, device, depth=depth)
            for f in fields(PackArrays)
        }

    def fill(self, samples: Sequence[Sample], pack: Pack) -> None:
        """Queues the copies of everything but the features."""
        arrays = build_pack(samples, pack, self._budget, self._block_size)
        for name, staging in self._staging.items():
            host = staging.take()
            host.numpy()[...] = getattr(arrays, name)
            staging.send(host, self.pack[name])
