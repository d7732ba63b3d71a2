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
    """`loss` scalar: sum of weighted slot losses over sum of weights, differentiable with respect
    to the hidden states. Statistics without gradient, over supervised slots: `slot_correct` and
    `slot_total [block_size - 1]`, `accepted` the summed lengths of correct prefixes, `blocks` how
    many blocks had a supervised slot."""

    loss: Tensor
    slot_correct: Tensor
    slot_total: Tensor
    accepted: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """The loss of `LossResult` as `loss` over `weight`, and `accepted [blocks]`, the length of each
    block's correct prefix; no gradients."""

    loss: Tensor
    weight: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True)
class LossKernels:
    """The two passes over the logits of a chunk, `build_loss_kernels` and perhaps compiled.

    `score` reads them; `into_gradient` replaces them by the gradient of the chunk's summed loss, so
    that one buffer of `[blocks, slots, vocab]` in the head's dtype is all there is.
    """

    score: Callable[..., tuple[Tensor, ...]]
    into_gradient: Callable[..., None]


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
        gradient = gradient * weights[..., None]
        if head.softcap is not None:
            gradient = gradient * (1 - (logits / head.softcap).square())
        raw.copy_(gradient * head.multiplier)

    return LossKernels(score, into_gradient)


def _log_norm(logits: Tensor) -> Tensor:
    # Two passes. With dimensions kept Inductor makes it one, an online softmax, which is slower here:
    # 1.3 against 0.9 ms at 3,840 x 151,936 (H200, torch 2.11).
    peak = logits.amax(-1, keepdim=True)
    return (logits - peak).exp().sum(-1).log() + peak[..., 0]


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
    kernels: LossKernels,
) -> LossResult:
    """The loss and statistics of `hidden [blocks, block_size - 1, hidden]`; slot 0 predicts nothing.

    `target_hidden` of the same shape or None; the rest `[blocks, block_size]`, with `labels` as rows
    of `head.weight` (any value where not `known`).
    """
    parts = _chunks(hidden, spec)
    answers = labels[:, 1:].contiguous()
    known_slots = known[:, 1:].contiguous()
    supervised_slots = supervised[:, 1:].contiguous()

    def run(states: Tensor) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(states)
        loss = torch.zeros((), device=states.device)
        weight = torch.zeros((), device=states.device)
        matches = []
        for part in parts:
            raw = states[part] @ head.weight.t()
            target_raw = None if target_hidden is None else target_hidden[part] @ head.weight.t()
            part_loss, part_weight, correct, *rest = kernels.score(
                raw, target_raw, answers[part], known_slots[part], supervised_slots[part]
            )
            kernels.into_gradient(raw, target_raw, answers[part], *rest)
            loss = loss + part_loss
            weight = weight + part_weight
            torch.matmul(raw, head.weight, out=gradient[part])
            matches.append(correct)
        return loss, weight, gradient, torch.cat(matches)

    loss, correct = _HeadLoss.apply(hidden.contiguous(), run)  # type: ignore[no-untyped-call]
    return LossResult(
        loss=loss,
        slot_correct=correct.sum(0),
        slot_total=supervised_slots.sum(0),
        accepted=correct.long().cumprod(1).sum(),
        blocks=supervised_slots[:, 0].sum(),
    )


@torch.no_grad()
def head_scores(
    hidden: Tensor,
    target_hidden: Tensor | None,
    head: Head,
    labels: Tensor,
    known: Tensor,
    supervised: Tensor,
    spec: LossSpec,
    kernels: LossKernels,
) -> Scores:
    """What `head_loss` would find, block by block and without its gradient pass."""
    loss = torch.zeros((), device=hidden.device)
    weight = torch.zeros((), device=hidden.device)
    accepted = []
    for part in _chunks(hidden, spec):
        target_raw = None if target_hidden is None else target_hidden[part] @ head.weight.t()
        part_loss, part_weight, correct, *_ = kernels.score(
            hidden[part] @ head.weight.t(),
            target_raw,
            labels[part, 1:].contiguous(),
            known[part, 1:].contiguous(),
            supervised[part, 1:].contiguous(),
        )
        loss, weight = loss + part_loss, weight + part_weight
        accepted.append(correct.long().cumprod(1).sum(1))
    return Scores(loss, weight, torch.cat(accepted))


def _chunks(hidden: Tensor, spec: LossSpec) -> list[slice]:
    """Stretches of the blocks `[blocks, slots, hidden]`, as even as they can be: blocks that divide
    give one shape to compile, and none too small to fill the device."""
    blocks, slots, _ = hidden.shape
    chunks = -(-blocks // max(1, spec.chunk_rows // slots))
    each = -(-blocks // chunks)
    return [slice(first, min(first + each, blocks)) for first in range(0, blocks, each)]
