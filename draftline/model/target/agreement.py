"""Whether a checkpoint and the model that config.json describes are the same tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import safe_open
from torch import Tensor

from draftline.amounts import counted
from draftline.errors import TargetError
from draftline.model.target.checkpoint_files import StoredTensor

# Beside the language model: further prediction layers, encoders and what joins them to it, heads
# that judge. None of it is passed by text on its way to the next token.
_BESIDE = re.compile(
    r"(^|\.)(mtp\w*|nextn\w*|visual|vision\w*|image\w*|video\w*|audio\w*|speech\w*|sound\w*|vit|"
    r"siglip\w*|multi_?modal\w*|mm_\w+|embed_(vision|audio)|connector|\w*projector|\w*merger|"
    r"perceiver\w*|resampler|v_head|value_head|score|talker|token2wav|code2wav|medusa\w*|eagle\w*)"
    r"(\.|$)"
)
# So many rows tell two matrices apart.
_COMPARED = 64
# Buffers that transformers computes itself, once saved with the weights.
_COMPUTED = re.compile(r"(rotary\w*\.inv_freq|position_ids|\.attn\.(masked_)?bias|causal_mask)$")


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
            f"target.path={path}: {counted(len(harmful), 'tensor')} of the checkpoint would stay "
            f"unread, first {harmful[0]}: {type(model).__name__} with {text.num_hidden_layers} layers, as "
            "config.json describes it, has no such part, so it would compute something else than "
            "the checkpoint; config.json is another model's, or does not tell of a quantisation"
        )
    return unread


def check_tied(path: str, model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Raises TargetError where `model`, fresh from its config, has one tensor for embedding and
    head, and the checkpoint has two that differ: transformers would take both, servers one."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if first is None or last is None or first.weight is not last.weight:
        return
    shape = tuple(last.weight.shape)
    ends = [
        next(
            (name for name in stored if name.endswith(ending) and stored[name].shape == shape), None
        )
        for ending in ("embed_tokens.weight", "lm_head.weight")
    ]
    embedding, head = ends
    if embedding is None or head is None:
        return
    if _some_rows(stored[embedding], embedding).equal(_some_rows(stored[head], head)):
        return
    raise TargetError(
        f"target.path={path}: config.json says tie_word_embeddings, and the checkpoint has a "
        f"{head} that is not its {embedding}: transformers would compute with both, vLLM with the "
        "embedding alone; set tie_word_embeddings to false where the head was trained, else take "
        "it out of the checkpoint"
    )


def _some_rows(tensor: StoredTensor, name: str) -> Tensor:
    """Rows spread over a stored matrix, float32."""
    with safe_open(tensor.file, "pt") as file:
        rows: Tensor = file.get_slice(name)[:: max(1, tensor.shape[0] // _COMPARED)]
    return rows.float()


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
