"""The frozen target: loaded, tapped, and run either as a feature source or as a verifier.

Works for every decoder-only Hugging Face causal LM whose layers form one list, multimodal wrappers
included. What could make a drafter silently wrong (a random head, an unknown embedding or logit
transform) is probed with a real forward at load time and refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.attention import TARGET_ATTENTION, target_attention
from draftline.model.cache_check import check_cache
from draftline.model.head import TargetEnds
from draftline.model.kv_cache import StaticKV
from draftline.model.probe import probe
from draftline.model.replicate import replicate
from draftline.model.source import resolve_target
from draftline.model.spread import spanning_map
from draftline.model.taps import check_taps, choose_taps

_DTYPES = ("auto", "float32", "bfloat16")


class Target:
    """A frozen language model with taps. One object serves one thread; `replica` makes another.

    Attributes: `taps`, `hidden_size`, `num_layers`, `vocab_size` (head rows), `embedding`
    `[rows, hidden]` and `embed_scale` (block inputs are rows times scale), `head`, `stop_ids`,
    `tokenizer`, `text_config`, `layers` (decoder layers), `final_norm` (None where it is not called
    `norm`), `dtype`, `device` (that of the ends and of every result), `devices` (all it spans).
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, taps: Sequence[int] | None = None, num_taps: int = 5
    ) -> None:
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
        _use_own_attention(model)
        self.embed_scale, self.head = probe(model, layers[0])
        self.vocab_size = int(self.head.weight.shape[0])
        self.stop_ids = stop_ids(model, text_config, tokenizer)
        self._attach(model)

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
        # transformers 5.24 renames it, and takes the old name until 5.40.
        named = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        places = dict.fromkeys(getattr(model, "hf_device_map", {}).values())
        self.devices = tuple(places) if len(places) > 1 else (self.device,)
        self._cache_checked = False
        self._tapped: dict[int, Tensor] = {}
        self._hooks = [self._keep(tap) for tap in self.taps]
        for tap, hook in zip(self.taps, self._hooks, strict=True):
            self.layers[tap].register_forward_hook(hook)
        # The feature path shares every weight but ends at the last tap: no later layer, no norm.
        self._trunk = copy.copy(self._decoder)
        self._trunk._modules = dict(self._decoder._modules)
        self._trunk.layers = nn.ModuleList(list(self.layers)[: self.taps[-1] + 1])
        self._trunk.norm = nn.Identity()
        self._trunk.config = copy.copy(self._decoder.config)
        self._trunk.config.num_hidden_layers = self.taps[-1] + 1

    def replica(self, device: torch.device) -> Target:
        """The same target on `device` for another thread: its weights are shared where they are on
        that device already, else copied once. Raises TargetError for one that spans devices."""
        if len(self.devices) > 1:
            raise TargetError(
                f"a target that spans {', '.join(map(str, self.devices))} has no replica on "
                f"{device}; load it once more for every further worker"
            )
        hooks = self._hooks
        model = replicate(self._model, device, without=lambda hook: hook in hooks)
        twin = copy.copy(self)
        twin._attach(model)
        twin.head = replace(self.head, weight=model.get_output_embeddings().weight)
        return twin

    def ends(self, device: torch.device) -> TargetEnds:
        """Embedding and head on `device`, sharing memory with this target where it is there."""
        return TargetEnds(self.embedding, self.embed_scale, self.head).on(device)

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, *, last_hidden: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Taps `[rows, tokens, taps * hidden]` and, if asked, final-norm states `[rows, tokens, hidden]`.

        `input_ids [rows, tokens]` are padded on the right; causal attention keeps padding out of
        the real tokens, so no mask is needed. Without `last_hidden` the forward stops after the
        last tap.
        """
        decoder = self._decoder if last_hidden else self._trunk
        output = decoder(input_ids=input_ids, use_cache=False)
        return self._take_taps(), output.last_hidden_state if last_hidden else None

    @torch.no_grad()
    def extend(
        self, input_ids: Tensor, positions: Tensor, cache: StaticKV, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Final-norm states `[rows, tokens, hidden]` and taps of new tokens, through the cache.

        `input_ids` and `positions [rows, tokens]`; `mask` is boolean, broadcasts to
        `[rows, 1, tokens, slots]`, or None for a prefill that is causal over itself.
        """
        masks: Any = mask
        kinds = set(getattr(self.text_config, "layer_types", None) or ())
        if len(kinds) > 1:
            masks = dict.fromkeys(kinds, mask)
        output = self._decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{self._cache_name: cache},
        )
        return output.last_hidden_state, self._take_taps()

    def check_decodable(self, slots: int) -> None:
        """Raises TargetError when the cached forward cannot serve contexts of `slots` tokens, or
        computes something else than the plain one."""
        kinds = set(getattr(self.text_config, "layer_types", None) or ())
        recurrent = sorted(k for k in kinds if "attention" not in k or "linear" in k)
        if recurrent:
            raise TargetError(
                f"the target has {', '.join(recurrent)} layers, whose state cannot be rewound when "
                "drafts are rejected; it can be trained for, but not evaluated here: serve the "
                "exported drafter with vLLM or SGLang instead"
            )
        window = getattr(self.text_config, "sliding_window", None)
        windowed = "sliding_attention" in kinds or (
            not kinds and window and getattr(self.text_config, "use_sliding_window", True)
        )
        if windowed and window and slots > window:
            raise TargetError(
                f"evaluation needs {slots} positions but the target's sliding window is {window}; "
                "lower evaluate.max_new_tokens or leave out longer prompts"
            )
        if not self._cache_checked:
            check_cache(self, slots)
            self._cache_checked = True

    def parameters(self) -> list[Tensor]:
        """Every frozen tensor of the target once."""
        return list(self._model.parameters())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Block inputs `[..., hidden]` of `token_ids`: embedding rows times `embed_scale`."""
        return self.ends(self.device).embed(token_ids)

    def _keep(self, tap: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._tapped[tap] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _take_taps(self) -> Tensor:
        # Layers of a target that spans several devices leave their outputs where they are.
        tapped = torch.cat([self._tapped[tap].to(self.device) for tap in self.taps], dim=-1)
        self._tapped.clear()
        return tapped


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
    choices: Choices | None = None,
) -> Target:
    """The frozen target at `path` (see `resolve_target`) on `device`, with its tokenizer.

    Several devices: the layers are spread over them (see `device_map`), the ends are on the first.
    Raises TargetError when it cannot be loaded, when a weight is missing from the checkpoint (it
    would be random), or when it cannot be tapped.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in _DTYPES:
        raise TargetError(f"target.dtype={dtype} is not one of {', '.join(_DTYPES)}")
    devices = (device,) if isinstance(device, torch.device) else tuple(dict.fromkeys(device))
    on_cuda = devices[0].type == "cuda"
    if dtype == "auto":
        dtype = auto_dtype("cuda" if on_cuda else "cpu")
        if choices is not None:
            reason = "CUDA tensor cores" if on_cuda else "bfloat16 is slow on a CPU"
            choices.record("target.dtype", wanted="auto", got=dtype, reason=reason)
    source = resolve_target(path)
    part = "tokenizer (tokenizer.json, tokenizer_config.json)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        part = "model (config.json, safetensors)"
        model, loading = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            # Whole models are moved below, in one go.
            device_map=spanning_map(source, devices, trust_remote_code),
        )
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        first = " ".join(str(error).split()[:60]) or type(error).__name__
        raise TargetError(f"target.path={path}: its {part} cannot be loaded: {first}") from None
    missing = sorted(loading["missing_keys"])
    if missing:
        raise TargetError(
            f"target.path={path}: {len(missing)} weights are not in the checkpoint and would be "
            f"random, first {missing[0]}; a drafter trained against them would be worthless"
        )
    if len(devices) == 1:
        model.to(devices[0])
    return Target(model, tokenizer, taps=taps, num_taps=num_taps)


def _use_own_attention(model: Any) -> None:
    from transformers import AttentionInterface

    text_config = model.config.get_text_config()
    if cap := getattr(text_config, "attn_logit_softcapping", None):
        raise TargetError(
            f"{type(model).__name__} soft-caps attention scores (attn_logit_softcapping={cap}); "
            "such targets (Gemma 2) are not supported"
        )
    AttentionInterface.register(TARGET_ATTENTION, target_attention)
    text_config._attn_implementation = TARGET_ATTENTION
    model.get_decoder().config._attn_implementation = TARGET_ATTENTION


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
