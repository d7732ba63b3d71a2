"""A drafter's shape and its first weights."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import ConfigError, TargetError
from draftline.model.drafter.backbone import Drafter, DrafterShape
from draftline.model.head import Head
from draftline.model.target.target import Target

_INIT_STD = 0.02
# FlashAttention, which servers run drafters with, ends there; wider targets get drafters of the
# common size, as the published ones for Gemma 4 have it.
_WIDEST_HEAD = 256
_COMMON_HEAD = 128
# Rows of the head that stand for all, and passes over the channels: more change nothing.
_GAIN_ROWS = 8192
_GAIN_SWEEPS = 3
# Of ln(vocabulary). Measured on the demo recipe, 200 steps on a CPU: half of it learns more slowly
# (loss 3.48 against 3.19 over the last 40), and so do weights of one (3.36).
_GAIN_EXCESS = 0.05


class TargetShape(Protocol):
    """The part of a target, or of its facts, that a drafter's shape comes from."""

    @property
    def text_config(self) -> Any: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def hidden_size(self) -> int: ...


def build_shape(
    config: Config, target: TargetShape, mask_token_id: int, choices: Choices | None = None
) -> DrafterShape:
    """The drafter's shape: what the configuration says, else what the target has.

    The hidden size is always the target's, whose embedding and head the drafter borrows. Where the
    target's layers differ in their heads, those of full attention are taken, which is recorded.
    Raises TargetError where the target has no number to take, ConfigError for heads that clash.
    """
    text = target.text_config
    heads = config.drafter.num_heads or _number(text, "num_attention_heads", "drafter.num_heads")
    if not heads:
        raise TargetError("the target has no number of attention heads; set drafter.num_heads")
    kv_heads = config.drafter.num_kv_heads or (
        _number(text, "num_key_value_heads", "drafter.num_kv_heads") or heads
    )
    if heads % kv_heads:
        raise ConfigError(
            f"drafter.num_heads={heads} clashes with drafter.num_kv_heads={kv_heads}: query heads "
            "must be a multiple of KV heads (a null takes the target's number)"
        )
    head_dim = config.drafter.head_dim or _head_dim(text, target.hidden_size)
    differing = getattr(text, "per_layer_attributes", None) or ()
    taken = {
        f"drafter.{ours}={value}"
        for ours, name, value in (
            ("head_dim", "head_dim", head_dim),
            ("num_kv_heads", "num_key_value_heads", kv_heads),
        )
        if name in differing and getattr(config.drafter, ours) is None
    }
    if taken and choices is not None:
        choices.record(
            "drafter heads",
            wanted="the target's",
            got=", ".join(sorted(taken)),
            reason="its layers differ; those of its full attention, and heads of at most "
            f"{_WIDEST_HEAD}, which attention kernels can hold",
        )
    width = config.drafter.intermediate_size or getattr(text, "intermediate_size", None)
    if not isinstance(width, int):
        raise TargetError(
            "the target has no single intermediate_size; set drafter.intermediate_size"
        )
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=width,
        num_layers=config.drafter.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_taps=len(target.taps),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        # Six digits: a float32 detour in some configs turns 1e-5 into 9.999999747378752e-06.
        rms_norm_eps=float(f"{getattr(text, 'rms_norm_eps', 1e-6):.6g}"),
        rope_theta=config.drafter.rope_theta or _rope_theta(text),
        sliding_layers=config.drafter.sliding_layers,
        sliding_window=config.drafter.sliding_window,
    )


def _number(text: Any, name: str, key: str) -> int | None:
    """The number `name` of a target, that of its last full-attention layer where layers differ.

    Raises TargetError, which names `key`, for a list of different numbers.
    """
    if name in (getattr(text, "per_layer_attributes", None) or ()):
        kinds = list(getattr(text, "layer_types", None) or ())
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        text = text.per_layer_config[full[-1] if full else -1]
    value = getattr(text, name, None)
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            raise TargetError(f"the target's {name} differs between its layers; set {key}")
        value = value[0]
    return None if value is None else int(value)


def _head_dim(text: Any, hidden_size: int) -> int:
    own = _number(text, "head_dim", "drafter.head_dim")
    if own is None:
        heads = _number(text, "num_attention_heads", "drafter.head_dim")
        if not heads:
            raise TargetError("the target has no head size; set drafter.head_dim")
        return hidden_size // heads
    return own if own <= _WIDEST_HEAD else _COMMON_HEAD


def _rope_theta(text: object) -> float:
    """The target's plain base: its scaling, partial rotation or M-RoPE are not inherited.

    transformers 5 nests the base in rope_parameters, possibly once per layer type; a stale flat value
    may stand beside it, so the nested one is asked first. The drafter's context is as long as that
    of full attention, whose base goes before a window's.
    """
    nested = getattr(text, "rope_parameters", None) or {}
    by_type = [v for _, v in sorted(nested.items()) if isinstance(v, dict)]
    for source in (nested, nested.get("full_attention") or {}, *by_type):
        if source.get("rope_theta"):
            return float(source["rope_theta"])
    return float(getattr(text, "rope_theta", None) or 1e6)


