"""AdamW on float32 masters, with clipping, schedule and averaging, all without a host decision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Elements; parameters start at multiples, as wide loads and matrix kernels want them.
_ALIGNMENT = 128
_EPS = 1e-8
# Elements that change places at once.
_STRETCH = 1 << 20


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW (arXiv 1711.05101) with linear warm-up and a cosine to `min_ratio * peak`.

    `share` multiplies the summed gradient: one over the packs of a step. `clip` bounds the norm of
    the product, None does not. `ema` is the decay of an average of the masters, None keeps none.
    """

    peak: float
    total_steps: int
    warmup_ratio: float
    min_ratio: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float | None
    ema: float | None
    share: float = 1.0


def learning_rate(step: Tensor, spec: OptimizerSpec) -> Tensor:
    """The rate of 0-based `step`, on its device: linear warm-up, then a cosine to the floor."""
    warmup = max(1.0, spec.warmup_ratio * spec.total_steps)
    position = step.double()
    rising = (position + 1) / warmup
    # The warm-up need not be a whole number of steps; what is left of the run can be under one.
    progress = ((position + 1 - warmup) / max(1e-6, spec.total_steps - warmup)).clamp(0, 1)
    floor = spec.min_ratio
    falling = floor + (1 - floor) * 0.5 * (1 + torch.cos(math.pi * progress))
    return (spec.peak * torch.minimum(rising.clamp_max(1), falling)).float()


# (workings, masters, gradients, exp_avgs, exp_avg_sqs, averages, scalars) -> None, in place
MixedUpdate = Callable[..., None]


def build_mixed_update(spec: OptimizerSpec) -> MixedUpdate:
    """AdamW where gradients and working weights have a narrower dtype than the masters.

    The function takes lists with a tensor a parameter and is pointwise, so that compiled it is one
    pass over each. `scalars [5]` float32 are the factor on the gradient, the rate, the two bias
    corrections, and the share that an average keeps; a factor that is not finite leaves everything
    as it is. Matrices decay, vectors do not.
    """
    (beta1, beta2), ema = spec.betas, spec.ema

    def update(
        workings: list[Tensor],
        masters: list[Tensor],
        gradients: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        averages: list[Tensor] | None,
        scalars: Tensor,
    ) -> None:
        factor, rate, correction1, correction2, keep = scalars.unbind()
        good = torch.isfinite(factor)
        for i, master in enumerate(masters):
            decay = spec.weight_decay if master.ndim > 1 else 0.0
            gradient = gradients[i].float() * factor
            first = torch.lerp(exp_avgs[i], gradient, 1 - beta1)
            second = beta2 * exp_avg_sqs[i] + (1 - beta2) * gradient * gradient
            denominator = (second / correction2).sqrt() + _EPS
            value = master * (1 - rate * decay) - rate * (first / correction1) / denominator
            value = torch.where(good, value, master)
            exp_avgs[i].copy_(torch.where(good, first, exp_avgs[i]))
            exp_avg_sqs[i].copy_(torch.where(good, second, exp_avg_sqs[i]))
            master.copy_(value)
            workings[i].copy_(value)
            if averages is not None and ema is not None:
                moved = value + keep * (averages[i] - value)
                averages[i].copy_(torch.where(good, moved, averages[i]))

    return update


