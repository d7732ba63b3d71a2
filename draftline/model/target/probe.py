"""What a target does before its first layer and behind its last norm, measured with a real forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftline.errors import TargetError
from draftline.model.head import Head


def find_ends(model: Any) -> tuple[Any, Any]:
    """The modules of token embedding and output head, each with a `weight`.

    Raises TargetError when there is none, or when the head has a bias.
    """
    name = type(model).__name__
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise TargetError(f"{name} has no token embedding or no output head")
    if getattr(head, "bias", None) is not None:
        raise TargetError(f"{name}: an output head with a bias is not supported")
    return embedding, head


@torch.no_grad()
def probe(model: Any, first_layer: nn.Module) -> tuple[float, Head]:
    """Embedding scale and head of `model`, as 8 real tokens show them.

    Raises TargetError when there is no embedding or head, when the head has a bias, when the first
    layer does not receive embedding rows times a constant, or when logits are not the head's product
    with the final hidden state times a constant.
    """
    name = type(model).__name__
    ends = find_ends(model)
    embedding: Tensor = ends[0].weight
    head_weight: Tensor = ends[1].weight
    rows = min(embedding.shape[0], head_weight.shape[0])
    ids = torch.linspace(1, rows - 1, 8, device=embedding.device).long()[None]
    entered: list[Tensor] = []
    handle = first_layer.register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    try:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    # A target that spans several devices may end on another one than it begins.
    logits, hidden = logits.to(head_weight.device), hidden.to(head_weight.device)
    if not bool(torch.isfinite(logits).all()):
        raise TargetError(
            f"{name}: the logits of {ids[0].tolist()} hold NaN or infinity: a weight is damaged (fetch "
            f"the files again), or {embedding.dtype} overflows (see target.dtype)"
        )
    plain = nn.functional.embedding(ids, embedding).float()
    scale = _ratio(entered[0].float(), plain)
    if scale is None:
        raise TargetError(
            f"{name}: the first layer does not receive embedding rows times a constant (learned "
            "positions, a projection or a norm comes first); such targets are not supported"
        )
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
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


def _ratio(seen: Tensor, base: Tensor) -> float | None:
    """The constant c with `seen == c * base` within rounding, 1.0 exactly when close to it, or None."""
    scale = float((seen * base).sum() / (base * base).sum())
    error = float((seen - scale * base).norm() / seen.norm().clamp_min(1e-30))
    if not error < 0.03:
        return None
    return 1.0 if abs(scale - 1.0) < 2e-3 else scale