def init_drafter(
    shape: DrafterShape,
    target: Target,
    *,
    init: str,
    seed: int,
    choices: Choices,
    token_ids: Tensor | None = None,
) -> Drafter:
    """A float32 drafter on the target's device, the same for equal seeds on every device.

    `scratch`: matrices normal with deviation 0.02, norms one but the last, which `final_gain` makes
    for the head over `token_ids` (None: the whole vocabulary). `target`: additionally every tensor of
    the target's last layers whose shape equals the drafter's, and its final norm; what was copied
    and what was not is recorded.
    """
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=_INIT_STD, generator=generator)
        else:
            nn.init.ones_(parameter)
    masked = target.embed(torch.tensor([shape.mask_token_id], device=target.device))[0]
    with torch.no_grad():
        drafter.norm.weight.copy_(final_gain(target.head, masked, token_ids))
    if init == "target":
        copied, total = _copy_from_target(drafter, target)
        choices.record(
            "drafter.init",
            wanted="target",
            got=f"{copied} of {total} tensors copied",
            reason="the others have no counterpart of the same shape in the target",
            fallback=copied == 0,
        )
    return drafter.to(target.device)


@torch.no_grad()
def final_gain(head: Head, masked: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Weights `[hidden]` of a final norm, float32 on the CPU, with which a drafter that has learned
    nothing says nothing: its first loss is about ln(vocabulary).

    At first the states of all masked slots are nearly the embedding `masked [hidden]`, which a tied
    head, or one with a common direction, maps to logits of 80 and more. Signs are chosen, channel
    after channel, so that what channels add to the logits cancels; the size, at most 1, gives logits
    of other states the deviation at which the loss exceeds ln(vocabulary) by `_GAIN_EXCESS`. Small
    weights alone would do as much for the first loss, but the drafter then learns more slowly.
    """
    rows = head.vocab_size if token_ids is None else len(token_ids)
    some = torch.arange(0, rows, max(1, rows // _GAIN_ROWS))
    if token_ids is not None:
        some = token_ids.cpu()[some]
    weight = head.rows(some).cpu().double()
    parts = (weight * masked.cpu().double()).t().contiguous()
    signs = torch.ones(len(parts), dtype=torch.float64)
    order = parts.square().sum(1).argsort(descending=True, stable=True).tolist()
    total = torch.zeros(len(weight), dtype=torch.float64)
    for sweep in range(_GAIN_SWEEPS):
        for channel in order:
            if sweep:
                total -= signs[channel] * parts[channel]
            signs[channel] = -1.0 if total @ parts[channel] > 0 else 1.0
            total += signs[channel] * parts[channel]
    deviation = head.multiplier * float(weight.square().sum(1).mean().sqrt())
    size = min(1.0, math.sqrt(2 * _GAIN_EXCESS * math.log(rows)) / max(deviation, 1e-9))
    return (size * signs).float()


@torch.no_grad()
def _copy_from_target(drafter: Drafter, target: Target) -> tuple[int, int]:
    """Tensors copied, and tensors that could have been: all but fc and its norm."""
    count = min(drafter.shape.num_layers, target.num_layers)
    theirs = list(target.layers)[target.num_layers - count : target.num_layers]
    pairs: list[tuple[nn.Module, nn.Module | None]] = [(drafter.norm, target.final_norm)]
    pairs += zip(list(drafter.layers)[-count:], theirs, strict=True)
    pairs += [(layer, None) for layer in list(drafter.layers)[:-count]]
    copied = total = 0
    for ours, source in pairs:
        for name, parameter in ours.named_parameters():
            total += 1
            weight = _counterpart(source, name) if source is not None else None
            if weight is not None and weight.shape == parameter.shape:
                parameter.copy_(weight)
                copied += 1
    return copied, total


def _counterpart(source: nn.Module, name: str) -> Tensor | None:
    """The tensor of `source` that does what `name` does in the drafter."""
    theirs = dict(source.named_parameters())
    if name == "post_attention_layernorm.weight" and "pre_feedforward_layernorm.weight" in theirs:
        name = "pre_feedforward_layernorm.weight"  # Gemma norms both before and after the MLP
    weight = theirs.get(name)
    if weight is None or weight.ndim != 1:
        return weight
    # Some families (Gemma, Qwen3.5) store the gain of a norm less one: ask the norm itself.
    norm = source.get_submodule(name.rpartition(".")[0])
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    gain: Tensor = norm(signs) * signs
    return weight if torch.allclose(gain, weight, rtol=0.01) else gain


@torch.no_grad()
def measure_feature_scale(features: Tensor) -> Tensor:
    """One over the root mean square of each channel, float32 `[taps * hidden]`.

    `features [tokens, taps * hidden]` must leave out position 0 of every conversation: attention
    sinks there carry activations hundreds of times larger than anywhere else. A dead channel gets
    the largest scale of the others.
    """
    rms = features.float().square().mean(0).sqrt()
    alive = rms > 1e-6 * rms.max()
    return 1.0 / torch.where(alive, rms, rms[alive].min() if bool(alive.any()) else 1.0)
