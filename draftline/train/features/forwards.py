"""The target forwards of one worker: a pack's features from a finite table of shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.data.batches import BatchTable, Shape
from draftline.data.packing import Pack
from draftline.data.store import Sample
from draftline.errors import RunError
from draftline.model.target.target import Target
from draftline.runtime.graphs import GraphPool, Replayed
from draftline.runtime.staging import Staging

Capture = Literal["auto", "always", "never"]
# Above this share of the device's time the host's launches begin to be what limits a worker.
_HOST_SHARE = 0.15
# Forwards that may be queued before the host waits for the first of them.
_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """One forward of the largest shape: what the host needed to queue it, what the device to run it.

    `waits` says what in it made the host wait for the device; no graph can hold such a forward.
    """

    host_ms: float
    device_ms: float
    waits: str | None = None


def should_capture(host_ms: float, device_ms: float) -> bool:
    """Whether launches cost so much of a forward's device time that a graph is worth its warm-up."""
    return host_ms > _HOST_SHARE * device_ms


def decide(capture: Literal["auto", "always"], timing: Timing) -> tuple[bool, str]:
    """Whether to capture, and the reason. Raises RunError when `always` meets a forward that waits."""
    if timing.waits is not None:
        if capture == "always":
            raise RunError(
                "target.capture=always, but the target's forward makes the host wait for the device "
                f"({timing.waits}), which no CUDA graph can hold; set target.capture=auto"
            )
        return False, f"the forward makes the host wait ({timing.waits})"
    captured = capture == "always" or should_capture(timing.host_ms, timing.device_ms)
    return captured, f"host {timing.host_ms:.1f} ms of {timing.device_ms:.1f} ms per forward"


