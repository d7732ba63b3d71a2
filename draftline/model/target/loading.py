"""A checkpoint as a model of transformers: with weights, or with shapes alone to be planned with.

Both go the same way and are checked alike, so what loading would refuse, a plan refuses already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.target.agreement import check_read, check_tied
from draftline.model.target.architecture import (
    auto_class,
    empty_model,
    keep_language_model,
    read_config,
    read_tree,
)
from draftline.model.target.checkpoint_files import StoredTensor, read_stored
from draftline.model.target.device_map import device_map
from draftline.model.target.packed import Packing, unpack, unpacked_shapes
from draftline.model.target.quantised import (
    Quantisation,
    check_stored,
    dequantise_on_loading,
    read_quantisation,
)
from draftline.model.target.reading import no_report, reading, silent

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def open_config(path: str, source: str, trust_remote_code: bool) -> tuple[Any, Quantisation | None]:
    """transformers' configuration of the checkpoint `source`, which the user called `path`, set so
    that loading gives plain weights, and how they are quantised.

    Raises TargetError for what is no decoder-only language model, and for a quantisation that is
    not read or not dequantised here.
    """
    quantisation = read_quantisation(path, source, read_tree(path, source, trust_remote_code))
    with reading(path, "config.json", "read"):
        config = read_config(path, source, trust_remote_code)
    if quantisation is not None:
        dequantise_on_loading(config, quantisation)
    return config, quantisation


def load_shapes(
    path: str,
    source: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    choices: Choices | None = None,
) -> tuple[Any, dict[str, StoredTensor] | None]:
    """The language model of the checkpoint `source` on the meta device, and its stored tensors.

    `path` is what the user called it. Parameters have the type and shape that they will have when
    loaded. The tensors are None where none are at hand. Raises TargetError as `load_weights` does.
    """
    config, quantisation = open_config(path, source, trust_remote_code)
    stored = read_stored(path, source)
    if stored is not None:
        check_stored(path, stored, quantisation)
    if choices is not None and quantisation is not None:
        _record_weights(choices, quantisation, dtype)
    with reading(path, "config.json", "read"), torch.device("meta"):
        model = empty_model(path, config, dtype, trust_remote_code)
    if stored is not None:
        check_tied(path, model, stored)
    if stored is None or (quantisation is not None and not quantisation.checked_by_name):
        keep_language_model(model)
        return model, stored
    if quantisation is not None and quantisation.packing is not None:
        tensors = unpacked_shapes(path, stored, quantisation.packing)
    else:
        tensors = {name: tensor.on_meta() for name, tensor in stored.items()}
    with reading(path, "model (config.json, safetensors)", "loaded"), silent():
        named, loading = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=tensors,
            dtype=dtype,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    check_read(path, named, loading, keep_language_model(named))
    keep_language_model(model)
    return model, stored


def load_weights(
    path: str,
    source: str,
    dtype: torch.dtype,
    devices: Sequence[torch.device],
    *,
    trust_remote_code: bool = False,
    choices: Choices | None = None,
) -> Any:
    """The language model of the checkpoint `source` with its weights, on `devices`.

    Several devices: the layers are spread over them (see `device_map`). Every parameter is plain,
    in `dtype` but for those that the model keeps in float32. Raises TargetError when it cannot be
    loaded, when a weight is missing from the checkpoint (it would be random), when one of the
    checkpoint that belongs to the language model would stay unread, and for a quantisation that
    is not read or not dequantised here.
    """
    config, quantisation = open_config(path, source, trust_remote_code)
    stored = read_stored(path, source)
    if stored is not None:
        check_stored(path, stored, quantisation)
    auto = auto_class(path, config)
    with reading(path, "config.json", "read"), torch.device("meta"):
        shapes = empty_model(path, config, dtype, trust_remote_code)
    if stored is not None:
        check_tied(path, shapes, stored)
    spread = device_map(shapes, devices) if len(devices) > 1 else None
    rebuilt = quantisation is not None and quantisation.rebuilt
    with reading(path, "model (config.json, safetensors)", "loaded"), no_report():
        how = {
            "dtype": dtype,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
            # Whole models are moved below, in one go, without what text does not need.
            "device_map": None if rebuilt else spread,
        }
        if quantisation is not None and quantisation.packing is not None:
            model, loading = _unpacked(path, source, shapes, stored, quantisation.packing, how)
        else:
            model, loading = auto.from_pretrained(
                source, config=config, trust_remote_code=trust_remote_code, **how
            )
        if quantisation is not None and quantisation.after_loading:
            model = model.dequantize(dtype)
    if rebuilt:
        model = _rebuilt(path, model, shapes)
    elif quantisation is not None:
        _settle_types(model, shapes)
    dropped = keep_language_model(model)
    passed = check_read(path, model, loading, dropped)
    if stored is None and (fetched := read_stored(path, source)) is not None:
        check_stored(path, fetched, quantisation)
        check_tied(path, shapes, fetched)
    _check_plain(path, model)
    if choices is not None:
        if quantisation is not None:
            _record_weights(choices, quantisation, dtype)
        _record_parts(choices, dropped, passed)
    if spread is None:
        model.to(devices[0])
    elif rebuilt:
        from accelerate import dispatch_model

        model = dispatch_model(model, {k: v for k, v in spread.items() if k not in dropped})
    return model


def _unpacked(
    path: str,
    source: str,
    shapes: Any,
    stored: Mapping[str, StoredTensor] | None,
    packing: Packing,
    how: Mapping[str, Any],
) -> tuple[Any, Mapping[str, Any]]:
    """A model of `shapes`' class with the packed weights of the checkpoint, and its loading info."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig

    if stored is None and not Path(source).is_dir():
        # What transformers would have fetched itself.
        snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
        stored = read_stored(path, source)
    if stored is None:
        raise TargetError(f"target.path={path} has no weights (model.safetensors)")
    unpacked_shapes(path, stored, packing)
    model, loading = type(shapes).from_pretrained(
        None, config=shapes.config, state_dict=unpack(stored, packing, how["dtype"]), **how
    )
    with suppress(OSError):  # a target need not have one
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model, loading


