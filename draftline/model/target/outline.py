"""What an export says of a target, read without its weights: sizes, and scales of embedding and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.config.model import TargetSection
from draftline.model.head import Head
from draftline.model.target.architecture import empty_model, keep_language_model
from draftline.model.target.checkpoint_files import StoredTensor
from draftline.model.target.facts import find_stored
from draftline.model.target.loading import load_shapes, open_config
from draftline.model.target.probe import find_ends, probe
from draftline.model.target.reading import named, silent
from draftline.model.target.source import resolve_target
from draftline.model.target.taps import check_taps, choose_taps
from draftline.model.target.target import decoder_layers

# Rows of the embedding and head that stand in for the target's.
_ROWS = 64
_PLAIN = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class TargetOutline:
    """A target by the names that `Target` has. `head` has no rows unless they were asked for."""

    architecture: str
    text_config: Any
    taps: tuple[int, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    embed_scale: float
    head: Head


def read_outline(section: TargetSection, *, with_head: bool) -> TargetOutline | None:
    """The outline of the target that `section` names, the head's rows `with_head` alone.

    Its own classes are built without their layers' weights and run on a few rows, as `probe` does with
    whole targets. None where they do not run so, or where the head is not stored as plain numbers: then
    the target must be loaded. Raises TargetError as `load_weights` does for what cannot be read.
    """
    path, remote = section.path, section.trust_remote_code
    source = resolve_target(path)
    shapes, stored = load_shapes(path, source, torch.float32, trust_remote_code=remote)
    with named(path):
        text = shapes.config.get_text_config()
        layers = int(text.num_hidden_layers)
        weight = find_ends(shapes)[1].weight
        taps = (
            choose_taps(layers, section.num_taps)
            if section.tap_layers is None
            else check_taps(section.tap_layers, layers)
        )
    try:
        config, _ = open_config(path, source, remote)
        scale, head = _measure(path, config, remote)
    except Exception:  # whatever a target's own classes raise without their layers
        return None
    rows = _stored(shapes, weight, stored or {}) if with_head else weight[:0]
    if rows is None:
        return None
    names = getattr(shapes.config, "architectures", None) or [type(shapes).__name__]
    return TargetOutline(
        architecture=str(names[0]),
        text_config=text,
        taps=taps,
        hidden_size=int(text.hidden_size),
        num_layers=layers,
        vocab_size=int(weight.shape[0]),
        embed_scale=scale,
        head=Head(rows, head.multiplier, head.softcap),
    )


def _measure(path: str, config: Any, remote: bool) -> tuple[float, Head]:
    """`probe` on a model with a few rows in embedding and head; its layers give back what they get."""
    from accelerate import init_empty_weights

    # Buffers are real: some targets keep the factor of their embeddings in one.
    with silent(), init_empty_weights(include_buffers=False):
        model = empty_model(path, config, torch.float32, remote)
    keep_language_model(model)
    model.eval()
    ends, layers = find_ends(model), decoder_layers(model)
    inside = {id(parameter) for parameter in layers.parameters()}
    for layer in layers:
        layer.forward = _passed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in model.modules():
            table = isinstance(module, nn.Embedding) or module in ends
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in inside:
                    shape = (
                        (min(_ROWS, len(parameter)), *parameter.shape[1:])
                        if table
                        else parameter.shape
                    )
                    module._parameters[name] = nn.Parameter(_values(shape), False)
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
    return probe(model, layers[0])


def _passed(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    return hidden_states


def _values(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)


def _stored(model: Any, weight: Tensor, stored: Mapping[str, StoredTensor]) -> Tensor | None:
    """`weight [vocab, hidden]` as it lies in the checkpoint; None where it is no plain tensor there."""
    from safetensors import safe_open

    key, tensor = find_stored(model, weight, stored)
    if tensor is None or tensor.dtype not in _PLAIN:
        return None
    with safe_open(tensor.file, "pt") as file:
        found: Tensor = file.get_tensor(key)
    return found
