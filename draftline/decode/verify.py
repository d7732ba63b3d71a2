"""Acceptance of a drafted block by the target: greedy, and lossless rejection sampling.

Shapes: rows are independent sequences; `drafts [rows, slots]` are the tokens of slots 1..B-1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted [rows]` leading drafts that stand, and `bonus [rows]`, the target's own next token."""

    accepted: Tensor
    bonus: Tensor


def probabilities(
    logits: Tensor, temperature: float, top_p: float | None = None, top_k: int | None = None
) -> Tensor:
    """The distribution `[..., vocab]` that tokens are drawn from at a `temperature` above 0.

    Of softmax(logits / temperature) the `top_k` most likely tokens stay, and of those, as shares of
    their sum, the fewest most likely ones that come to `top_p`. Tokens that tie with the last one
    stay as well. Nothing is decided on the host, so it can be captured in a CUDA graph.
    """
    scaled = logits / temperature
    vocab = logits.shape[-1]
    share_kept = 1.0 if top_p is None else top_p
    most = vocab if top_k is None else min(top_k, vocab)
    if most < vocab or share_kept < 1:
        ranked = scaled.topk(most, dim=-1).values
        scaled = scaled.masked_fill(scaled < ranked[..., -1:], -math.inf)
        if share_kept < 1:
            share = (ranked - scaled.logsumexp(-1, keepdim=True)).exp()
            kept = (share.cumsum(-1) - share < share_kept).sum(-1, keepdim=True)
            scaled = scaled.masked_fill(scaled < ranked.gather(-1, kept - 1), -math.inf)
    return torch.softmax(scaled, dim=-1)


def accept_greedy(drafts: Tensor, logits: Tensor) -> Verdict:
    """Accepts the longest prefix that equals the target's argmax.

    `logits [rows, slots + 1, vocab]`: entry j is the target's prediction after slot j.
    """
    choice = logits.argmax(-1)
    matches = (drafts == choice[:, :-1]).long()
    accepted = matches.cumprod(1).sum(1)
    return Verdict(accepted, choice.gather(1, accepted[:, None])[:, 0])


def accept_sampled(
    drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator | None
) -> Verdict:
    """Rejection sampling whose output is distributed as the target's (Leviathan et al.,
    arXiv 2211.17192, section 2.3).

    `drafts` were drawn from `draft_probs [rows, slots, vocab]`; `target_probs
    [rows, slots + 1, vocab]`. A draft x stands with probability min(1, p(x) / q(x)); at the first
    rejection the bonus comes from the normalised positive part of p - q, and from p itself when
    every draft stands.
    """
    slots = drafts.shape[1]
    p = target_probs[:, :slots].gather(2, drafts[..., None])[..., 0]
    q = draft_probs.gather(2, drafts[..., None])[..., 0]
    u = torch.rand(p.shape, device=p.device, generator=generator)
    accepted = (u * q < p).long().cumprod(1).sum(1)
    row = torch.arange(drafts.shape[0], device=drafts.device)
    at_rejection = target_probs[row, accepted]
    # Where every draft stands there is no q to subtract; index 0 is a placeholder for those rows.
    rejected = (accepted < slots)[:, None]
    q_there = draft_probs[row, accepted.clamp_max(slots - 1)]
    residual = torch.where(rejected, (at_rejection - q_there).clamp_min(0), at_rejection)
    # p and q can agree to the last bit, which leaves nothing: then p is the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_rejection)
    return Verdict(accepted, draw(residual, generator))


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index a row `[...]`, with probability proportional to `weights [..., vocab]`.

    The exponential race: argmax of w / Exp(1). Unlike torch.multinomial it checks nothing on the
    host, so it can be captured in a CUDA graph.
    """
    noise = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / noise.clamp_min(1e-30)).argmax(-1)