class MasterAdamW:
    """Updates the parameters of a module through float32 masters.

    Weights, masters, moments and the average lie in one flat buffer each, of which the module's
    parameters are views: a copy for a checkpoint, or a checksum, is one operation. Where the working
    dtype is float32 the parameters are their own masters. `step_count` counts updates on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: OptimizerSpec,
        *,
        working_dtype: torch.dtype,
        gather: bool = False,
        mixed_update: MixedUpdate | None = None,
    ) -> None:
        """`module` holds float32 weights; its parameters become `working_dtype` here.

        `gather`: the gradients of several packs are added up in `grad [elements]`, which a reduction
        may change before `update`; without it `grad` is None and the gradients of one pack are used
        where they are. `mixed_update` is a compiled `build_mixed_update(spec)`.
        """
        self.spec = spec
        named = dict(module.named_parameters())
        self.parameters = list(named.values())
        device = self.parameters[0].device
        self.layout: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in named.items():
            self.layout[name] = (size, parameter.shape)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._separate = working_dtype != torch.float32
        self._mixed_update = mixed_update or build_mixed_update(spec)
        self.master = torch.zeros(size, device=device)
        with torch.no_grad():
            for name, view in self.named(self.master).items():
                view.copy_(named[name])
        self.working = self.master.to(working_dtype) if self._separate else self.master
        for name, view in self.named(self.working).items():
            named[name].data = view
        self.grad = torch.zeros(size, device=device, dtype=working_dtype) if gather else None
        self._gradients = [] if self.grad is None else self._list(self.grad)
        self.exp_avg = torch.zeros(size, device=device)
        self.exp_avg_sq = torch.zeros(size, device=device)
        self.average = self.master.clone() if spec.ema is not None else None
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self._enabled = torch.ones((), device=device)
        swaps = self.average is not None and not self._separate
        self._scratch = torch.empty(min(size, _STRETCH) if swaps else 0, device=device)

    def enable(self, on: bool) -> None:
        """Off: `update` computes everything and changes nothing, for a warm-up."""
        self._enabled.fill_(float(on))
        if self.grad is not None:
            self.grad.zero_()

    def rate_at(self, step: Tensor) -> Tensor:
        """The learning rate of 0-based `step`, on its device: on the host for a host tensor."""
        return learning_rate(step, self.spec)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Takes the gradients of one pack, in the order of `parameters`."""
        if self.grad is None:
            self._gradients = list(gradients)
        else:
            torch._foreach_add_(self._gradients, list(gradients))

    @torch.no_grad()
    def update(self) -> Tensor:
        """One step on the gradients that were added; returns the norm of their mean before clipping.

        A gradient that is not finite leaves weights and moments as they are: it must not destroy
        them before the host hears of it.
        """
        spec = self.spec
        norms = torch._foreach_norm(self._gradients, 2, torch.float32)
        norm: Tensor = spec.share * torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.full_like(norm, spec.share)
        if spec.clip is not None:
            factor = factor * (spec.clip / (norm + 1e-6)).clamp_max(1.0)
        good = torch.isfinite(norm) & (self._enabled > 0)
        count = self.step_count.double() + 1
        rate = self.rate_at(self.step_count)
        # The average follows quickly at first, so that it forgets the random start.
        keep = ((1 + count) / (10 + count)).clamp_max(spec.ema or 0.0)
        if self._separate:
            corrections = [1 - torch.pow(beta, count) for beta in spec.betas]
            factor = torch.where(good, factor, float("nan"))
            self._mixed_update(
                self._list(self.working),
                self._list(self.master),
                self._gradients,
                self._list(self.exp_avg),
                self._list(self.exp_avg_sq),
                None if self.average is None else self._list(self.average),
                torch.stack([v.float() for v in (factor, rate, *corrections, keep)]),
            )
        else:
            torch._foreach_mul_(self._gradients, factor)
            self._update_float32(good, rate, count)
            if self.average is not None:
                moved = self.master + keep.float() * (self.average - self.master)
                self.average.copy_(torch.where(good, moved, self.average))
        self.step_count.add_(self._enabled.to(torch.int64))
        if self.grad is not None:
            self.grad.zero_()
        return norm

    def _update_float32(self, good: Tensor, rate: Tensor, count: Tensor) -> None:
        columns = [self._list(self.master), self._gradients]
        columns += [self._list(self.exp_avg), self._list(self.exp_avg_sq)]
        for decays in (True, False):
            rows = [row for row in zip(*columns, strict=True) if (row[0].ndim > 1) == decays]
            if rows:
                masters, gradients, exp_avgs, exp_avg_sqs = map(list, zip(*rows, strict=True))
                torch._fused_adamw_(
                    masters,
                    gradients,
                    exp_avgs,
                    exp_avg_sqs,
                    [],
                    [count.float()] * len(rows),
                    lr=rate,
                    beta1=self.spec.betas[0],
                    beta2=self.spec.betas[1],
                    weight_decay=self.spec.weight_decay if decays else 0.0,
                    eps=_EPS,
                    amsgrad=False,
                    maximize=False,
                    found_inf=(~good).float(),
                )

    def _list(self, flat: Tensor) -> list[Tensor]:
        return list(self.named(flat).values())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the parameters hold the average, where there is one; afterwards what they held,
        to the bit."""
        if self.average is None:
            yield
            return
        self._show(self.average)
        try:
            yield
        finally:
            self._show(self.master)

    @torch.no_grad()
    def _show(self, flat: Tensor) -> None:
        """Puts a flat buffer into the parameters; float32 ones are the masters, which change places
        with the average in stretches, as nothing as large is to spare."""
        if self._separate:
            self.working.copy_(flat)
            return
        assert self.average is not None, "nothing else is shown"
        for first in range(0, len(self.master), _STRETCH):
            mine, other = (f[first : first + _STRETCH] for f in (self.master, self.average))
            held = self._scratch[: len(mine)]
            held.copy_(mine)
            mine.copy_(other)
            other.copy_(held)

    def buffers(self) -> dict[str, Tensor]:
        """The flat buffers that a checkpoint holds: master, exp_avg, exp_avg_sq, average."""
        flat = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return flat if self.average is None else {**flat, "average": self.average}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat buffer (or of a copy of one, on any device) by parameter name."""
        return {
            name: flat[offset : offset + shape.numel()].view(shape)
            for name, (offset, shape) in self.layout.items()
        }

    @torch.no_grad()
    def copy_from(self, other: MasterAdamW) -> None:
        """Takes the whole state of another replica, on any device."""
        for name, flat in self.buffers().items():
            flat.copy_(other.buffers()[name])
        self.working.copy_(other.working)
        self.step_count.copy_(other.step_count)

    @torch.no_grad()
    def load(
        self,
        masters: dict[str, Tensor],
        moments: dict[str, Tensor],
        average: dict[str, Tensor] | None,
        step: int,
    ) -> None:
        """Restores masters, working weights, moments (`exp_avg.NAME`, `exp_avg_sq.NAME`; zero
        where missing), the average (the masters where None) and the step count."""
        for name, view in self.named(self.master).items():
            view.copy_(masters[name])
        if self._separate:
            self.working.copy_(self.master)
        for key in ("exp_avg", "exp_avg_sq"):
            for name, view in self.named(getattr(self, key)).items():
                stored = moments.get(f"{key}.{name}")
                view.zero_() if stored is None else view.copy_(stored)
        if self.average is not None:
            for name, view in self.named(self.average).items():
                view.copy_((average or masters)[name])
        self.step_count.fill_(step)
