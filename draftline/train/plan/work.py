"""The arithmetic of a pack: what it costs a target and a drafter."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.config.schema import Config
from draftline.model.drafter.backbone import DrafterShape
from draftline.model.target.facts import TargetFacts


@dataclass(frozen=True, slots=True)
class PackWork:
    """Floating-point operations of one pack in a target forward and in a drafter step."""

    target: float
    drafter: float


def pack_work(config: Config, facts: TargetFacts, shape: DrafterShape) -> PackWork:
    """Matrix products only; the target's attention scores are left out."""
    soft = config.loss.soft_labels > 0
    a_token = facts.total_flops if soft else facts.trunk_flops
    vocabulary = config.drafter.vocab_size or facts.vocab_size
    step = step_flops(shape, vocabulary, config.token_budget, config.anchors, soft=soft)
    return PackWork(a_token * config.token_budget, step)


def step_flops(
    shape: DrafterShape, vocabulary: int, context: int, anchors: int, *, soft: bool = False
) -> float:
    """Operations of one step's matrix products: 6 per weight and row, and over the supervised slots
    two products with the frozen head (logits, their gradient), three with soft labels."""
    rows = anchors * shape.block_size
    fc = shape.num_taps * shape.hidden_size**2
    kv = shape.num_layers * 2 * shape.hidden_size * shape.num_kv_heads * shape.head_dim
    slots = anchors * (shape.block_size - 1)
    head = (6.0 if soft else 4.0) * vocabulary * shape.hidden_size * slots
    return 6.0 * (shape.num_parameters - fc) * rows + 6.0 * (fc + kv) * context + head
