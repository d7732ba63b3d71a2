"""A copy of the trained state on the host, taken while the device goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftline.train.step.optim import MasterAdamW


class Snapshot:
    """Host buffers for one drafter's state, pinned for a CUDA device and allocated once.

    `begin` queues the copies on the current stream, ordered before the next update; `groups` waits
    for them.
    """

    def __init__(self, optimizer: MasterAdamW, fixed: Mapping[str, Tensor]) -> None:
        """`fixed` tensors of the drafter that training does not change, such as its feature scale."""
        self._optimizer = optimizer
        self._fixed = fixed
        cuda = optimizer.master.is_cuda
        self._flat = {
            name: torch.empty(flat.shape, dtype=flat.dtype, pin_memory=cuda)
            for name, flat in optimizer.buffers().items()
        }
        self._constants: dict[str, Tensor] = {}
        self._step = torch.empty((), dtype=torch.int64, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Queues the copies; the last snapshot must not be in use any more."""
        # Small, and not before now: a resume may have changed them since this object was made.
        self._constants = {k: t.detach().to("cpu", copy=True) for k, t in self._fixed.items()}
        for name, flat in self._optimizer.buffers().items():
            self._flat[name].copy_(flat, non_blocking=True)
        self._step.copy_(self._optimizer.step_count, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._optimizer.master.device))

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """Named tensors by checkpoint file; views of the host buffers.

        `drafter` are the weights to evaluate and export: the average where there is one, and then
        `masters` are those to go on from.
        """
        if self._copied is not None:
            self._copied.synchronize()
        named = {name: self._optimizer.named(flat) for name, flat in self._flat.items()}
        best = named.get("average", named["master"])
        moments = {
            f"{key}.{name}": tensor
            for key in ("exp_avg", "exp_avg_sq")
            for name, tensor in named[key].items()
        }
        groups = {
            "drafter": {**best, **self._constants},
            "optimizer": {**moments, "step_count": self._step},
        }
        if "average" in named:
            groups["masters"] = named["master"]
        return groups


def load_state(optimizer: MasterAdamW, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Puts what `Snapshot.groups` gave back into an optimizer."""
    drafter = dict(groups["drafter"])
    averaged = "masters" in groups
    optimizer.load(
        dict(groups["masters"]) if averaged else drafter,
        dict(groups["optimizer"]),
        drafter if averaged else None,
        int(groups["optimizer"]["step_count"]),
    )
