"""The vocabulary loss of a step: weighted cross-entropy and forward KL over chunks of blocks.

The head is frozen, so one pass over a chunk's logits gives the loss, its gradient with respect to the
hidden states, and the top-1 matches; the logits of one chunk are all that ever exists. A chunk holds
whole blocks, because D-PACE weighs a slot by the slots around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftline.model.head import Head


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`kind` decay: slot j weighs exp(-(j - 1) / gamma) (DFlash, arXiv 2602.06036, App. A.1).
    dpace: D-PACE, arXiv 2605.18810, with smoothing `alpha`. `soft_labels` is the share of forward
    KL(target || drafter); the rest is cross-entropy on the tokens."""

    kind: str
    gamma: float
    alpha: float
    soft_labels: float
    chunk_rows: int


@dataclass(frozen=True, slots=True)
class LossResult:
    """`loss` scalar: sum of weighted slot losses over sum of weights, differentiable with respect
    to the hidden states. Statistics without gradient, over supervised slots: `slot_correct` and
    `slot_total [block_size - 1]`, `accepted` the summed lengths of correct prefixes, `blocks` how
    many blocks had a supervised slot."""

    loss: Tensor
    slot_correct: Tensor
    slot_total: Tensor
    accepted: Tensor
    blocks: Tensor


# (hidden, target_hidden, weight, labels, known, supervised) -> (loss, weight, d(hidden), correct)
ChunkLoss = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def build_chunk_loss(spec: LossSpec, head: Head) -> ChunkLoss:
    """The function of one chunk, free of Python state so that it can be compiled.

    It takes `hidden [blocks, slots, hidden]`, the target's own hidden states of the same
    predictions or None, the head's weight `[vocab, hidden]`, `labels [blocks, slots]` as head rows,
    `known` (label is in the draft vocabulary) and `supervised`; it returns summed loss, summed
    weight, the gradient of the summed loss `[blocks, slots, hidden]`, and top-1 matches.
    """
    multiplier, softcap = head.multiplier, head.softcap
    dpace, gamma, alpha, soft = spec.kind == "dpace", spec.gamma, spec.alpha, spec.soft_labels

    def logits_of(states: Tensor, weight: Tensor) -> Tensor:
        return Head(weight, multiplier, softcap).logits(states)

    def chunk_loss(
        hidden: Tensor,
        target_hidden: Tensor | None,
        weight: Tensor,
        labels: Tensor,
        known: Tensor,
        supervised: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = logits_of(hidden, weight)
        correct = (logits.argmax(-1) == labels) & known
        log_norm = torch.logsumexp(logits, -1)
        cross_entropy = log_norm - logits.gather(-1, labels[..., None])[..., 0]
        probs = (logits - log_norm[..., None]).exp()
        hard = (1.0 - soft) * known
        if dpace:
            smoothed = (1 - alpha) * torch.exp(-cross_entropy) * known + alpha
            reach = (smoothed * supervised).cumprod(1)
            weights = reach.flip(1).cumsum(1).flip(1) * supervised
        else:
            slot = torch.arange(labels.shape[1], device=labels.device)
            weights = torch.exp(-slot / gamma) * supervised
        # A label outside the draft vocabulary teaches nothing; it only counts against acceptance.
        weights = weights * (hard + soft)
        share = hard / (hard + soft).clamp_min(1e-9)
        loss = share * cross_entropy
        gradient = probs.scatter_add(-1, labels[..., None], -share[..., None])
        if target_hidden is not None:
            wanted_logits = logits_of(target_hidden, weight)
            wanted_log = torch.log_softmax(wanted_logits, -1)
            wanted = wanted_log.exp()
            divergence = (wanted * (wanted_log - logits)).sum(-1) + log_norm
            loss = loss + (1 - share) * divergence
            gradient = gradient - (1 - share[..., None]) * wanted
        gradient = gradient * weights[..., None]
        if softcap is not None:
            gradient = gradient * (1 - (logits / softcap).square())
        gradient = (gradient * multiplier).to(weight.dtype)
        return (loss * weights).sum(), weights.sum(), gradient @ weight, correct & supervised

    return chunk_loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Callable[[Tensor], tuple[Tensor, ...]]) -> Any:
        loss, weight, gradient, correct = run(hidden)
        weight = weight.clamp_min(1e-9)
        ctx.save_for_backward(gradient, weight)
        ctx.mark_non_differentiable(correct)
        return loss / weight, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> Any:
        gradient, weight = ctx.saved_tensors
        return gradient * (grad_loss / weight).to(gradient.dtype), None


def head_loss(
    hidden: Tensor,
    target_hidden: Tensor | None,
    head: Head,
    labels: Tensor,
    known: Tensor,
    supervised: Tensor,
    spec: LossSpec,
    chunk_loss: ChunkLoss,
) -> LossResult:
    """The loss and statistics of `hidden [blocks, block_size, hidden]`; slot 0 is not predicted.

    `target_hidden [blocks, block_size - 1, hidden]` or None; the rest `[blocks, block_size]`, with
    `labels` as rows of `head.weight` (any value where not `known`).
    """
    blocks, block_size = labels.shape
    per_chunk = max(1, spec.chunk_rows // (block_size - 1))
    answers = labels[:, 1:].contiguous()
    known_slots = known[:, 1:].contiguous()
    supervised_slots = supervised[:, 1:].contiguous()

    def run(states: Tensor) -> tuple[Tensor, ...]:
        slots = states[:, 1:]
        gradient = torch.zeros_like(states)
        loss = torch.zeros((), device=states.device)
        weight = torch.zeros((), device=states.device)
        matches = []
        for first in range(0, blocks, per_chunk):
            part = slice(first, min(first + per_chunk, blocks))
            part_loss, part_weight, part_gradient, part_correct = chunk_loss(
                slots[part].contiguous(),
                None if target_hidden is None else target_hidden[part],
                head.weight,
                answers[part],
                known_slots[part],
                supervised_slots[part],
            )
            loss = loss + part_loss
            weight = weight + part_weight
            gradient[part, 1:] = part_gradient
            matches.append(part_correct)
        return loss, weight, gradient, torch.cat(matches)

    loss, correct = _HeadLoss.apply(hidden, run)  # type: ignore[no-untyped-call]
    return LossResult(
        loss=loss,
        slot_correct=correct.sum(0),
        slot_total=supervised_slots.sum(0),
        accepted=correct.long().cumprod(1).sum(),
        blocks=supervised_slots[:, 0].sum(),
    )
