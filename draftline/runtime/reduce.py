"""The sum of the drafters' gradients inside one process, and the check that the drafters stay equal.

M drafter threads meet here once per step. Drafter 0's thread queues the whole sum, and all M leave with
bit-identical buffers: each element is summed in one place, in one order, and handed out.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.distributed import is_nccl_available

from draftline.choices import Choices
from draftline.errors import ConfigError, RunError
from draftline.runtime.nodes import Nodes

How = Literal["auto", "nccl", "ordered"]
Checksum = tuple[int, int]
# Device memory on the lead's device while drafters on other devices are added to it.
SCRATCH_BYTES = 64 * 2**20
# Elements of a checksum that exist as int64 at once: 32 MiB, three times.
_CHECKSUM_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def choose_reduction(
    how: How, devices: Sequence[torch.device], *, has_nccl: bool
) -> tuple[Literal["nccl", "ordered"], str]:
    """How drafters on `devices` are summed, and why. Raises ConfigError for what cannot be done."""
    names = ", ".join(str(device) for device in devices)
    if len({device.type for device in devices}) > 1:
        raise ConfigError(
            f"topology.drafters: gradients of drafters on {names} cannot be summed; put all of them "
            "on CUDA devices, or all on the cpu"
        )
    if len(devices) == 1:
        return "ordered", "one drafter has nothing to sum inside its machine"
    if how == "ordered":
        return "ordered", "asked for"
    obstacle = None
    if devices[0].type != "cuda" or len(set(devices)) < len(devices):
        obstacle = f"NCCL needs a CUDA device for each drafter, they lie on {names}"
    elif not has_nccl:
        obstacle = "this PyTorch was built without NCCL"
    if obstacle is None:
        return "nccl", "every drafter has a CUDA device of its own"
    if how == "nccl":
        raise ConfigError(
            f"topology.reduction=nccl: {obstacle}; use topology.reduction=auto, or change "
            "topology.drafters"
        )
    return "ordered", obstacle


class Reducer:
    """Sums one flat buffer per drafter; after `reduce` all of them hold the same bits.

    `buffers` are `[elements]`, contiguous, of one length and dtype, and the same memory at every
    step. With `nodes` the sum runs over all drafters of all machines. The first `reduce` makes
    NCCL's communicators, so one belongs into the warm-up. Raises ConfigError for a `how` that these
    devices do not allow.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        *,
        how: How,
        choices: Choices,
        nodes: Nodes | None,
        deadline_s: float,
    ) -> None:
        self._buffers = list(buffers)
        lead = self._buffers[0]
        assert all(b.ndim == 1 and b.is_contiguous() for b in buffers), "buffers are flat"
        assert len({(b.numel(), b.dtype) for b in buffers}) == 1, "of one length and dtype"
        devices = [buffer.device for buffer in buffers]
        self.how, reason = choose_reduction(how, devices, has_nccl=is_nccl_available())
        choices.record("topology.reduction", wanted=how, got=self.how, reason=reason)
        self._nodes = nodes
        self._nothing_to_share = len(self._buffers) == 1 and nodes is None
        self._deadline_s = deadline_s
        self._scratch: Tensor | None = None
        if self.how == "ordered" and len(set(devices)) > 1:
            elements = min(lead.numel(), SCRATCH_BYTES // lead.element_size())
            self._scratch = torch.empty(elements, dtype=lead.dtype, device=lead.device)
        # CUDA only; each thread fills its own place before it arrives.
        self._streams: list[torch.cuda.Stream] = [None] * len(buffers)  # type: ignore[list-item]
        self._ready = [torch.cuda.Event() for b in buffers if b.is_cuda]  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event() if lead.is_cuda else None  # type: ignore[no-untyped-call]
        self._sums: list[Checksum] = [(0, 0)] * len(buffers)
        # Twice, so that whoever watches the workers, and sees which one is stuck, speaks first; and
        # once more, because drafter 0 may itself wait a deadline for another machine.
        self._arrive = threading.Barrier(len(buffers), timeout=2 * deadline_s)
        self._leave = threading.Barrier(len(buffers), timeout=3 * deadline_s)
        self._lock = threading.Lock()
        self._arrived: dict[int, str] = {}
        self._stopped = False

    def reduce(self, rank: int) -> None:
        """Sums the buffers; called by every drafter's thread, `rank` being the drafter.

        On CUDA it returns when the sum is queued on the thread's current stream, without waiting
        for the device; on a CPU the sum is there. Raises RunError when a drafter does not come
        within the deadline, in one thread; the others, and everybody after `abort`, get
        threading.BrokenBarrierError.
        """
        if self._nothing_to_share:
            return
        buffer = self._buffers[rank]
        if buffer.is_cuda:
            self._streams[rank] = torch.cuda.current_stream(buffer.device)
            self._ready[rank].record(self._streams[rank])
        # Nobody leaves before drafter 0 has queued all reads and writes of every buffer, ordered before
        # what each thread queues on its own stream afterwards (NCCL runs on that stream, the ordered
        # sum is waited for below): none reads too early or overwrites what is still to be read.
        self._together(rank, "the gradient sum", self._sum)
        if self._done is not None and self.how == "ordered" and rank != 0:
            self._streams[rank].wait_event(self._done)

    def check_replicas(self, rank: int, flat_parameters: Tensor, step: int) -> None:
        """Returns when the parameters `[elements]` of all drafters, on all machines, are the same bits.

        Called by every drafter's thread, and waits for the device. Raises RunError in drafter 0's
        thread, on every machine, naming the drafters that differ and their checksums.
        """
        if self._nothing_to_share:
            return
        self._sums[rank] = checksum(flat_parameters)
        self._together(rank, f"the comparison at step {step}", lambda: self._compare(step))

    def abort(self) -> None:
        """Wakes every thread that waits here, now and later, with threading.BrokenBarrierError.

        A thread inside a collective between machines ends when that fails or meets its deadline.
        """
        with self._lock:
            self._stopped = True
        self._arrive.abort()
        self._leave.abort()

    def _together(self, rank: int, what: str, work: Callable[[], None]) -> None:
        """Runs `work` in drafter 0's thread once everybody is here; everybody leaves after it."""
        with self._lock:
            self._arrived[rank] = what
        self._wait(self._arrive, what)
        if rank == 0:
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.abort)
                arrived, self._arrived = self._arrived, {}
                if len(set(arrived.values())) > 1:
                    raise RunError(
                        f"the drafters do not run the same steps, they met for {arrived}"
                    )
                work()
                on_error.pop_all()
        self._wait(self._leave, what)

    def _wait(self, barrier: threading.Barrier, what: str) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            with self._lock:
                first, self._stopped = not self._stopped, True
                message = self._who_is_missing(what)
            self.abort()
            if first:
                raise RunError(message) from None
            raise threading.BrokenBarrierError("the drafters' meeting was called off") from None

    def _who_is_missing(self, what: str) -> str:
        if not self._arrived:
            return (
                f"drafter 0 did not finish {what} within {3 * self._deadline_s:g} s; another machine "
                "may have stopped: read its log"
            )
        names = {rank: f"drafter {rank} ({b.device})" for rank, b in enumerate(self._buffers)}
        here = [name for rank, name in names.items() if rank in self._arrived]
        missing = [name for rank, name in names.items() if rank not in self._arrived]
        return (
            f"{', '.join(here)} waited {2 * self._deadline_s:g} s for {what}; missing: "
            f"{', '.join(missing) or 'none, the last one came too late'}. It is stuck or its steps take "
            "longer than that; read its last events, or raise topology.deadline_s"
        )

    def _sum(self) -> None:
        if self.how == "ordered":
            self._sum_in_order()
        elif self._nodes is None:
            # One call, from one thread, for all: one per thread would wait for the others' forever.
            nccl.all_reduce(self._buffers, streams=self._streams)  # type: ignore[no-untyped-call]
        else:
            nccl.reduce(self._buffers, root=0, streams=self._streams)
            self._nodes.all_reduce(self._buffers[0])
            nccl.broadcast(self._buffers, root=0, streams=self._streams)

    def _sum_in_order(self) -> None:
        """((g0 + g1) + g2) ... in buffer 0, then copied to all; queued on drafter 0's stream."""
        lead, others = self._buffers[0], list(enumerate(self._buffers))[1:]
        for rank, other in others:
            if other.is_cuda:
                self._streams[0].wait_event(self._ready[rank])
            with self._stream_of(rank):
                if other.device == lead.device:
                    lead.add_(other)
                else:
                    assert self._scratch is not None
                    add_in_pieces(lead, other, self._scratch)
        if self._nodes is not None:
            self._nodes.all_reduce(lead)
        for rank, other in others:
            with self._stream_of(rank):
                other.copy_(lead, non_blocking=True)
        if self._done is not None:
            self._done.record(self._streams[0])

    def _stream_of(self, rank: int) -> contextlib.AbstractContextManager[object]:
        """Current on a device other than the lead's: the stream its drafter computes on.

        A copy between devices runs on the source's current stream and is ordered with the
        destination's; this thread's own current stream there would be the default one.
        """
        if self._buffers[rank].device == self._buffers[0].device:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._streams[rank])

    def _compare(self, step: int) -> None:
        machines = [self._sums] if self._nodes is None else self._nodes.gather(self._sums)
        difference = describe_difference(machines)
        if difference is not None:
            raise RunError(
                f"step {step}: the drafters' parameters are no longer the same: {difference}. Faulty "
                "memory or link, or an update that differs between drafters; resume from the last "
                "checkpoint, and if it comes again leave out that device"
            )


