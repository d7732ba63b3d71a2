"""The frozen target: loaded, tapped, and run either as a feature source or as a verifier.

Works for every decoder-only Hugging Face causal LM whose layers form one list, multimodal wrappers
included. What could make a drafter silently wrong (a random head, an unknown embedding or logit
transform) is probed with a real forward at load time and refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.attention import TARGET_ATTENTION, target_attention
from draftline.model.head import Head
from draftline.model.kv_cache import StaticKV
from draftline.model.source import resolve_target
from draftline.model.taps import check_taps, choose_taps

_DTYPES = ("auto", "float32", "bfloat16")


class Target:
    """A frozen language model with taps. One object serves one thread.

    Attributes: `taps`, `hidden_size`, `num_layers`, `vocab_size` (head rows), `embedding`
    `[rows, hidden]` and `embed_scale` (block inputs are rows times scale), `head`, `stop_ids`,
    `tokenizer`, `text_config`, `layers` (decoder layers), `final_norm` (None where it is not called
    `norm`), `device`, `dtype`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, taps: Sequence[int] | None = None, num_taps: int = 5
    ) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self.text_config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        self.num_layers = int(self.text_config.num_hidden_layers)
        if not isinstance(layers, nn.ModuleList) or len(layers) < self.num_layers:
            raise TargetError(
                f"{type(model).__name__}: no list of {self.num_layers} decoder layers found at "
                f"{type(self._decoder).__name__}.layers; draftline taps decoder-only models"
            )
        self.layers = layers
        self.final_norm: nn.Module | None = getattr(self._decoder, "norm", None)
        self.taps = (
            check_taps(taps, self.num_layers)
            if taps is not None
            else choose_taps(self.num_layers, num_taps)
        )
        self.hidden_size = int(self.text_config.hidden_size)
        model.requires_grad_(False).eval()
        self._use_own_attention(model)
        self._tapped: dict[int, Tensor] = {}
        for tap in self.taps:
            layers[tap].register_forward_hook(self._keep(tap))
        # The feature path shares every weight but ends at the last tap: no later layer, no norm.
        self._trunk = copy.copy(self._decoder)
        self._trunk._modules = dict(self._decoder._modules)
        self._trunk.layers = nn.ModuleList(list(layers)[: self.taps[-1] + 1])
        self._trunk.norm = nn.Identity()
        self._trunk.config = copy.copy(self._decoder.config)
        self._trunk.config.num_hidden_layers = self.taps[-1] + 1

        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if embedding is None or head is None:
            raise TargetError(f"{type(model).__name__} has no token embedding or no output head")
        if getattr(head, "bias", None) is not None:
            raise TargetError(
                f"{type(model).__name__}: an output head with a bias is not supported"
            )
        self.embedding: Tensor = embedding.weight
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.vocab_size = int(head.weight.shape[0])
        self.embed_scale, self.head = self._probe(model, head.weight)
        self.stop_ids = _stop_ids(model, self.text_config, tokenizer)

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
            past_key_values=cache,
            attention_mask=masks,
            use_cache=True,
        )
        return output.last_hidden_state, self._take_taps()

    def check_decodable(self, slots: int) -> None:
        """Raises TargetError when the cached forward cannot serve contexts of `slots` tokens."""
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

    def parameters(self) -> list[Tensor]:
        """Every frozen tensor of the target once."""
        return list(self._model.parameters())

    def embed(self, token_ids: Tensor) -> Tensor:
        """Block inputs `[..., hidden]` of `token_ids`: embedding rows times `embed_scale`."""
        rows = nn.functional.embedding(token_ids, self.embedding)
        return rows * self.embed_scale if self.embed_scale != 1.0 else rows

    def _use_own_attention(self, model: Any) -> None:
        from transformers import AttentionInterface

        if getattr(self.text_config, "attn_logit_softcapping", None):
            raise TargetError(
                f"{type(model).__name__} soft-caps attention scores "
                f"(attn_logit_softcapping={self.text_config.attn_logit_softcapping}); such targets "
                "(Gemma 2) are not supported"
            )
        AttentionInterface.register(TARGET_ATTENTION, target_attention)
        self.text_config._attn_implementation = TARGET_ATTENTION
        self._decoder.config._attn_implementation = TARGET_ATTENTION

    def _keep(self, tap: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._tapped[tap] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _take_taps(self) -> Tensor:
        tapped = torch.cat([self._tapped[tap] for tap in self.taps], dim=-1)
        self._tapped.clear()
        return tapped

    @torch.no_grad()
    def _probe(self, model: Any, head_weight: Tensor) -> tuple[float, Head]:
        """Measures embedding scale and logit transform on real tokens; refuses what does not fit."""
        rows = min(self.embedding.shape[0], head_weight.shape[0])
        ids = torch.linspace(1, rows - 1, 8, device=self.device).long()[None]
        entered: list[Tensor] = []
        handle = self.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            logits = model(input_ids=ids, use_cache=False).logits.float()
            hidden = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            handle.remove()
            self._tapped.clear()
        name = type(model).__name__
        plain = nn.functional.embedding(ids, self.embedding).float()
        scale = _ratio(entered[0].float(), plain)
        if scale is None:
            raise TargetError(
                f"{name}: the first layer does not receive embedding rows times a constant (learned "
                "positions, a projection or a norm comes first); such targets are not supported"
            )
        softcap = getattr(self.text_config, "final_logit_softcapping", None)
        fitting: list[tuple[float, Head]] = []
        # A configured cap need not be applied: Gemma 3's multimodal wrapper leaves it out.
        for cap in dict.fromkeys((float(softcap) if softcap else None, None)):
            bare = torch.atanh((logits / cap).clamp(-0.999, 0.999)) * cap if cap else logits
            multiplier = _ratio(bare, (hidden @ head_weight.t()).float())
            if multiplier is not None:
                head = Head(head_weight, multiplier, cap)
                fitting.append((float((head.logits(hidden) - logits).norm()), head))
        if not fitting:
            raise TargetError(
                f"{name}: logits are not the output head applied to the final hidden state times a "
                "constant; such targets are not supported"
            )
        return scale, min(fitting, key=lambda pair: pair[0])[1]


def load_target(
    path: str,
    *,
    device: torch.device,
    dtype: str = "auto",
    taps: Sequence[int] | None = None,
    num_taps: int = 5,
    trust_remote_code: bool = False,
    choices: Choices | None = None,
) -> Target:
    """The frozen target at `path` (see `resolve_target`) on `device`, with its tokenizer.

    Raises TargetError when it cannot be loaded, when a weight is missing from the checkpoint (it
    would be random), or when it cannot be tapped.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in _DTYPES:
        raise TargetError(f"target.dtype={dtype} is not one of {', '.join(_DTYPES)}")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        if choices is not None:
            reason = "CUDA tensor cores" if device.type == "cuda" else "bfloat16 is slow on a CPU"
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
    return Target(model.to(device), tokenizer, taps=taps, num_taps=num_taps)


def _ratio(seen: Tensor, base: Tensor) -> float | None:
    """The constant c with `seen == c * base` within rounding, 1.0 exactly when close to it, or None."""
    scale = float((seen * base).sum() / (base * base).sum())
    error = float((seen - scale * base).norm() / seen.norm().clamp_min(1e-30))
    if not error < 0.03:
        return None
    return 1.0 if abs(scale - 1.0) < 2e-3 else scale


def _stop_ids(model: Any, text_config: Any, tokenizer: Any) -> tuple[int, ...]:
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
