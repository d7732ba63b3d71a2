"""A drafter's shape and its first weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.config import Config
from draftline.errors import ConfigError, TargetError
from draftline.model.drafter import Drafter, DrafterShape
from draftline.model.target import Target

_INIT_STD = 0.02


def build_shape(config: Config, target: Target, mask_token_id: int) -> DrafterShape:
    """The drafter's shape: what the configuration says, else what the target has.

    The hidden size is always the target's, whose embedding and head the drafter borrows.
    """
    text = target.text_config
    heads = config.drafter.num_heads or int(text.num_attention_heads)
    kv_heads = config.drafter.num_kv_heads or int(getattr(text, "num_key_value_heads", heads))
    if heads % kv_heads:
        raise ConfigError(
            f"drafter.num_heads={heads} clashes with drafter.num_kv_heads={kv_heads}: query heads "
            "must be a multiple of KV heads (a null takes the target's number)"
        )
    head_dim = config.drafter.head_dim or int(
        getattr(text, "head_dim", None) or target.hidden_size // heads
    )
    width = config.drafter.intermediate_size or getattr(text, "intermediate_size", None)
    if not width:
        raise TargetError(
            "the target has no single intermediate_size; set drafter.intermediate_size"
        )
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=int(width),
        num_layers=config.drafter.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_taps=len(target.taps),
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        rope_theta=config.drafter.rope_theta or _rope_theta(text),
        sliding_layers=config.drafter.sliding_layers,
        sliding_window=config.drafter.sliding_window,
    )


def _rope_theta(text: object) -> float:
    """The target's plain base: its scaling, partial rotation or M-RoPE are not inherited.

    transformers 5 nests the base in rope_parameters, possibly once a layer type; a stale flat value
    may stand beside it, so the nested one is asked first.
    """
    nested = getattr(text, "rope_parameters", None) or {}
    for source in (nested, *(v for v in nested.values() if isinstance(v, dict))):
        if source.get("rope_theta"):
            return float(source["rope_theta"])
    return float(getattr(text, "rope_theta", None) or 1e6)


def init_drafter(
    shape: DrafterShape, target: Target, *, init: str, seed: int, choices: Choices
) -> Drafter:
    """A float32 drafter on the target's device, the same for equal seeds on every device.

    `scratch`: matrices normal with deviation 0.02, norms one. `target`: additionally every tensor of
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
    if init == "target":
        copied, total = _copy_from_target(drafter, target)
        choices.record(
            "drafter.init",
            wanted="target",
            got=f"{copied} of {total} layer tensors copied",
            reason="the others have no counterpart of the same shape in the target",
            fallback=copied == 0,
        )
    return drafter.to(target.device)


@torch.no_grad()
def _copy_from_target(drafter: Drafter, target: Target) -> tuple[int, int]:
    copied = total = 0
    sources = list(target.layers)[target.num_layers - drafter.shape.num_layers :]
    for layer, source in zip(drafter.layers, sources, strict=False):
        theirs = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            total += 1
            if name in theirs and theirs[name].shape == parameter.shape:
                parameter.copy_(theirs[name])
                copied += 1
    return copied, total


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
