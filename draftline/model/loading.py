"""A checkpoint as a model of transformers: with weights, or with shapes alone to be planned with.

Both go the same way and are checked alike, so what loading would refuse, a plan refuses already.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.architecture import (
    auto_class,
    empty_model,
    keep_language_model,
    read_config,
    read_tree,
)
from draftline.model.checkpoint_files import StoredTensor, read_stored
from draftline.model.packed import Packing, unpack, unpacked_shapes
from draftline.model.quantised import (
    Quantisation,
    check_stored,
    dequantise_on_loading,
    read_quantisation,
)
from draftline.model.spread import device_map

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Beside the language model: further prediction layers, encoders and what joins them to it, heads
# that judge. None of it is passed by text on its way to the next token.
_BESIDE = re.compile(
    r"(^|\.)(mtp\w*|nextn\w*|visual|vision\w*|image\w*|video\w*|audio\w*|speech\w*|sound\w*|vit|"
    r"siglip\w*|multi_?modal\w*|mm_\w+|embed_(vision|audio)|connector|\w*projector|\w*merger|"
    r"perceiver\w*|resampler|v_head|value_head|score|talker|token2wav|code2wav|medusa\w*|eagle\w*)"
    r"(\.|$)"
)
# Buffers that transformers computes itself, once saved with the weights.
_COMPUTED = re.compile(r"(rotary\w*\.inv_freq|position_ids|\.attn\.(masked_)?bias|causal_mask)$")


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
    if stored is None or (quantisation is not None and not quantisation.checked_by_name):
        keep_language_model(model)
        return model, stored
    if quantisation is not None and quantisation.packing is not None:
        tensors = unpacked_shapes(path, stored, quantisation.packing)
    else:
        tensors = {name: tensor.on_meta() for name, tensor in stored.items()}
    with reading(path, "model (config.json, safetensors)", "loaded"), _silent():
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
    spread = device_map(shapes, devices) if len(devices) > 1 else None
    rebuilt = quantisation is not None and quantisation.rebuilt
    with reading(path, "model (config.json, safetensors)", "loaded"), _no_report():
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


def check_read(
    path: str, model: Any, loading: Mapping[str, Any], dropped: Sequence[str]
) -> list[str]:
    """Raises TargetError unless the checkpoint and the language model of `model` are the same
    tensors; `loading` is transformers' loading info, `dropped` what is no part of the language
    model. Returns the names of unread tensors that do not matter to text."""

    def ours(name: str) -> bool:
        return not any(name == part or name.startswith(f"{part}.") for part in dropped)

    wrong = sorted(entry for entry in loading["mismatched_keys"] if ours(entry[0]))
    if wrong:
        name, stored, wanted = wrong[0]
        raise TargetError(
            f"target.path={path}: {len(wrong)} weights of the model differ in shape, first {name}: "
            f"{list(stored)} in the checkpoint, {list(wanted)} by config.json; the two are not of "
            "one model"
        )
    missing = sorted(name for name in loading["missing_keys"] if ours(name))
    if missing:
        raise TargetError(
            f"target.path={path}: {len(missing)} weights are not in the checkpoint and would be "
            f"random, first {missing[0]}; a drafter trained against them would be worthless"
        )
    unread = sorted(name for name in loading["unexpected_keys"] if ours(name))
    harmful = [name for name in unread if not _harmless(name, model)]
    if harmful:
        text = model.config.get_text_config()
        raise TargetError(
            f"target.path={path}: {len(harmful)} tensors of the checkpoint would stay unread, first "
            f"{harmful[0]}: {type(model).__name__} with {text.num_hidden_layers} layers, as "
            "config.json describes it, has no such part, so it would compute something else than "
            "the checkpoint; config.json is another model's, or does not tell of a quantisation"
        )
    return unread


@contextmanager
def reading(path: str, part: str, verb: str) -> Iterator[None]:
    """Turns whatever transformers raises inside into one TargetError that names path and part.

    Its code paths are as many as there are model types, and so are the exceptions of a file that
    one of them did not expect.
    """
    try:
        yield
    except (TargetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TargetError(
            f"target.path={path}: its {part} cannot be {verb}: {_first_sentence(error)}"
        ) from None


def _harmless(name: str, model: Any) -> bool:
    """Whether text is the same without the checkpoint's tensor `name`, which the model has not."""
    if _COMPUTED.search(name):
        return True
    text = model.config.get_text_config()
    layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
    if layer is not None and not _BESIDE.search(name[: layer.start() + 1]):
        behind = int(layer[2]) - int(text.num_hidden_layers)
        # Layers that predict further tokens are numbered on behind the last one.
        return 0 <= behind < int(getattr(text, "num_nextn_predict_layers", None) or 0)
    if _BESIDE.search(name):
        return True
    if name.endswith("lm_head.weight"):
        # Tied: the head is the embedding, whatever else was saved.
        return model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return False


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


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it needs code that comes with the model; read it, and run it with "
            "target.trust_remote_code=true"
        )
    sentence = re.split(r"(?<=[^.\d]{4})\. (?=[A-Z])", text, maxsplit=1)[0]
    return " ".join(sentence.split()[:60]) or type(error).__name__


@contextmanager
def _no_report() -> Iterator[None]:
    """transformers' table of unread and missing weights is kept back: `check_read` says it."""
    logger = logging.getLogger("transformers.modeling_utils")

    def severe(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(severe)
    try:
        yield
    finally:
        logger.removeFilter(severe)


@contextmanager
def _silent() -> Iterator[None]:
    """Nor a progress bar, for what takes no time."""
    from transformers.utils import logging as own

    shown = own.is_progress_bar_enabled()
    own.disable_progress_bar()
    try:
        with _no_report():
            yield
    finally:
        if shown:
            own.enable_progress_bar()
