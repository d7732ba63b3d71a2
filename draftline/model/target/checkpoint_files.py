"""The safetensors files of a target, read by their headers alone: names, types, shapes, bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from draftline.errors import TargetError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# safetensors refuses longer headers too.
_LONGEST_HEADER = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint as it lies in `file`; `dtype` is safetensors' name (BF16, F8_E4M3)."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    def on_meta(self) -> torch.Tensor:
        """Its type and shape without its values; a type that torch lacks is taken for bytes."""
        return torch.empty(self.shape, dtype=_DTYPES.get(self.dtype, torch.uint8), device="meta")


def read_stored(path: str, source: str) -> dict[str, StoredTensor] | None:
    """Every tensor of the checkpoint `source`, which the user called `path`, by its stored name.

    None where no weights are at hand: a directory with a config.json only, a hub name that was not
    fetched yet. Raises TargetError for weights in another format, a missing shard, and a file that
    is damaged or cut.
    """
    directory = _directory(source)
    if directory is None:
        return None
    complete = Path(source).is_dir()
    index, single = directory / _INDEX, directory / _SINGLE
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = [directory / name for name in _shards(path, index)]
        gone = [file.name for file in files if not file.is_file()]
        if gone and not complete:
            return None
        if gone:
            raise TargetError(
                f"target.path={path}: {len(gone)} of the {len(files)} files that {_INDEX} names are "
                f"missing, first {gone[0]}: the download or copy did not end; fetch them"
            )
    else:
        if complete:
            _check_other_formats(path, directory)
        return None
    return {name: tensor for file in files for name, tensor in _header(path, file).items()}


def _directory(source: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _shards(path: str, index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise TargetError(
            f"target.path={path}: its {_INDEX} cannot be read ({error!r:.80}); fetch it again"
        ) from None


def _check_other_formats(path: str, directory: Path) -> None:
    """Raises TargetError where the weights are there, in files that draftline does not read."""
    names = sorted(file.name for file in directory.iterdir() if file.is_file())
    pickled = [n for n in names if n.startswith("pytorch_model") and ".bin" in n]
    foreign = [n for n in names if n.endswith((".safetensors", ".pth", ".pt", ".gguf", ".ckpt"))]
    if pickled:
        raise TargetError(
            f"target.path={path}: its weights are pickled ({pickled[0]}), and draftline reads "
            "safetensors only, whose contents it can check and which run no code; save it again: "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        )
    if foreign:
        raise TargetError(
            f"target.path={path}: neither {_SINGLE} nor {_INDEX}, only {foreign[0]}: not the layout "
            "that transformers loads"
            + (
                "; give that file as target.path"
                if foreign[0].endswith(".gguf")
                else "; fetch the transformers version of the model, or convert it"
            )
        )


def _header(path: str, file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose size must be what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        raw = stream.read(length) if 0 < length <= min(size - 8, _LONGEST_HEADER) else b""
    try:
        if start.startswith(b"version "):
            raise TargetError(
                f"target.path={path}: {file.name} is a Git LFS pointer of {size} bytes, not the "
                "weights: fetch them (git lfs pull)"
            )
        tree = json.loads(raw)
        tree.pop("__metadata__", None)
        found = {
            name: (StoredTensor(e["dtype"], tuple(e["shape"]), file), e["data_offsets"])
            for name, e in tree.items()
        }
        end = 8 + length + max((offsets[1] for _, offsets in found.values()), default=0)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise TargetError(
            f"target.path={path}: the model file {file.name} ({size} bytes) has no safetensors "
            "header: damaged, or its download did not end; fetch it again"
        ) from None
    if size != end:
        what = "cut" if size < end else "damaged"
        raise TargetError(
            f"target.path={path}: the model file {file.name} is {what}: {size} bytes, and its header "
            f"tells of {end}; fetch it again"
        )
    return {name: tensor for name, (tensor, _) in found.items()}
