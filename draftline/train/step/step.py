"""One optimizer step of one drafter: anchors, blocks, masks, forward, loss, backward, update.

Shapes are fixed by the configuration, inputs are staged into fixed buffers, nothing is read back to
the host, and metrics accumulate on the device; on CUDA the whole is two captured graphs, with room
between them for a reduction over drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftline.model.drafter.anchors import Anchors, build_blocks, sample_anchors
from draftline.model.drafter.backbone import Drafter, Mask
from draftline.model.drafter.heads import Answers, DraftVocabulary
from draftline.model.drafter.losses import (
    LossKernels,
    LossResult,
    LossSpec,
    build_loss_kernels,
)
from draftline.model.drafter.masks import block_mask, dense_mask
from draftline.model.head import TargetEnds
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.graphs import FixedInputs, GraphPool, Replayed
from draftline.train.step.optim import MasterAdamW, MixedUpdate, OptimizerSpec, build_mixed_update
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.totals import Totals


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What all drafters of a run have in common. `noise` is the deviation of Gaussian feature
    noise; `seed` and a pack's number give the pack's anchors and noise; `gather` is that of
    MasterAdamW, for several packs per step."""

    loss: LossSpec
    optimizer: OptimizerSpec
    max_anchors: int
    token_budget: int
    noise: float
    seed: int
    gather: bool


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The functions of one device that are compiled; its drafters share them."""

    vocabulary: DraftVocabulary
    forward: Callable[..., Tensor]
    loss: LossKernels
    mixed_update: MixedUpdate


def compile_kernels(
    gate: CompileGate, ends: TargetEnds, token_ids: Tensor | None, spec: StepSpec
) -> StepKernels:
    """The kernels of the device of `ends`, over the draft vocabulary where there is one."""
    device = ends.device
    vocabulary = DraftVocabulary.of(ends, token_ids)

    def forward(drafter: Drafter, *inputs: Any) -> Tensor:
        return drafter.states(*inputs, predictions=True)

    passes = build_loss_kernels(spec.loss, vocabulary.ends.head)
    return StepKernels(
        vocabulary=vocabulary,
        forward=gate.compile(forward, "drafter", device),
        loss=replace(
            passes,
            score=gate.compile(passes.score, "loss", device),
            into_gradient=gate.compile(passes.into_gradient, "loss_gradient", device),
        ),
        mixed_update=gate.compile(
            # The drafters are replicas: equal gradients must give equal weights.
            build_mixed_update(spec.optimizer),
            "update",
            device,
            same_bits=True,
        ),
    )


class TrainStep:
    """The step of one drafter on one device: `stage`, `gradients` per pack, then `update`."""

    def __init__(
        self,
        drafter: Drafter,
        kernels: StepKernels,
        spec: StepSpec,
        *,
        working_dtype: torch.dtype,
        width: int,
        pool: GraphPool | None = None,
    ) -> None:
        """`drafter` holds float32 weights on the kernels' device; `width` is that of the features."""
        device = kernels.vocabulary.ends.device
        self.drafter = drafter
        self.device = device
        self.optimizer = MasterAdamW(
            drafter,
            spec.optimizer,
            working_dtype=working_dtype,
            gather=spec.gather,
            mixed_update=kernels.mixed_update,
        )
        self.totals = Totals(drafter.shape.block_size, device)
        self._kernels = kernels
        self._spec = spec
        self._taps_width = drafter.shape.num_taps * drafter.shape.hidden_size
        self._fused = device.type == "cuda"
        self._generator = torch.Generator(device)
        self.width, self.dtype = width, kernels.vocabulary.ends.dtype
        self.inputs = PackTensors.empty(spec.token_budget, width, self.dtype, device)
        self._fixed = FixedInputs(self.inputs.tensors())
        generators = (self._generator,) if self._fused else ()
        self._gradients = Replayed(self._run_gradients, device, pool=pool, generators=generators)
        self._update = Replayed(self._run_update, device, pool=pool)

    def __call__(self, pack: PackTensors, number: int) -> None:
        """A whole step on one pack."""
        self.stage(pack.tensors())
        self.gradients(number)
        self.update()

    def stage(self, pack: Mapping[str, Tensor]) -> None:
        """Queues the copy of a pack into the step's own buffers; raises RunError for other shapes."""
        self._fixed.copy(pack)

    def gradients(self, number: int) -> None:
        """Adds the gradients of the staged pack, whose anchors and noise follow from `number`."""
        self._generator.manual_seed(_mixed(self._spec.seed, number))
        self._gradients()

    def update(self) -> None:
        """Updates the weights with the gradients that were added, or reduced, since the last one."""
        self._update()

    def compile(self) -> None:
        """Runs forward, backward and update once, so that each is compiled; changes no state."""
        self.optimizer.enable(False)
        self._run_gradients()
        self._run_update()
        self._forget()

    def capture(self) -> None:
        """Captures both graphs on CUDA; changes no state."""
        self.optimizer.enable(False)
        self._gradients.warm()
        self._update.warm()
        self._forget()

    def _forget(self) -> None:
        self.optimizer.enable(True)
        self.totals.clear()

    @property
    def captured(self) -> bool:
        return self._gradients.captured and self._update.captured

    @property
    def replays(self) -> int:
        """How often its graphs were replayed."""
        return self._gradients.replays + self._update.replays

    def sample(self, pack: PackTensors) -> Anchors:
        """The anchors of one pack, from the step's generator."""
        return sample_anchors(
            pack.anchor_mask,
            pack.conversation,
            pack.start,
            self._spec.max_anchors,
            self._generator,
        )

    def loss(self, pack: PackTensors, anchors: Anchors) -> LossResult:
        """Forward and loss at given anchors; the result's loss has a gradient."""
        return self._loss(*self._predict(pack, anchors, self._spec.noise))

    def scores(self, pack: PackTensors, anchors: Anchors) -> LossResult:
        """The same without feature noise and without a gradient; draws nothing at random."""
        # With gradients, as in training: without them the forward would be compiled once more.
        predicted = self._predict(pack, anchors, 0.0)
        with torch.no_grad():
            return self._loss(*predicted)

    def _loss(self, states: Tensor, answers: Answers) -> LossResult:
        kernels = self._kernels
        return self.drafter.head.loss(states, answers, kernels.vocabulary, kernels.loss)

    def _predict(
        self, pack: PackTensors, anchors: Anchors, deviation: float
    ) -> tuple[Tensor, Answers]:
        """The states of the slots that predict, and what they should have said."""
        shape, ends = self.drafter.shape, self._kernels.vocabulary.ends
        blocks = build_blocks(
            anchors,
            pack.input_ids,
            pack.loss_mask,
            pack.start,
            pack.position,
            shape.block_size,
            shape.mask_token_id,
        )
        features = pack.features[:, : self._taps_width]
        if deviation:
            noise = torch.empty_like(features).normal_(generator=self._generator)
            scale = deviation / self.drafter.feature_scale.to(noise.dtype)
            features = features + noise * scale
        sliding: Mask | None = None
        if shape.sliding_layers:
            sliding = self._mask(anchors, features.shape[0], shape.sliding_window)
        hidden = self._kernels.forward(
            self.drafter,
            features,
            ends.embed(blocks.inputs).flatten(0, 1),
            self.drafter.rope(pack.position[None], features.dtype),
            self.drafter.rope(blocks.positions.flatten()[None], features.dtype),
            self._mask(anchors, features.shape[0], None),
            sliding,
        )
        target_hidden = None
        if pack.features.shape[1] > self._taps_width:
            # The prediction of slot j is made at the position before it.
            target_hidden = pack.features[:, self._taps_width :][blocks.index[:, :-1]]
        states = hidden.view(-1, shape.block_size - 1, hidden.shape[-1])
        return states, Answers(blocks.labels, blocks.supervised, target_hidden)

    def _run_gradients(self) -> None:
        anchors = self.sample(self.inputs)
        result = self.loss(self.inputs, anchors)
        gradients = torch.autograd.grad(result.loss, self.optimizer.parameters)
        self.optimizer.add(gradients)
        self.totals.add_pack(result, anchors.keep.sum())

    def _run_update(self) -> None:
        self.totals.add_step(self.optimizer.update())

    def _mask(self, anchors: Anchors, context: int, window: int | None) -> Mask:
        build = block_mask if self._fused else dense_mask
        return build(anchors, context, self.drafter.shape.block_size, window)


def _mixed(seed: int, number: int) -> int:
    """One seed for each run and pack; neighbouring numbers share no stream (splitmix64)."""
    value = (seed * 0x9E3779B97F4A7C15 + number + 1) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & (2**64 - 1)
    return (value ^ (value >> 31)) >> 1