def add_in_pieces(total: Tensor, other: Tensor, scratch: Tensor) -> None:
    """Adds `other` `[elements]`, on any device, to `total`, through `scratch` on `total`'s device."""
    for start in range(0, total.numel(), scratch.numel()):
        piece = other[start : start + scratch.numel()]
        landed = scratch[: piece.numel()]
        landed.copy_(piece, non_blocking=True)
        total[start : start + piece.numel()].add_(landed)


def checksum(flat: Tensor) -> Checksum:
    """Sum, and sum weighted by position, of the bit patterns of `flat` `[elements]`, modulo 2^64.

    Integers, so the same bits give the same pair on every device. Waits for the device and uses up
    to 96 MiB on it for the moment.
    """
    bits = flat.detach().view(_BITS[flat.element_size()])
    weights = torch.arange(1, min(len(bits), _CHECKSUM_ELEMENTS) + 1, device=flat.device)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), _CHECKSUM_ELEMENTS):
        part = bits[start : start + _CHECKSUM_ELEMENTS].long()
        plain = part.sum()
        # int64 wraps around, which keeps the order of additions without effect.
        sums += torch.stack((plain, (part * weights[: len(part)]).sum() + start * plain))
    plain_sum, weighted_sum = sums.tolist()
    return plain_sum, weighted_sum


def describe_difference(machines: Sequence[Sequence[Checksum]]) -> str | None:
    """Which drafters differ from what most hold, with values, or None. One list per machine."""
    named = [
        (f"drafter {rank}" if len(machines) == 1 else f"drafter {rank} of machine {machine}", sums)
        for machine, drafters in enumerate(machines)
        for rank, sums in enumerate(drafters)
    ]
    usual, holders = Counter(sums for _, sums in named).most_common(1)[0]
    odd = [f"{name} has {sums}" for name, sums in named if sums != usual]
    return f"{'; '.join(odd)}; {holders} of {len(named)} have {usual}" if odd else None
