"""What measuring on held-out conversations costs a run, known before it starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftline.amounts import counted, sized
from draftline.config.schema import Config
from draftline.data.heldout import count_conversations
from draftline.train.features.cache import feature_size
from draftline.train.plan.inputs import Inputs
from draftline.train.plan.start import heldout_packs
from draftline.train.step.pack_tensors import PACK_BYTES_A_TOKEN

# A step is a forward and twice as much again backward.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class HeldOutCost:
    """`passes` forward passes over `positions` block starts per measurement, of which the run takes
    `measurements`; together `work_pct` of the drafter's work in 100 of training. `host_bytes` hold
    the features."""

    conversations: int
    positions: int
    passes: int
    every: int
    measurements: int
    work_pct: float
    host_bytes: int

    def line(self) -> str:
        return (
            f"plan: {counted(self.conversations, 'conversation')} held out, {self.positions} "
            f"positions: {counted(self.passes, 'forward pass', 'forward passes')} every {self.every} "
            "steps and at the end, "
            f"{self.work_pct:.1f} % on top of a drafter's work; {sized(self.host_bytes)} "
            "on the host"
        )


def heldout_cost(
    config: Config, inputs: Inputs, *, steps: int, accumulate: int
) -> HeldOutCost | None:
    """The cost over `steps` steps in which each drafter takes `accumulate` packs; None for none."""
    if not inputs.heldout:
        return None
    masks = [sample.loss_mask for sample in inputs.heldout]
    positions = [int(np.count_nonzero(mask[:-1] & mask[1:])) for mask in masks]
    packs = heldout_packs(config, inputs.heldout)
    of_packs = [sum(positions[member] for member in pack.members) for pack in packs]
    passes = sum(-(-count // config.anchors) for count in of_packs)
    measurements = -(-steps // config.train.eval_every)
    return HeldOutCost(
        conversations=count_conversations(inputs.heldout),
        positions=sum(positions),
        passes=passes,
        every=config.train.eval_every,
        measurements=measurements,
        work_pct=100 * _FORWARD_SHARE * passes * measurements / (steps * accumulate),
        host_bytes=heldout_bytes(config, inputs),
    )


def heldout_bytes(config: Config, inputs: Inputs) -> int:
    """Host memory for the held-out packs and their features."""
    soft = config.loss.soft_labels > 0
    features = feature_size(inputs.facts, config.token_budget, last_hidden=soft).bytes
    pack = features + PACK_BYTES_A_TOKEN * config.token_budget
    return pack * len(heldout_packs(config, inputs.heldout))
