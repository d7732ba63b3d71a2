"""Checkpoints quantised in the formats that are public, next to the plain weights they stand for.

Written from the formats' own packing rules, independently of what draftline unpacks with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.fakes import tiny_target_dir

Parts = dict[str, Tensor]
_BESIDE = ("vision", "visual", "projector")
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, edit: Callable[[Parts], Parts]) -> None:
    file = path / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def quantised_pair(
    directory: Path, family: str, quantise: Quantise, config: dict[str, Any] | None
) -> tuple[Path, Path]:
    """A target and the same target quantised: every projection of the language model replaced by
    `quantise`'s parts, whose plain value the first of the two holds."""
    plain = tiny_target_dir(directory / "plain", family)
    packed = directory / "packed"
    shutil.copytree(plain, packed)
    stored: Parts = {}
    meant: Parts = {}
    for name, value in load_file(plain / "model.safetensors").items():
        ours = name.endswith("proj.weight") and not any(part in name for part in _BESIDE)
        if not ours:
            stored[name] = meant[name] = value
            continue
        parts, meant[name] = quantise(value)
        stem = name.removesuffix("weight")
        stored |= {stem + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        edit_config(packed, quantization_config=config)
    return plain, packed


def fp8(scale_name: str | None, *, block: int | None = None) -> Quantise:
    """float8 weights with one scale, or one for each `block` x `block`, called `scale_name`."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        rows, columns = weight.shape
        tall, wide = (block, block) if block else (rows, columns)
        tiles = weight.reshape(rows // tall, tall, columns // wide, wide)
        scale = tiles.abs().amax((1, 3)) / 448
        small = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        meant = (small.float() * scale[:, None, :, None]).reshape(rows, columns)
        parts = {"weight": small.reshape(rows, columns)}
        if scale_name is not None:
            parts[scale_name] = scale if block else scale.reshape(())
        return parts, meant

    return quantise


def gptq(bits: int, group: int, *, less_one: bool = True, shuffled: bool = False) -> Quantise:
    """GPTQ: inputs packed, zeros stored less one (`less_one`), groups in any order (`shuffled`)."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        integers, zeros, scales, index = _integers(weight, bits, group, shuffled)
        meant = ((integers - zeros[index]) * scales[index]).t().contiguous()
        parts = {
            "qweight": _pack(integers, bits, list(range(32 // bits))),
            "qzeros": _pack((zeros - int(less_one)).t(), bits, list(range(32 // bits))).t(),
            "scales": scales.half(),
            "g_idx": index.int(),
        }
        return parts, meant

    return quantise


def awq(group: int) -> Quantise:
    """AWQ: eight outputs packed in the order 0 2 4 6 1 3 5 7."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        integers, zeros, scales, index = _integers(weight, 4, group, False)
        meant = ((integers - zeros[index]) * scales[index]).t().contiguous()
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {
            "qweight": _pack(integers.t(), 4, order).t(),
            "qzeros": _pack(zeros.t(), 4, order).t(),
            "scales": scales.half(),
        }
        return parts, meant

    return quantise


def _integers(
    weight: Tensor, bits: int, group: int, shuffled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers `[in, out]`, zeros and scales `[groups, out]`, and the group of every input."""
    inputs = weight.t()
    index = torch.arange(len(inputs)) // group
    if shuffled:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(1))]
    top = 2**bits - 1
    scales = torch.stack(
        [
            (rows.amax(0) - rows.amin(0)) / top
            for g in index.unique()
            for rows in [inputs[index == g]]
        ]
    )
    scales = scales.half().float()
    lows = torch.stack([inputs[index == g].amin(0) for g in index.unique()])
    zeros = (-lows / scales).round().clamp(1, top).long()
    integers = (inputs / scales[index] + zeros[index]).round().clamp(0, top).long()
    return integers, zeros, scales, index


def _pack(values: Tensor, bits: int, order: list[int]) -> Tensor:
    """int32 in which row `many * r + order[k]` of `values` lies `k` places up in row `r`."""
    many = len(order)
    rows = values.reshape(-1, many, values.shape[1])
    packed = sum(rows[:, source] << (bits * place) for place, source in enumerate(order))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