def _settle_types(model: Any, shapes: Any) -> None:
    """Gives every parameter the type that it has in a plain model: where transformers renames a
    quantised checkpoint's tensors, it leaves those that are not quantised in their stored type."""
    wanted = dict(shapes.named_parameters())
    for name, parameter in model.named_parameters():
        if name in wanted and parameter.dtype in _FLOATS:
            parameter.data = parameter.data.to(wanted[name].dtype)


def _rebuilt(path: str, loaded: Any, plain: Any) -> Any:
    """`plain`, made of shapes alone, with the values of `loaded`: compressed-tensors also quantises
    the activations that enter its modules, and keeps scales that nothing reads any more."""
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for module_name, module in plain.named_modules():
        for own in (module._parameters, module._buffers):
            for name, empty in own.items():
                full = f"{module_name}.{name}" if module_name else name
                if empty is None:
                    continue
                if full not in tensors or tensors[full].shape != empty.shape:
                    raise TargetError(
                        f"target.path={path}: {full} was not dequantised while loading; "
                        "take the unquantised checkpoint"
                    )
                value = tensors[full].detach().to(empty.dtype)
                own[name] = torch.nn.Parameter(value, False) if own is module._parameters else value
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    return plain.eval()


def _check_plain(path: str, model: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in _FLOATS or type(parameter) is not torch.nn.Parameter:
            raise TargetError(
                f"target.path={path}: {name} is still quantised after loading ({parameter.dtype}); "
                "draftline computes with plain weights: take the unquantised checkpoint"
            )


def _record_weights(choices: Choices, quantisation: Quantisation, dtype: torch.dtype) -> None:
    choices.record(
        "target.weights",
        wanted=quantisation.method,
        got=f"dequantised to {str(dtype).removeprefix('torch.')}",
        reason=f"stored as {quantisation.method}; features are computed with plain weights, and "
        "activations are not quantised",
    )


def _record_parts(choices: Choices, dropped: Sequence[str], passed: Sequence[str]) -> None:
    if dropped:
        choices.record(
            "target.parts",
            wanted="the whole checkpoint",
            got=f"the language model, without {', '.join(dropped)}",
            reason="text passes none of it",
        )
    if passed:
        choices.record(
            "target.unread",
            wanted="every tensor of the checkpoint",
            got=f"all but {len(passed)}, first {passed[0]}",
            reason="they are no part of the language model",
        )
