"""One optimizer step on one pack: anchors, blocks, masks, forward, loss, backward, update.

Shapes are fixed by the configuration, nothing is read back to the host, and metrics accumulate on
the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from draftline.data.packing import PackArrays
from draftline.model.anchors import Anchors, build_blocks, sample_anchors
from draftline.model.drafter import Drafter, Mask
from draftline.model.losses import LossResult, LossSpec, build_chunk_loss, head_loss
from draftline.model.masks import block_mask, dense_mask
from draftline.model.target import Target
from draftline.runtime.compiled import CompileGate
from draftline.runtime.devices import upload
from draftline.train.optim import MasterAdamW


@dataclass(frozen=True, slots=True)
class PackTensors:
    """A pack on the device: `[tokens]` tensors as in PackArrays, and its features
    `[tokens, taps * hidden]` with the target's last hidden states `[tokens, hidden]` or None."""

    input_ids: Tensor
    loss_mask: Tensor
    anchor_mask: Tensor
    conversation: Tensor
    position: Tensor
    start: Tensor
    features: Tensor
    last_hidden: Tensor | None

    @staticmethod
    def move(arrays: PackArrays, device: torch.device) -> dict[str, Tensor]:
        """The integer tensors of a pack on `device`."""
        return {f.name: upload(getattr(arrays, f.name), device) for f in fields(PackArrays)}


class Totals:
    """Sums of a stretch of steps, float64 on the device, read through pinned memory.

    `begin_read` queues the copy and clears the sums; `finish_read`, one step later, waits for the
    copy only.
    """

    _SCALARS = ("steps", "loss", "accepted", "blocks", "anchors", "norm", "bad_steps")

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._slots = block_size - 1
        size = len(self._SCALARS) + 2 * self._slots
        self._vector = torch.zeros(size, dtype=torch.float64, device=device)
        cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def add(self, result: LossResult, anchors: Tensor, norm: Tensor) -> None:
        loss = result.loss.detach()
        good = torch.isfinite(loss) & torch.isfinite(norm)
        scalars = [
            torch.ones_like(loss),
            loss,
            result.accepted,
            result.blocks,
            anchors,
            norm,
            ~good,
        ]
        self._vector += torch.cat(
            [torch.stack([s.double() for s in scalars]), result.slot_correct, result.slot_total]
        )

    def begin_read(self) -> None:
        self._host.copy_(self._vector, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._vector.zero_()

    def finish_read(self) -> dict[str, float | list[float]]:
        """Means over the steps of the last `begin_read`. Rates keep their denominators:
        accept_length_forced is `1 + accepted / blocks`, on the data's own tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._host.tolist()
        count = len(self._SCALARS)
        sums = dict(zip(self._SCALARS, values[:count], strict=True))
        correct, total = values[count : count + self._slots], values[count + self._slots :]
        steps, blocks = max(sums["steps"], 1.0), sums["blocks"]
        nan = float("nan")
        return {
            "loss": sums["loss"] / steps,
            "accept_length_forced": 1 + sums["accepted"] / blocks if blocks else nan,
            "accepted": sums["accepted"],
            "blocks": blocks,
            "anchors": sums["anchors"] / steps,
            "grad_norm": sums["norm"] / steps,
            "bad_steps": sums["bad_steps"],
            "slot_accuracy": [c / t if t else nan for c, t in zip(correct, total, strict=True)],
        }


class TrainStep:
    """The step of one drafter on one device."""

    def __init__(
        self,
        drafter: Drafter,
        optimizer: MasterAdamW,
        target: Target,
        gate: CompileGate,
        *,
        loss: LossSpec,
        max_anchors: int,
        token_ids: Tensor | None,
        noise: float,
        generator: torch.Generator,
    ) -> None:
        self.drafter = drafter
        self.optimizer = optimizer
        self.totals = Totals(drafter.shape.block_size, target.device)
        self._target = target
        self._spec = loss
        self._max_anchors = max_anchors
        self._noise = noise
        self._generator = generator
        self._fused = target.device.type == "cuda"
        self._forward = gate.compile(drafter.forward, "drafter")
        self._head = target.head if token_ids is None else target.head.restricted(token_ids)
        self._chunk_loss = gate.compile(build_chunk_loss(loss, self._head), "head")
        rows = target.vocab_size
        self._draft_id = torch.arange(rows, device=target.device)
        if token_ids is not None:
            self._draft_id = torch.full((rows,), -1, device=target.device)
            self._draft_id[token_ids] = torch.arange(len(token_ids), device=target.device)

    def sample(self, pack: PackTensors) -> Anchors:
        """The anchors of one step, from the step's generator."""
        return sample_anchors(
            pack.anchor_mask, pack.conversation, pack.start, self._max_anchors, self._generator
        )

    def loss(self, pack: PackTensors, anchors: Anchors) -> LossResult:
        """Forward and loss at given anchors; the result's loss has a gradient."""
        shape = self.drafter.shape
        blocks = build_blocks(
            anchors,
            pack.input_ids,
            pack.loss_mask,
            pack.start,
            pack.position,
            shape.block_size,
            shape.mask_token_id,
        )
        features = pack.features
        if self._noise:
            noise = torch.empty_like(features).normal_(generator=self._generator)
            features = features + self._noise * noise / self.drafter.feature_scale.to(noise.dtype)
        sliding: Mask | None = None
        if shape.sliding_layers:
            sliding = self._mask(anchors, features.shape[0], shape.sliding_window)
        hidden = self._forward(
            features,
            self._target.embed(blocks.inputs).flatten(0, 1),
            pack.position,
            blocks.positions.flatten(),
            self._mask(anchors, features.shape[0], None),
            sliding,
        )
        target_hidden = None
        if pack.last_hidden is not None:
            # The prediction of slot j is made at the position before it.
            target_hidden = pack.last_hidden[blocks.index[:, :-1]]
        labels = self._draft_id[blocks.labels]
        return head_loss(
            hidden.view(*blocks.labels.shape, -1),
            target_hidden,
            self._head,
            labels.clamp_min(0),
            labels >= 0,
            blocks.supervised,
            self._spec,
            self._chunk_loss,
        )

    def warm(self, pack: PackTensors) -> None:
        """Runs forward and backward once, so that both are compiled; changes no state."""
        state = self._generator.get_state()
        self.loss(pack, self.sample(pack)).loss.backward()  # type: ignore[no-untyped-call]
        self.drafter.zero_grad(set_to_none=True)
        self._generator.set_state(state)

    def __call__(self, pack: PackTensors) -> None:
        """Trains on one pack."""
        anchors = self.sample(pack)
        result = self.loss(pack, anchors)
        result.loss.backward()  # type: ignore[no-untyped-call]
        norm = self.optimizer.update()
        self.totals.add(result, anchors.keep.sum(), norm)

    def _mask(self, anchors: Anchors, context: int, window: int | None) -> Mask:
        build = block_mask if self._fused else dense_mask
        return build(anchors, context, self.drafter.shape.block_size, window)
