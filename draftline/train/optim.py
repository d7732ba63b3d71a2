"""AdamW on float32 masters, with clipping, schedule and averaging, all without a host decision."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def learning_rate(
    step: Tensor, *, peak: float, total_steps: int, warmup_ratio: float, min_ratio: float
) -> Tensor:
    """The rate of 0-based `step` (a device scalar): linear warm-up, then a cosine to the floor."""
    warmup = max(1.0, warmup_ratio * total_steps)
    position = step.double()
    rising = (position + 1) / warmup
    # The warm-up need not be a whole number of steps; what is left of the run can be under one.
    progress = ((position + 1 - warmup) / max(1e-6, total_steps - warmup)).clamp(0, 1)
    falling = min_ratio + (1 - min_ratio) * 0.5 * (1 + torch.cos(math.pi * progress))
    return (peak * torch.minimum(rising.clamp_max(1), falling)).float()


class MasterAdamW:
    """Updates working parameters through float32 masters.

    Where the working dtype is float32 the parameters are their own masters. `average` is an
    exponential moving average of the masters, or None. `step` counts updates on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        peak: float,
        total_steps: int,
        warmup_ratio: float,
        min_ratio: float,
        betas: tuple[float, float],
        weight_decay: float,
        clip: float | None,
        ema: float | None,
        working_dtype: torch.dtype,
    ) -> None:
        """`module` holds float32 weights; its parameters become `working_dtype` here."""
        self.names = [name for name, _ in module.named_parameters()]
        self.working: list[Tensor] = [p for _, p in module.named_parameters()]
        device = self.working[0].device
        self._separate = working_dtype != torch.float32
        if self._separate:
            self.masters = [p.detach().clone() for p in self.working]
            for parameter in self.working:
                parameter.data = parameter.data.to(working_dtype)
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        else:
            self.masters = list(self.working)
        self._peak, self._total, self._warmup = peak, total_steps, warmup_ratio
        self._floor, self._clip, self._ema = min_ratio, clip, ema
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.rate = torch.zeros((), dtype=torch.float32, device=device)
        matrices = [m for m in self.masters if m.ndim > 1]
        vectors = [m for m in self.masters if m.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.rate,
            betas=betas,
            fused=True,
        )
        self.average = [m.detach().clone() for m in self.masters] if ema is not None else None

    def rate_at(self, step: Tensor) -> Tensor:
        """The learning rate of 0-based `step`, on its device: on the host for a host tensor."""
        return learning_rate(
            step,
            peak=self._peak,
            total_steps=self._total,
            warmup_ratio=self._warmup,
            min_ratio=self._floor,
        )

    def update(self) -> Tensor:
        """Applies the working gradients and clears them; returns their norm before clipping."""
        if self._separate:
            grads = _gradients(self.masters)
            torch._foreach_copy_(grads, _gradients(self.working))
        else:
            grads = _gradients(self.working)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self._clip is not None:
            torch._foreach_mul_(grads, (self._clip / (norm + 1e-6)).clamp_max(1.0))
        self.rate.copy_(self.rate_at(self.step_count))
        # The fused kernel leaves everything as it is where found_inf is set: a non-finite gradient
        # must not destroy the weights before the host hears of it.
        self._adam.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self._adam.step()
        self.step_count.add_(1)
        with torch.no_grad():
            if self._separate:
                torch._foreach_copy_(self.working, self.masters)
            if self.average is not None and self._ema is not None:
                # The average follows quickly at first, so that it forgets the random start.
                count = self.step_count.float()
                keep = torch.minimum((1 + count) / (10 + count), torch.full_like(count, self._ema))
                torch._foreach_sub_(self.average, self.masters)
                torch._foreach_mul_(self.average, keep)
                torch._foreach_add_(self.average, self.masters)
        for parameter in self.working:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Named tensors of the optimizer: moments, steps, the average."""
        tensors: dict[str, Tensor] = {"step_count": self.step_count}
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        if self.average is not None:
            for name, value in zip(self.names, self.average, strict=True):
                tensors[f"average.{name}"] = value
        return tensors

    @torch.no_grad()
    def load(self, masters: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Restores masters, working weights and everything that `state()` gave.

        An average that `state` does not have starts from the masters.
        """
        for name, master, working in zip(self.names, self.masters, self.working, strict=True):
            master.copy_(masters[name])
            working.copy_(master)
            moments = {
                key.removesuffix(f".{name}"): value.to(master.device, copy=True)
                for key, value in state.items()
                if key.split(".", 1)[1:] == [name] and not key.startswith("average.")
            }
            if moments:
                self._adam.state[master] = dict(moments)
        if self.average is not None:
            for name, value in zip(self.names, self.average, strict=True):
                value.copy_(state.get(f"average.{name}", masters[name]))
        self.step_count.copy_(state["step_count"])

    def master_tensors(self) -> dict[str, Tensor]:
        """float32 weights by name."""
        return dict(zip(self.names, (m.detach() for m in self.masters), strict=True))

    def best_tensors(self) -> dict[str, Tensor]:
        """The weights to evaluate and export: the average where there is one, else the masters."""
        if self.average is None:
            return self.master_tensors()
        return dict(zip(self.names, self.average, strict=True))


def _gradients(tensors: list[Tensor]) -> list[Tensor]:
    found = [t.grad for t in tensors if t.grad is not None]
    assert len(found) == len(tensors), "every parameter of the drafter takes part in the loss"
    return found
