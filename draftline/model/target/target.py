"""The frozen target: loaded, tapped, and run either as a feature source or as a verifier.

Works for every decoder-only Hugging Face causal LM whose layers form one list, multimodal wrappers
included. What could make a drafter silently wrong (a random head, an unknown embedding or logit
transform) is probed with a real forward at load time and refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.head import TargetEnds
from draftline.model.kv_cache import StaticKV
from draftline.model.target.fidelity import check_fidelity, check_weights, own_answers
from draftline.model.target.loading import load_weights, open_config
from draftline.model.target.probe import probe
from draftline.model.target.reading import named
from draftline.model.target.replicate import replicate
from draftline.model.target.rope import fix_rope
from draftline.model.target.source import resolve_target
from draftline.model.target.tapped import TappedDecoder
from draftline.model.target.taps import check_taps, choose_taps
from draftline.model.target.tokenizer import check_vocabulary, load_tokenizer

_DTYPES = ("auto", "float32", "bfloat16")


class Target:
    """A frozen language model with taps. One object serves one thread; `replica` makes another.

    Attributes: `taps`, `hidden_size`, `num_layers`, `vocab_size` (head rows), `embedding`
    `[rows, hidden]` and `embed_scale` (block inputs are rows times scale), `head`, `stop_ids`,
    `tokenizer`, `text_config`, `layers` (decoder layers), `final_norm` (None where it is not called
    `norm`), `dtype`, `device` (that of embedding, head and results), `devices` (all it spans),
    `fidelity` (what was compared with the model's own forward), `rope` (the table that was fixed).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        taps: Sequence[int] | None = None,
        num_taps: int = 5,
        context: int | None = None,
    ) -> None:
        """`context`: the most positions that texts will have; None for as many as `model` is made for.

        Raises TargetError when the model cannot be tapped, or its features would not be its own.
        """
        self.tokenizer = tokenizer
        text_config = model.config.get_text_config()
        self.num_layers = int(text_config.num_hidden_layers)
        self.hidden_size = int(text_config.hidden_size)
        layers = decoder_layers(model)
        self.taps = (
            check_taps(taps, self.num_layers)
            if taps is not None
            else choose_taps(self.num_layers, num_taps)
        )
        model.requires_grad_(False).eval()
        decoder = model.get_decoder()
        self.fidelity = check_fidelity(decoder)
        self.rope = fix_rope(decoder, context)
        own = own_answers(decoder) if self.fidelity.untried else None
        self.embed_scale, self.head = probe(model, layers[0])
        self.vocab_size = self.head.vocab_size
        self.dequantised = False
        self.stop_ids = stop_ids(model, text_config, tokenizer)
        self._attach(model)
        if own is not None:
            measured = check_weights(self._tapped, own, type(decoder).__name__)
            self.fidelity = replace(measured, untried=self.fidelity.untried)

    def _attach(self, model: Any) -> None:
        """Takes `model` for this object's own and hooks its taps."""
        self._model = model
        self.text_config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        self.layers: nn.ModuleList = self._decoder.layers
        self.final_norm: nn.Module | None = getattr(self._decoder, "norm", None)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        places = dict.fromkeys(getattr(model, "hf_device_map", {}).values())
        self.devices = tuple(places) if len(places) > 1 else (self.device,)
        self._tapped = TappedDecoder(self._decoder, self.taps, self.device)

    def replica(self, device: torch.device) -> Target:
        """The same target on `device` for another thread: its weights are shared where they are on
        that device already, else copied once. Raises TargetError for one that spans devices."""
        if len(self.devices) > 1:
            raise TargetError(
                f"a target that spans {', '.join(map(str, self.devices))} has no replica on "
                f"{device}; load it once more for every further worker"
            )
        hooks = self._tapped.hooks
        model = replicate(self._model, device, without=lambda hook: hook in hooks)
        twin = copy.copy(self)
        twin._attach(model)
        twin.head = replace(self.head, weight=model.get_output_embeddings().weight)
        return twin

    def ends(self, device: torch.device) -> TargetEnds:
        """Embedding and head on `device`, sharing memory with this target where it is there."""
        return TargetEnds(self.embedding, self.embed_scale, self.head).on(device)

    def features(
        self, input_ids: Tensor, *, last_hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Taps `[rows, tokens, taps * hidden]` and, if asked, final-norm states `[rows, tokens, hidden]`.

        `input_ids [rows, tokens]` are padded on the right; causal attention keeps padding out of
        the real tokens, so no mask is needed. Without `last_hidden` the forward stops after the
        last tap.
        """
        return self._tapped.features(input_ids, last_hidden=last_hidden)

    def extend(
        self, input_ids: Tensor, positions: Tensor, cache: StaticKV, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Final-norm states `[rows, tokens, hidden]` and taps of new tokens, through the cache.

        `input_ids` and `positions [rows, tokens]`; `mask` is boolean, broadcasts to
        `[rows, 1, tokens, slots]`, or None for a prefill that is causal over itself.
        """
        return self._tapped.extend(input_ids, positions, cache, mask)

    @property
    def architecture(self) -> str:
        """The model class that the target's config.json names, by which engines choose theirs."""
        named = getattr(self._model.config, "architectures", None) or [type(self._model).__name__]
        return str(named[0])

    def check_decodable(self, slots: int) -> None:
        """Raises TargetError when the cached forward cannot serve contexts of `slots` tokens, or
        was seen to compute something else than the plain one."""
        kinds = set(getattr(self.text_config, "layer_types", None) or ())
        recurrent = sorted(k for k in kinds if "attention" not in k or "linear" in k)
        reason = self.fidelity.undecodable
        if recurrent:
            reason = (
                f"it has {', '.join(recurrent)} layers, whose state cannot be rewound when drafts are "
                "rejected"
            )
        if reason:
            raise TargetError(
                f"the target can be trained for, but not evaluated here: {reason}; serve the exported "
                "drafter with vLLM or SGLang instead"
            )
        if self.rope is not None and self.rope.longest and slots > self.rope.longest:
            raise TargetError(
                f"decoding needs {slots} positions, but the target was loaded with {self.rope.name} of "
                f"its {self.rope.kind} rotation, which serves {self.rope.longest}, as it was trained "
                "for; lower evaluate.max_new_tokens, or leave longer prompts out"
            )

    def parameters(self) -> list[Tensor]:
        """Every frozen tensor of the target once."""
        return list(self._model.parameters())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Block inputs `[..., hidden]` of `token_ids`: embedding rows times `embed_scale`."""
        return self.ends(self.device).embed(token_ids)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal LM, in order; raises TargetError where they are no such list."""
    layers = getattr(model.get_decoder(), "layers", None)
    wanted = int(model.config.get_text_config().num_hidden_layers)
    if not isinstance(layers, nn.ModuleList) or len(layers) < wanted:
        raise TargetError(
            f"{type(model).__name__}: no list of {wanted} decoder layers found at "
            f"{type(model.get_decoder()).__name__}.layers; draftline taps decoder-only models"
        )
    return layers


def auto_dtype(device_type: str) -> str:
    """What dtype=auto stands for on `device_type`."""
    return "bfloat16" if device_type == "cuda" else "float32"


def load_target(
    path: str,
    *,
    device: torch.device | Sequence[torch.device],
    dtype: str = "auto",
    taps: Sequence[int] | None = None,
    num_taps: int = 5,
    trust_remote_code: bool = False,
    context: int | None = None,
    choices: Choices | None = None,
) -> Target:
    """The frozen target at `path` (see `resolve_target`) on `device`, with its tokenizer.

    `context` settles the rotation of targets that would choose it by length; see `Target`.

    Several devices: layers are spread over them (see `device_map`), embedding and head are on the first.
    Raises TargetError when it cannot be loaded or is not what its checkpoint says (see
    `load_weights`), when its tokenizer is another model's, or when it cannot be tapped.
    """
    if dtype not in _DTYPES:
        raise TargetError(f"target.dtype={dtype} is not one of {', '.join(_DTYPES)}")
    devices = (device,) if isinstance(device, torch.device) else tuple(dict.fromkeys(device))
    on_cuda = devices[0].type == "cuda"
    if dtype == "auto":
        dtype = auto_dtype("cuda" if on_cuda else "cpu")
        if choices is not None:
            reason = "CUDA tensor cores" if on_cuda else "bfloat16 is slow on a CPU"
            choices.record("target.dtype", wanted="auto", got=dtype, reason=reason)
    source = resolve_target(path, weights=True)
    # First of all: what is no language model at all may have no tokenizer either.
    _, quantisation = open_config(path, source, trust_remote_code)
    tokenizer = load_tokenizer(path, source, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise TargetError(
            f"target.path={path} has no tokenizer (tokenizer.json, tokenizer_config.json); copy the "
            "target's into it"
        )
    model = load_weights(
        path,
        source,
        getattr(torch, dtype),
        devices,
        trust_remote_code=trust_remote_code,
        choices=choices,
    )
    check_vocabulary(path, tokenizer, model)
    with named(path):
        target = Target(model, tokenizer, taps=taps, num_taps=num_taps, context=context)
    target.dequantised = quantisation is not None
    if choices is not None:
        _record(target, context, choices)
    return target


def _record(target: Target, context: int | None, choices: Choices) -> None:
    """Enters what a target settled for itself."""
    if (rope := target.rope) is not None:
        texts = "as long as it is made for" if context is None else f"of {context} positions"
        choices.record(
            "target.rope",
            wanted=f"one {rope.kind} table for every text",
            got=rope.name,
            reason=f"for texts {texts}, where the target changes tables after {rope.switch}; "
            f"{rope.serving}",
        )
    if (untried := target.fidelity.untried) is not None:
        choices.record(
            "target.check",
            wanted="features compared with the model's own on a small twin, beyond every window",
            got="compared on short texts with the real weights",
            reason=f"no twin can be built: {untried}",
            fallback=True,
        )


def stop_ids(model: Any, text_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a text, by generation config, model config and tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(text_config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(v) for v in value)
    return tuple(sorted(found))
