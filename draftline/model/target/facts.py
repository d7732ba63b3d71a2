"""What is known of a target before its weights are loaded: shapes, bytes, tokenizer, stop tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.model.target.checkpoint_files import StoredTensor
from draftline.model.target.fidelity import check_fidelity
from draftline.model.target.loading import load_shapes
from draftline.model.target.probe import find_ends
from draftline.model.target.reading import named
from draftline.model.target.source import resolve_target
from draftline.model.target.taps import check_taps, choose_taps
from draftline.model.target.target import auto_dtype, decoder_layers, stop_ids
from draftline.model.target.tokenizer import check_vocabulary, load_tokenizer


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The embedding as it lies in the checkpoint: `shape`, and single rows read when asked for.

    A row is float32 `[hidden]`, or None where no safetensors file of the target is at hand.
    """

    shape: tuple[int, int]
    file: Path | None
    key: str

    def __getitem__(self, token_id: int) -> Tensor | None:
        if self.file is None:
            return None
        from safetensors import safe_open

        with safe_open(self.file, "pt") as stored:
            row: Tensor = stored.get_slice(self.key)[token_id : token_id + 1]
        return row[0].float()


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target's sizes, by the names that `Target` has, without a weight in memory.

    Bytes are of the language model's parameters as they will be loaded, in `dtype` (dequantised, and
    without encoders of images or sound): `total_bytes` all of them; `trunk_bytes` the embedding and
    the layers up to the last tap, which is what features need; `head_bytes` is 0 when the head is
    the embedding. `trunk_flops` and `total_flops` are matrix work per token, 2 per weight that the token
    passes (of experts, those it is routed to), attention scores and head left out. `tokenizer` is
    None for a directory that holds none.
    """

    tokenizer: Any
    text_config: Any
    taps: tuple[int, ...]
    hidden_size: int
    num_layers: int
    vocab_size: int
    embedding: StoredRows
    stop_ids: tuple[int, ...]
    dtype: torch.dtype
    total_bytes: int
    trunk_bytes: int
    embedding_bytes: int
    head_bytes: int
    trunk_flops: float
    total_flops: float

    @property
    def embedding_rows(self) -> int:
        return self.embedding.shape[0]


def read_facts(
    path: str,
    *,
    dtype: str = "auto",
    taps: Sequence[int] | None = None,
    num_taps: int = 5,
    trust_remote_code: bool = False,
    device_type: str = "cpu",
    choices: Choices | None = None,
) -> TargetFacts:
    """The facts of the target at `path` (see `resolve_target`): from its config, its tokenizer and
    the headers of its weights.

    `device_type` (cpu, cuda) settles dtype=auto as `load_target` does; a quantised target's dtype is
    that of its dequantised weights. Raises TargetError where they cannot be read, do not fit one
    another (see `load_weights`), the taps do not fit, or features would not be the target's own (see
    `check_fidelity`); what only its weights show is left to `load_target`.
    """
    from transformers import GenerationConfig

    if dtype == "auto":
        dtype = auto_dtype(device_type)
    source = resolve_target(path)
    model, stored = load_shapes(
        path,
        source,
        getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        choices=choices,
    )
    tokenizer = load_tokenizer(path, source, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        check_vocabulary(path, tokenizer, model)
    with suppress(OSError):  # a target need not have one
        model.generation_config = GenerationConfig.from_pretrained(source)
    with named(path):
        return _facts(model, tokenizer, stored or {}, taps, num_taps)


def _facts(
    model: Any,
    tokenizer: Any,
    stored: Mapping[str, StoredTensor],
    taps: Sequence[int] | None,
    num_taps: int,
) -> TargetFacts:
    text = model.config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    layers = decoder_layers(model)
    embedding, head = find_ends(model)
    chosen = check_taps(taps, num_layers) if taps is not None else choose_taps(num_layers, num_taps)
    check_fidelity(model.get_decoder())
    rows = embedding.weight
    embedding_bytes = _bytes([rows])
    trunk = [p for layer in layers[: chosen[-1] + 1] for p in layer.parameters()]
    every = [p for layer in layers[:num_layers] for p in layer.parameters()]
    return TargetFacts(
        tokenizer=tokenizer,
        text_config=text,
        taps=chosen,
        hidden_size=int(text.hidden_size),
        num_layers=num_layers,
        vocab_size=int(head.weight.shape[0]),
        embedding=_stored_rows(model, rows, stored),
        stop_ids=stop_ids(model, text, tokenizer),
        dtype=rows.dtype,
        total_bytes=_bytes(list(model.parameters())),
        trunk_bytes=embedding_bytes + _bytes(trunk),
        embedding_bytes=embedding_bytes,
        head_bytes=0 if head.weight is rows else _bytes([head.weight]),
        trunk_flops=_flops(trunk, text),
        total_flops=_flops(every, text),
    )


def _bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _flops(parameters: Sequence[Tensor], text: Any) -> float:
    """2 per weight and token; stacked experts `[experts, ...]` count by the share that is routed to."""
    routed = getattr(text, "num_experts_per_tok", None) or 1
    return 2.0 * sum(
        p.numel() * (min(routed, len(p)) / len(p) if p.ndim == 3 else 1) for p in parameters
    )


def find_stored(
    model: Any, weight: Tensor, stored: Mapping[str, StoredTensor]
) -> tuple[str, StoredTensor | None]:
    """The name of `model`'s parameter `weight` in its checkpoint, and the tensor that lies there; its own
    name and None where none does. A checkpoint's prefix may differ, its last names do not."""
    name = next(name for name, parameter in model.named_parameters() if parameter is weight)
    ending = ".".join(name.rsplit(".", 2)[-2:])
    for key, tensor in stored.items():
        if key.endswith(ending) and tensor.shape == tuple(weight.shape):
            return key, tensor
    return name, None


def _stored_rows(model: Any, rows: Tensor, stored: Mapping[str, StoredTensor]) -> StoredRows:
    key, tensor = find_stored(model, rows, stored)
    return StoredRows(
        (int(rows.shape[0]), int(rows.shape[1])), None if tensor is None else tensor.file, key
    )