def time_forward(forward: Callable[[], None], device: torch.device) -> Timing:
    """The timing of `forward` on a CUDA device that nobody else uses meanwhile."""
    forward()  # loads kernels and allocates
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        began = time.perf_counter()
        forward()
        host_ms = 1000 * (time.perf_counter() - began)
        end.record(stream)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return Timing(float("nan"), float("nan"), str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    end.synchronize()
    return Timing(host_ms, begin.elapsed_time(end))


Measure = Callable[[Callable[[], None], torch.device], Timing]


class TargetForwards:
    """Computes whole packs' features on one device, for one worker thread.

    `row [token_budget, width]` in the target's dtype holds the last pack's features back to back,
    zeros behind; channels are the taps and, with `last_hidden`, the final-norm states. Every buffer
    is allocated here; on CUDA `warm` runs every shape, after which no memory is added.
    """

    def __init__(
        self,
        target: Target,
        table: BatchTable,
        *,
        last_hidden: bool,
        token_budget: int,
        capture: Capture,
        choices: Choices,
    ) -> None:
        self.device, self.dtype = target.device, target.dtype
        self.taps_width = len(target.taps) * target.hidden_size
        self.width = self.taps_width + (target.hidden_size if last_hidden else 0)
        self._target = target
        self._table = table
        self._last_hidden = last_hidden
        self._capture: Capture = capture
        self._choices = choices
        # Padding goes into one more row, which nobody reads.
        self._buffer = torch.zeros(
            token_budget + 1, self.width, dtype=self.dtype, device=self.device
        )
        self.row = self._buffer[:token_budget]
        self._trash = token_budget
        # Token ids in the first half, places in `row` in the second: one copy per forward.
        inputs = torch.zeros(2 * table.most_tokens, dtype=torch.int64, device=self.device)
        self._staging = Staging((2 * table.most_tokens,), torch.int64, self.device, depth=_AHEAD)
        pool = GraphPool(self.device)
        self._inputs: dict[Shape, Tensor] = {}
        self._forwards: dict[Shape, Replayed] = {}
        for rows, length in table.shapes:
            shape = (rows, length)
            self._inputs[shape] = inputs[: 2 * rows * length].view(2, rows * length)
            function = partial(self._forward, self._inputs[shape], shape)
            self._forwards[shape] = Replayed(function, self.device, pool=pool)
        self._warmed = False

    def warm(self, measure: Measure = time_forward) -> None:
        """Runs every shape, the largest first, and captures each where that was decided.

        `measure` times a forward; the decision is recorded with its numbers. Raises RunError when
        capture=always meets a target whose forward cannot be captured. A second call does nothing.
        """
        if self._warmed:
            return
        self._warmed = True
        if self.device.type != "cuda":
            # Nothing is captured, and no allocator keeps what a shape took.
            self._decide(partial(measure, lambda: None, self.device))
            return
        captured: bool | None = None
        for shape in sorted(self._forwards, key=lambda s: -s[0] * s[1]):
            forward = self._forwards[shape]
            self._fill_with_padding(shape)
            if captured is None:
                captured = self._decide(partial(measure, forward, self.device))
            if captured:
                forward.warm()
            else:
                forward()

    def settle(self) -> None:
        """Runs the shapes that are not captured once more, the largest first: a capture on any
        worker gives back what they had left in the allocator's cache."""
        if self.device.type == "cuda":
            for shape in sorted(self._forwards, key=lambda s: -s[0] * s[1]):
                if not self._forwards[shape].captured:
                    self._fill_with_padding(shape)
                    self._forwards[shape]()

    def _fill_with_padding(self, shape: Shape) -> None:
        """Tokens of all kinds, as routing between experts depends on them; `row` keeps what it holds."""
        ids, places = self._inputs[shape]
        rows = int(self._target.embedding.shape[0])
        ids.copy_(torch.arange(len(ids), device=ids.device) % rows)
        places.fill_(self._trash)

    def run(self, samples: Sequence[Sample], pack: Pack) -> None:
        """Queues the forwards of `pack` on the current stream; `row` holds its features after them."""
        lengths = [len(samples[member].input_ids) for member in pack.members]
        begins = [0]
        for length in lengths:
            begins.append(begins[-1] + length)
        self.row[begins[-1] :].zero_()
        for batch in self._table.split(lengths):
            rows, length = batch.shape
            staged = self._staging.take()[: 2 * rows * length].view(2, rows, length)
            host = staged.numpy()
            host[0] = 0
            host[1] = self._trash
            for place, index in enumerate(batch.members):
                tokens = lengths[index]
                host[0, place, :tokens] = samples[pack.members[index]].input_ids
                host[1, place, :tokens] = np.arange(begins[index], begins[index + 1])
            self._staging.send(staged.view(2, -1), self._inputs[batch.shape])
            self._forwards[batch.shape]()

    @torch.no_grad()
    def _forward(self, inputs: Tensor, shape: Shape) -> None:
        """One forward of what `inputs [2, rows * length]` holds, into the rows it names."""
        ids, places = inputs[0].view(shape), inputs[1]
        taps, last = self._target.features(ids, last_hidden=self._last_hidden)
        self._buffer[:, : self.taps_width].index_copy_(0, places, taps.flatten(0, 1))
        if last is not None:
            self._buffer[:, self.taps_width :].index_copy_(0, places, last.flatten(0, 1))

    def _decide(self, measure: Callable[[], Timing]) -> bool:
        if self.device.type != "cuda":
            captured, reason = False, f"there are no graphs on {self.device.type}"
        elif len(self._target.devices) > 1:
            captured, reason = False, f"the target spans {len(self._target.devices)} devices"
        elif self._capture == "never":
            captured, reason = False, "target.capture=never"
        else:
            captured, reason = decide(self._capture, measure())
            reason += f" on {self.device}"
        self._choices.record(
            "target forwards",
            wanted=self._capture,
            got="captured" if captured else "eager",
            reason=reason,
            fallback=self._capture == "always" and not captured,
        )
        return captured
