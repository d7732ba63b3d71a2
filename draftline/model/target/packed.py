"""Integer weights of AWQ and GPTQ checkpoints, several to an int32, unpacked into plain ones.

Both store a linear module `[out, in]` as `qweight`, `qzeros` and `scales`, whose groups run along
the inputs: weight = (integer - zero) * scale. AWQ packs eight outputs to an int32, interleaved; GPTQ
packs inputs, may say by `g_idx` which group an input is of, and stores zeros less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftline.errors import TargetError
from draftline.model.target.checkpoint_files import StoredTensor

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Output 8 c + j of AWQ lies in the nibble of this number, counted from the low end.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Packing:
    """How integers of `bits` are packed; `interleaved` is AWQ's way, else GPTQ's, whose zeros are
    `zero_offset` more than stored."""

    bits: int
    interleaved: bool
    zero_offset: int


def read_packing(path: str, method: str, settings: Mapping[str, Any]) -> Packing:
    """The packing that a quantization_config of awq or gptq tells of; TargetError for another."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    if method == "awq":
        layout = str(settings.get("version", "gemm")).lower()
        known = bits == 4 and layout == "gemm"
    else:
        layout = str(settings.get("checkpoint_format") or "gptq").lower()
        known = bits in (2, 4, 8) and layout in ("gptq", "gptq_v2")
    if not known:
        raise TargetError(
            f"target.path={path}: it is quantised ({method}, {bits} bits, layout {layout}), and "
            "draftline unpacks awq of 4 bits in layout gemm, and gptq of 2, 4 or 8 bits in layout "
            "gptq or gptq_v2; take another checkpoint of the model"
        )
    return Packing(int(bits), method == "awq", int(layout == "gptq"))


def unpacked_shapes(
    path: str, stored: Mapping[str, StoredTensor], packing: Packing
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint on the meta device as `unpack` will name and shape it.

    Raises TargetError where parts of a packed weight are missing or do not fit one another.
    """
    found: dict[str, Tensor] = {}
    packed = {name.removesuffix("qweight") for name in stored if name.endswith(".qweight")}
    for name, tensor in stored.items():
        stem, _, last = name.rpartition(".")
        if f"{stem}." not in packed or last not in _PARTS:
            found[name] = tensor.on_meta()
    many = 32 // packing.bits
    for stem in packed:
        lost = [part for part in _PARTS[:3] if stem + part not in stored]
        if lost:
            raise TargetError(
                f"target.path={path}: {stem}qweight has no {', '.join(lost)} beside it"
            )
        rows, columns = stored[f"{stem}qweight"].shape
        inputs, outputs = (rows, columns * many) if packing.interleaved else (rows * many, columns)
        groups = stored[f"{stem}scales"].shape[0]
        zeros = (groups, outputs // many)
        index = stored.get(f"{stem}g_idx")
        fits = (
            stored[f"{stem}scales"].shape == (groups, outputs)
            and stored[f"{stem}qzeros"].shape == zeros
            and (index.shape == (inputs,) if index is not None else inputs % groups == 0)
        )
        if not fits:
            raise TargetError(
                f"target.path={path}: {stem}qweight {[rows, columns]} does not fit its scales "
                f"{list(stored[f'{stem}scales'].shape)} and zeros "
                f"{list(stored[f'{stem}qzeros'].shape)} at {packing.bits} bits"
            )
        found[f"{stem}weight"] = torch.empty(outputs, inputs, dtype=torch.float16, device="meta")
    return found


def unpack(
    stored: Mapping[str, StoredTensor], packing: Packing, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The checkpoint with plain weights: packed ones in `dtype` as `weight`, all others as stored.

    Computed in float32, one weight at a time.
    """
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    packed = {name.removesuffix("qweight") for name in stored if name.endswith(".qweight")}
    files = sorted({tensor.file for tensor in stored.values()})
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in (name for name, tensor in stored.items() if tensor.file == file):
                stem, _, last = name.rpartition(".")
                if f"{stem}." not in packed or last not in _PARTS:
                    found[name] = opened.get_tensor(name)
                    continue
                mine = parts.setdefault(f"{stem}.", {})
                mine[last] = opened.get_tensor(name)
                # The parts of a weight may lie in two files.
                if all(f"{stem}.{p}" not in stored or p in mine for p in _PARTS):
                    found[f"{stem}.weight"] = _plain(mine, packing).to(dtype)
                    del parts[f"{stem}."]
    return found


def _plain(parts: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """float32 `[out, in]` of the parts of one weight."""
    scales = parts["scales"].float()
    zeros = _integers(parts["qzeros"], packing)
    zeros = (zeros + packing.zero_offset) & (2**packing.bits - 1)
    if packing.interleaved:
        values = _integers(parts["qweight"], packing)
    else:
        values = _integers(parts["qweight"].t().contiguous(), packing).t()
    groups = parts.get("g_idx")
    if groups is None:
        groups = torch.arange(len(values)) // (len(values) // len(scales))
    groups = groups.long()
    plain: Tensor = ((values - zeros[groups]) * scales[groups]).t().contiguous()
    return plain


def _integers(packed: Tensor, packing: Packing) -> Tensor:
    """int32 `[rows, columns * 32 / bits]` of `packed [rows, columns]`."""
    many = 32 // packing.bits
    order = torch.tensor(_AWQ_NIBBLES) if packing.interleaved else torch.arange(many)
    shifts = (order * packing.bits).to(torch.int32)
    spread: Tensor = (packed[..., None] >> shifts) & (2**packing.bits - 1)
    return spread.reshape(len(packed), -1)
