"""What is known of a target before its weights are loaded: shapes, bytes, tokenizer, stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftline.errors import TargetError
from draftline.model.fidelity import check_fidelity
from draftline.model.probe import find_ends
from draftline.model.source import resolve_target
from draftline.model.taps import check_taps, choose_taps
from draftline.model.target import auto_dtype, decoder_layers, stop_ids

# A directory with none of these has no tokenizer; with one of them, it must load.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


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

    Bytes are of parameters in `dtype`: `total_bytes` all of them, which a loaded
    target keeps; `trunk_bytes` the embedding and
    the layers up to the last tap, which is what features need; `head_bytes` is 0 when the head is
    the embedding. `trunk_flops` and `total_flops` are matrix work a token, 2 a weight that the token
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
) -> TargetFacts:
    """The facts of the target at `path` (see `resolve_target`), from its config and tokenizer.

    `device_type` (cpu, cuda) settles dtype=auto as `load_target` does. Raises TargetError where
    they cannot be read, the taps do not fit, or features would not be the target's own (see
    `check_fidelity`); what only its weights show is left to `load_target`.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if dtype == "auto":
        dtype = auto_dtype(device_type)
    source = resolve_target(path)
    remote = {"trust_remote_code": trust_remote_code}
    part = "tokenizer (tokenizer.json, tokenizer_config.json)"
    try:
        tokenizer = (
            AutoTokenizer.from_pretrained(source, **remote) if _has_tokenizer(source) else None
        )
        part = "config.json"
        config = AutoConfig.from_pretrained(source, **remote)
        # Nothing is allocated: parameters on the meta device have a shape and a type only.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **remote)
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        ImportError,
        RuntimeError,
        StrictDataclassError,
    ) as error:
        first = " ".join(str(error).split()[:60]) or type(error).__name__
        raise TargetError(f"target.path={path}: its {part} cannot be read: {first}") from None
    with suppress(OSError):  # a target need not have one
        model.generation_config = GenerationConfig.from_pretrained(source)
    return _facts(model, tokenizer, source, taps, num_taps)


def _facts(
    model: Any, tokenizer: Any, source: str, taps: Sequence[int] | None, num_taps: int
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
        embedding=_stored_rows(model, rows, source),
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
    """2 a weight and token; stacked experts `[experts, ...]` count by the share that is routed to."""
    routed = getattr(text, "num_experts_per_tok", None) or 1
    return 2.0 * sum(
        p.numel() * (min(routed, len(p)) / len(p) if p.ndim == 3 else 1) for p in parameters
    )


def _has_tokenizer(source: str) -> bool:
    directory = Path(source)
    return not directory.is_dir() or any((directory / name).exists() for name in _TOKENIZER_FILES)


def _stored_rows(model: Any, rows: Tensor, source: str) -> StoredRows:
    """Where the embedding lies on disk: a checkpoint's prefix may differ, its last names do not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from safetensors import SafetensorError, safe_open

    shape = (int(rows.shape[0]), int(rows.shape[1]))
    name = next(name for name, p in model.named_parameters() if p is rows)
    ending = ".".join(name.rsplit(".", 2)[-2:])
    directory = Path(source)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(source, local_files_only=True))
        except LocalEntryNotFoundError:
            return StoredRows(shape, None, name)
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as stored:
                for key in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                    if key.endswith(ending) and stored.get_slice(key).get_shape() == list(shape):
                        return StoredRows(shape, file, key)
        except (OSError, SafetensorError):
            break  # a damaged file is load_target's to report
    return StoredRows(shape, None, name)
