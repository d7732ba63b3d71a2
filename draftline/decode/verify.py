"""Acceptance of drafted tokens by the target: greedy, and lossless rejection sampling.

Shapes: rows are independent sequences; `drafts [rows, nodes - 1]` are the tokens of a tree's nodes
behind the anchor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.decode.tree import Tree


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted [rows]`: how many drafts stand, one below another from the anchor on; `last [rows]`:
    the node that the last of them is, and `bonus [rows]`: the target's own token behind it."""

    accepted: Tensor
    last: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True)
class Judge:
    """How tokens are taken from logits, and which drafts stand: the likeliest at `temperature` 0, else
    drawn with `generator` from `probabilities`."""

    temperature: float
    top_p: float | None
    top_k: int | None
    generator: torch.Generator

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of `logits [..., vocab]` the ids `[...]`, and the distribution that they were drawn from."""
        if self.temperature == 0:
            return logits.argmax(-1), None
        probs = self._probabilities(logits)
        return draw(probs, self.generator), probs

    def verify(
        self, tree: Tree, drafts: Tensor, draft_probs: Tensor | None, logits: Tensor
    ) -> Verdict:
        """The verdict on `drafts [rows, nodes - 1]` by the target's `logits [rows, nodes, vocab]`."""
        if self.temperature == 0:
            return accept_greedy(tree, drafts, logits)
        return accept_sampled(
            tree, drafts, draft_probs, self._probabilities(logits), self.generator
        )

    def _probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.temperature, self.top_p, self.top_k)


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


def accept_greedy(tree: Tree, drafts: Tensor, logits: Tensor) -> Verdict:
    """Accepts the longest path from the anchor that the target's argmax takes.

    `logits [rows, nodes, vocab]`: the target's prediction after each node.
    """
    choice = logits.argmax(-1)
    parents = tree.parents[:, 1:].expand(len(drafts), -1)
    last, accepted = tree.accepted(drafts == choice.gather(1, parents))
    return Verdict(accepted, last, choice.gather(1, last[:, None])[:, 0])


def accept_sampled(
    tree: Tree,
    drafts: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    generator: torch.Generator | None,
) -> Verdict:
    """Rejection sampling whose output is distributed as the target's (Leviathan et al.,
    arXiv 2211.17192, section 2.3; for siblings SpecInfer, arXiv 2305.09781, section 4.3).

    Each draft was drawn from its `draft_probs [rows, nodes - 1, vocab]`, which may depend on its elder
    siblings (None without drafts); `target_probs [rows, nodes, vocab]`. Of the children of a node
    that stands, one after another, a draft x stands with probability min(1, p(x) / q(x)); if it does
    not, p becomes the normalised positive part of p - q. The bonus comes from what p is then.
    """
    rows, nodes, _ = target_probs.shape
    row = torch.arange(rows, device=drafts.device)[:, None]
    if draft_probs is None:
        nobody = torch.zeros(rows, dtype=torch.long, device=drafts.device)
        return Verdict(nobody, nobody, draw(target_probs[:, 0], generator))
    parents = tree.parents[:, 1:]
    q = draft_probs.gather(2, drafts[..., None])[..., 0]
    u = torch.rand(q.shape, device=q.device, generator=generator)
    everybody = torch.arange(nodes, device=drafts.device).expand(rows, -1)
    left = target_probs
    stands = u * q < left[row, parents, drafts]
    for rank in range(1, tree.branching):
        # A younger sibling is asked by what its elders, rejected, have left.
        left = _rest(tree, left, draft_probs, everybody, rank - 1)
        left = left / left.sum(-1, keepdim=True)
        asked = tree.rank[:, 1:] == rank
        stands = torch.where(asked, u * q < left[row, parents, drafts], stands)
    last, accepted = tree.accepted(tree.eldest(stands))
    at_last = left[row, last[:, None]]
    at_last = _rest(tree, at_last, draft_probs, last[:, None], tree.branching - 1)
    return Verdict(accepted, last, draw(at_last[:, 0], generator))


def _rest(tree: Tree, p: Tensor, draft_probs: Tensor, nodes: Tensor, rank: int) -> Tensor:
    """What `p [rows, n, vocab]` after each of `nodes [rows, n]` leaves, not normalised, once the child
    of `rank` was rejected; p itself where there is no such child."""
    exists, child = tree.children(nodes, rank)
    row = torch.arange(len(p), device=p.device)[:, None]
    # Without a child there is no q to subtract; index 0 is a placeholder.
    rest = torch.where(exists[..., None], (p - draft_probs[row, child]).clamp_min(0), p)
    # p and q can agree to the last bit, which leaves nothing: then p is the right distribution.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index per row `[...]`, with probability proportional to `weights [..., vocab]`.

    The exponential race: argmax of w / Exp(1). Unlike torch.multinomial it checks nothing on the
    host, so it can be captured in a CUDA graph.
    """
    noise = torch.empty_like(weights).exponential_(generator=generator)
    return (weights / noise.clamp_min(1e-30)).argmax(-1)
