"""What a stretch of steps adds up to, kept on the device and read without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftline.model.drafter.losses import LossResult

_SCALARS = ("packs", "loss", "accepted", "blocks", "anchors", "bad_packs", "steps", "norm", "bad")


class Totals:
    """Sums of one drafter, float64 on its device, read through pinned memory.

    `begin_read` queues the copy and clears the sums; `finish_read` waits for that copy only.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._slots = block_size - 1
        size = len(_SCALARS) + 2 * self._slots
        self._vector = torch.zeros(size, dtype=torch.float64, device=device)
        cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def add_pack(self, result: LossResult, anchors: Tensor) -> None:
        loss = result.loss.detach()
        values = [
            torch.ones_like(loss),
            loss,
            result.accepted.sum(),
            result.blocks,
            anchors,
            ~torch.isfinite(loss),
        ]
        none = torch.zeros(len(_SCALARS) - len(values), dtype=torch.float64, device=loss.device)
        scalars = torch.stack([v.double() for v in values])
        self._vector += torch.cat([scalars, none, result.slot_correct, result.slot_total])

    def add_step(self, norm: Tensor) -> None:
        values = [torch.ones_like(norm), norm, ~torch.isfinite(norm)]
        end = len(_SCALARS)
        self._vector[end - len(values) : end] += torch.stack([v.double() for v in values])

    def clear(self) -> None:
        self._vector.zero_()

    def begin_read(self) -> None:
        self._host.copy_(self._vector, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._vector.device))
        self.clear()

    def finish_read(self) -> list[float]:
        """The sums of the last `begin_read`; add up those of several drafters, then `summarize`."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._host.tolist()
        return values


def summarize(sums: Sequence[float]) -> dict[str, float | list[float]]:
    """Means over the packs and steps in `sums`, which may be added up over drafters.

    Rates keep their denominators: accept_length_forced is `1 + accepted / blocks`, on the data's
    own tokens. `grad_norm` is that of the mean gradient, equal on every drafter.
    """
    count = len(_SCALARS)
    named = dict(zip(_SCALARS, sums[:count], strict=True))
    slots = (len(sums) - count) // 2
    correct, total = sums[count : count + slots], sums[count + slots :]
    packs, steps, blocks = max(named["packs"], 1.0), max(named["steps"], 1.0), named["blocks"]
    nan = float("nan")
    return {
        "loss": named["loss"] / packs,
        "accept_length_forced": 1 + named["accepted"] / blocks if blocks else nan,
        "accepted": named["accepted"],
        "blocks": blocks,
        "anchors": named["anchors"] / packs,
        "grad_norm": named["norm"] / steps,
        "bad_packs": named["bad_packs"],
        "bad_steps": named["bad"],
        "slot_accuracy": [c / t if t else nan for c, t in zip(correct, total, strict=True)],
    }
