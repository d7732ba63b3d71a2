"""How a checkpoint's weights are quantised, and whether loading gives what they stand for.

Everything that draftline does with a target (features, replicas, layers over devices, captured
graphs) is on plain weights, so a quantised checkpoint is dequantised while it is loaded, or refused.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import TargetError
from draftline.model.target.checkpoint_files import StoredTensor
from draftline.model.target.packed import Packing, read_packing

# What is dequantised while loading, and the package that transformers needs for it.
_PACKAGES = {
    "fp8": None,
    "mxfp8": None,
    "mxfp4": None,
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    # These two transformers keeps packed, for kernels of other packages; `packed.py` reads them.
    "awq": None,
    "gptq": None,
}
# Of these the parameters on the meta device can be checked against the checkpoint's names; the
# others rebuild modules in ways that need the values.
_BY_NAME = ("fp8", "mxfp8", "awq", "gptq")
# Files in which exporters describe a quantisation that config.json does not mention.
_SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_WAY_OUT = "take the unquantised checkpoint, or one with block scales (quant_method fp8)"
# What transformers would take for weights although a scale or a packing is missing.
_NARROW = ("F8_", "F4", "F6_", "I", "U", "BOOL")
_PACKED = re.compile(r"(weight|bias|_proj|proj|blocks|qdata|qweight|packed|experts)$")
_ALWAYS = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|weight_packed|qscales|weight_scale(_inv|_2)?)$"
)
_SCALE = re.compile(r"(scale|scales|absmax|scb|zeros?|zero_point|quant_state)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`method` is transformers' name of it; `packing` says how draftline itself unpacks it."""

    method: str
    packing: Packing | None = None

    @property
    def checked_by_name(self) -> bool:
        """Whether a model of shapes alone can tell which of the checkpoint's tensors are read."""
        return self.method in _BY_NAME

    @property
    def rebuilt(self) -> bool:
        """Whether the package that reads it leaves modules of its own around plain weights."""
        return _PACKAGES[self.method] is not None

    @property
    def after_loading(self) -> bool:
        """Whether the loaded model has still to be dequantised."""
        return self.method == "bitsandbytes"


def read_quantisation(path: str, source: str, tree: Mapping[str, Any]) -> Quantisation | None:
    """The quantisation that `tree`, the checkpoint's config.json, tells of; None for plain weights.

    Raises TargetError where transformers would not read it, or would not dequantise it here.
    """
    settings, place = _settings(tree)
    if settings is None:
        _check_side_files(path, Path(source), tree)
        return None
    if not isinstance(settings, dict):
        raise TargetError(f"target.path={path}: its {place} is no mapping; fetch config.json again")
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    method = "none named" if method is None else str(method)
    algorithm = settings.get("quant_algo") or settings.get("format")
    named = f"quant_method {method}" + (f", {algorithm}" if algorithm else "")
    if method not in _PACKAGES:
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        why = (
            "which transformers keeps packed, while draftline computes with plain weights"
            if method in AUTO_QUANTIZER_MAPPING
            else "which transformers does not read: it would take the weights without their scales"
        )
        raise TargetError(f"target.path={path}: it is quantised ({named}), {why}; {_WAY_OUT}")
    package = _PACKAGES[method]
    if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise TargetError(
            f"target.path={path}: it is quantised ({named}), and reading that needs the package "
            f"{package}, which is not installed: pip install {package}"
        )
    packing = read_packing(path, method, settings) if method in ("awq", "gptq") else None
    return Quantisation(method, packing)


def dequantise_on_loading(config: Any, quantisation: Quantisation) -> None:
    """Tells `config`, transformers' object, that loading shall give plain weights."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings is not None and quantisation.packing is not None:
            del part.quantization_config
        elif isinstance(settings, dict) and not quantisation.after_loading:
            settings["dequantize"] = True


def check_stored(
    path: str, tensors: Mapping[str, StoredTensor], quantisation: Quantisation | None
) -> None:
    """Raises TargetError where tensors are stored quantised and nothing says how to read them."""
    method = None if quantisation is None else quantisation.method
    if method is None:
        for name, tensor in tensors.items():
            last = name.rsplit(".", 1)[-1]
            narrow = tensor.dtype.startswith(_NARROW)
            if _ALWAYS.search(name) or (
                narrow and (_PACKED.search(last) or tensor.dtype[0] == "F")
            ):
                raise TargetError(
                    f"target.path={path}: {name} is stored quantised ({tensor.dtype} "
                    f"{list(tensor.shape)}) and config.json names no quantization_config, so its "
                    f"scales would stay unread; {_WAY_OUT}"
                )
    if method == "fp8":
        _check_scales(path, tensors)


def _check_scales(path: str, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.dtype.startswith("F8_E") or "scale" in name or len(tensor.shape) < 2:
            continue
        stem = name.removesuffix(".weight")
        scale = next(
            (s for s in (f"{name}_scale_inv", f"{stem}.scale") if s in tensors and s != name), None
        )
        if scale is None:
            found = sorted(s for s in tensors if s.startswith((stem + ".", stem + "_")))
            has = [s.removeprefix(stem + ".") for s in found if _SCALE.search(s)]
            raise TargetError(
                f"target.path={path}: {name} is float8 without the {name}_scale_inv that "
                f"quant_method fp8 reads (it has {', '.join(has) or 'no scale at all'}), so its "
                f"values would be off by that factor; {_WAY_OUT}"
            )
        grid = tensors[scale].shape
        if len(grid) == 2 and (tensor.shape[-2] % grid[0] or tensor.shape[-1] % grid[1]):
            raise TargetError(
                f"target.path={path}: {name} {list(tensor.shape)} does not divide into the blocks "
                f"of its scales {list(grid)}, which transformers needs to dequantise it; take the "
                "bfloat16 checkpoint"
            )


def _settings(tree: Mapping[str, Any]) -> tuple[Any, str]:
    for part, prefix in ((tree, ""), (tree.get("text_config"), "text_config.")):
        if not isinstance(part, Mapping):
            continue
        if part.get("quantization_config") is not None:
            return part["quantization_config"], f"{prefix}quantization_config"
        if part.get("compression_config") is not None:
            old = part["compression_config"]
            method = old.get("quant_method") if isinstance(old, Mapping) else None
            # transformers reads quantization_config only.
            return {"quant_method": f"{method or 'unknown'} in {prefix}compression_config"}, prefix
    return None, ""


def _check_side_files(path: str, directory: Path, tree: Mapping[str, Any]) -> None:
    for name in _SIDE_FILES:
        file = directory / name
        if not file.is_file():
            continue
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            said = {}
        inner = said.get("quantization", said) if isinstance(said, dict) else {}
        algorithm = inner.get("quant_algo") or inner.get("quant_method")
        if name == "hf_quant_config.json" and isinstance(inner, dict) and not algorithm:
            continue  # the KV cache alone is quantised, whose scales are no weights'
        raise TargetError(
            f"target.path={path}: it is quantised ({name}: {algorithm or 'bits ' + str(inner.get('bits'))}"
            "), and config.json, which alone transformers reads, does not say so: the weights would "
            f"be taken without their scales; {_WAY_OUT}"
        )
