"""The vocabulary loss of a step: weighted cross-entropy and forward KL over chunks of blocks.

The head is frozen, so a chunk's logits give the loss, the top-1 matches and, in their own place, the
gradient with respect to the hidden states; the logits of one chunk are all that ever exists. A chunk
holds whole blocks, because D-PACE weighs a slot by the slots around it.
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
    """`total`: sum of weighted slot losses, differentiable with respect to the hidden states, and
    `weight`: sum of the weights. Statistics without gradient, over supervised slots: `slot_correct`
    and `slot_total [block_size - 1]`, `accepted [blocks]` the length of each block's correct prefix,
    `blocks` how many blocks had a supervised slot."""

    total: Tensor
    weight: Tensor
    slot_correct: Tensor
    slot_total: Tensor
    accepted: Tensor
    blocks: Tensor

    @property
    def loss(self) -> Tensor:
        """The scalar that is trained on: the weighted mean."""
        return self.total / self.weight.clamp_min(1e-9)


@dataclass(frozen=True, slots=True)
class LossKernels:
    """The two passes over the logits of a chunk, `build_loss_kernels` and perhaps compiled, and
    `chunk_rows`, how many rows of logits may exist at once.

    `score` reads them; `into_gradient` replaces them by the gradient of the chunk's summed loss, so
    that one buffer of `[blocks, slots, vocab]` in the head's dtype is all there is.
    """

    score: Callable[..., tuple[Tensor, ...]]
    into_gradient: Callable[..., None]
    chunk_rows: int


def build_loss_kernels(spec: LossSpec, head: Head) -> LossKernels:
    """The passes for `spec`, free of Python state so that they can be compiled.

    `score` takes raw `logits` and the target's own of the same predictions or None, `labels` as
    head rows, `known` (label is in the draft vocabulary) and `supervised` `[blocks, slots]`; it
    returns summed loss, summed weight, top-1 matches, and what `into_gradient` wants besides the
    logits: log normaliser, slot weights, share of hard labels and the target's log normaliser.
    """
    dpace, gamma, alpha, soft = spec.kind == "dpace", spec.gamma, spec.alpha, spec.soft_labels

    def score(
        raw: Tensor, target_raw: Tensor | None, labels: Tensor, known: Tensor, supervised: Tensor
    ) -> tuple[Tensor, ...]:
        logits = head.transform(raw)
        log_norm = _log_norm(logits)
        label_logit = head.transform(raw.gather(-1, labels[..., None]))
        # Top-1 is the first of the largest; counting what beats the label needs no second pass.
        row = torch.arange(raw.shape[-1], device=raw.device, dtype=torch.int32)
        ahead = (logits > label_logit) | ((logits == label_logit) & (row < labels[..., None]))
        correct = (ahead.sum(-1) == 0) & known & supervised
        cross_entropy = log_norm - label_logit[..., 0]
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
        target_norm = torch.zeros_like(log_norm)
        if target_raw is not None:
            target_logits = head.transform(target_raw)
            target_norm = _log_norm(target_logits)
            wanted_log = target_logits - target_norm[..., None]
            divergence = (wanted_log.exp() * (wanted_log - logits)).sum(-1) + log_norm
            loss = loss + (1 - share) * divergence
        return (loss * weights).sum(), weights.sum(), correct, log_norm, weights, share, target_norm

    def into_gradient(
        raw: Tensor,
        target_raw: Tensor | None,
        labels: Tensor,
        log_norm: Tensor,
        weights: Tensor,
        share: Tensor,
        target_norm: Tensor,
    ) -> None:
        logits = head.transform(raw)
        row = torch.arange(raw.shape[-1], device=raw.device, dtype=torch.int32)
        gradient = (logits - log_norm[..., None]).exp()
        # Pointwise, where a scatter would make a compiler write the probabilities out in float32.
        gradient = gradient - torch.where(row == labels.int()[..., None], share[..., None], 0.0)
        if target_raw is not None:
            wanted = (head.transform(target_raw) - target_norm[..., None]).exp()
            gradient = gradient - (1 - share[..., None]) * wanted
        raw.copy_(head.transform_back(gradient * weights[..., None], logits))

    return LossKernels(score, into_gradient, spec.chunk_rows)


def _log_norm(logits: Tensor) -> Tensor:
    # Two passes. With dimensions kept Inductor makes it one, an online softmax, which is slower here:
    # 1.3 against 0.9 ms at 3,840 x 151,936 (H200, torch 2.11).
    peak = logits.amax(-1, keepdim=True)
    return (logits - peak).exp().sum(-1).log() + peak[..., 0]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Callable[[Tensor], tuple[Any, ...]]) -> Any:
        total, weight, gradient, correct = run(hidden)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight, correct)
        return total, weight, correct

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None


def head_loss(
    hidden: Tensor,
    target_hidden: Tensor | None,
    head: Head,
    labels: Tensor,
    known: Tensor,
    supervised: Tensor,
    kernels: LossKernels,
) -> LossResult:
    """The loss and statistics of `hidden [blocks, block_size - 1, hidden]`; slot 0 predicts nothing.

    `target_hidden` of the same shape or None; the rest `[blocks, block_size]`, with `labels` as rows
    of `head` (any value where not `known`). Where no gradient is wanted, as under `torch.no_grad`,
    its pass is left out.
    """
    parts = _chunks(hidden, kernels.chunk_rows)
    answers = labels[:, 1:].contiguous()
    known_slots = known[:, 1:].contiguous()
    supervised_slots = supervised[:, 1:].contiguous()
    wanted = torch.is_grad_enabled() and hidden.requires_grad

    def run(states: Tensor) -> tuple[Any, ...]:
        gradient = torch.empty_like(states) if wanted else None
        total = torch.zeros((), device=states.device)
        weight = torch.zeros((), device=states.device)
        matches = []
        for part in parts:
            raw = head.product(states[part])
            target_raw = None if target_hidden is None else head.product(target_hidden[part])
            part_total, part_weight, correct, *rest = kernels.score(
                raw, target_raw, answers[part], known_slots[part], supervised_slots[part]
            )
            total = total + part_total
            weight = weight + part_weight
            matches.append(correct)
            if gradient is not None:
                kernels.into_gradient(raw, target_raw, answers[part], *rest)
                head.product_back(raw, gradient[part])
        return total, weight, gradient, torch.cat(matches)

    total, weight, correct = _HeadLoss.apply(hidden.contiguous(), run)  # type: ignore[no-untyped-call]
    return LossResult(
        total=total,
        weight=weight,
        slot_correct=correct.sum(0),
        slot_total=supervised_slots.sum(0),
        accepted=correct.long().cumprod(1).sum(1),
        blocks=supervised_slots[:, 0].sum(),
    )


def _chunks(hidden: Tensor, rows: int) -> list[slice]:
    """Stretches of the blocks `[blocks, slots, hidden]`, as even as they can be: blocks that divide
    give one shape to compile, and none too small to fill the device."""
    blocks, slots, _ = hidden.shape
    chunks = -(-blocks // max(1, rows // slots))
    each = -(-blocks // chunks)
    return [slice(first, min(first + each, blocks)) for first in range(0, blocks, each)]
