"""Programs whose fault is one of memory: each does it for real and proves it by its counters.

The third recording of a program has no phase marks, as a foreign program's has none. A capture
empties the allocator's cache by itself, so capturing again and again (`recapture`) is a
`cache_flush`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from fault_compiling import CAPTURED, COMPILED, variant
from fault_session import MIB, Bound, Program, Session
from fault_training import Training
from torch import Tensor, nn

FLUSHED = (Bound("device_frees", least=3), Bound("device_allocations", least=3))


def recapture(session: Session) -> None:
    training, every = Training(session), session.values["every"]
    session.warm(training.step)
    plays: list[Callable[[], None]] = []

    def body(number: int) -> None:
        if number % every == 0:
            plays.clear()
            plays.append(session.capture(training.replayable))
        training.feed(number)
        plays[0]()

    session.run(body)


def allocator_retries(session: Session) -> None:
    """Varying lengths in barely enough memory: the limit sinks until the allocator has to flush."""
    full, multiple = session.size.length, session.values["multiple"]
    training = Training(session, compiled=False, flex=False)
    limit = Limit(session)

    def body(number: int) -> None:
        length = session.random.randrange(full // 2, full + 1, multiple)
        ended = False
        try:
            training.step_of(number, length)
        except torch.OutOfMemoryError:
            ended = True
        if ended:  # outside the handler: the traceback holds the step's tensors
            training.optimizer.zero_grad(set_to_none=True)
            limit.scale(1.05)

    session.warm(training.step, 3)
    limit.set(1.5)
    for number in range(60):
        retries = session.readings().get("retries", 0)
        session.warm(body, 2)
        if session.readings().get("retries", 0) - retries >= 1:
            break
        limit.scale(0.97 if number < 12 else 0.985)
    session.run(body)


class Limit:
    """The share of the device that this process may use, around what its largest step needed."""

    def __init__(self, session: Session) -> None:
        self.session, self.bytes = session, 0.0
        self.ballast: Tensor | None = None

    def set(self, factor: float) -> None:
        if not self.session.cuda:
            return
        device = self.session.device
        self.bytes = factor * torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        if self.session.values["ballast"]:  # so that the device itself is nearly full
            free, _ = torch.cuda.mem_get_info(device)
            spare = self.bytes - torch.cuda.memory_reserved(device) + 256 * MIB
            ballast = max(int(free - spare), MIB)
            self.ballast = torch.empty(ballast, dtype=torch.uint8, device=device)
            self.bytes += ballast
        self.scale(1.0)

    def scale(self, factor: float) -> None:
        if self.session.cuda:
            held = 0 if self.ballast is None else self.ballast.numel()
            self.bytes = held + (self.bytes - held) * factor
            _, total = torch.cuda.mem_get_info(self.session.device)
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, self.bytes / total), self.session.device
            )


def cache_flush(session: Session) -> None:
    compiled, every = session.values["compiled"], session.values["every"]
    training = Training(session, compiled=compiled, flex=compiled)

    def body(number: int) -> None:
        training.step(number)
        if number % every == 0 and session.cuda:
            torch.cuda.empty_cache()

    session.warm(training.step)
    session.run(body)


def leak(session: Session) -> None:
    """Keeps a tensor, or a loss together with the graph behind it, of `mib` at each step."""
    how, mib = session.values["how"], session.values["mib"]
    training = Training(session, compiled=how != "eager", flex=how != "eager")
    amount = mib * MIB // 4 if session.cuda else mib
    weight = nn.Parameter(torch.randn(amount, device=session.device))
    kept: list[Tensor] = []
    step = training.captured() if how == "captured" else training.step

    def body(number: int) -> None:
        step(number)
        kept.append((weight * 0.01).exp().sum() if how == "captured" else weight.detach() * number)

    if how != "captured":
        session.warm(step)
    session.run(body)


def fragmentation(session: Session) -> None:
    """Long-lived blocks are replaced by slightly larger ones, which fit no hole that is left and
    split the blocks that the step's temporaries came from."""
    mib, count = session.values["mib"], session.values["blocks"]
    training = Training(session)
    amount = mib * MIB if session.cuda else 64 * mib

    def block(more: int) -> Tensor:
        return torch.empty(amount + 4096 * more, dtype=torch.uint8, device=session.device)

    packed = [block(0) for _ in range(2 * count * (session.max_steps + 1))]
    staying, leaving = packed[::2], packed[1::2]
    del packed
    session.warm(training.step)

    def body(number: int) -> None:
        training.step(number)
        for _ in range(count):
            staying.append(block(number + 1))
            leaving.pop()

    session.run(body)


def unbounded_shapes(session: Session) -> None:
    compiled = session.values["compiled"]
    training = Training(session, compiled=compiled, flex=False, dynamic=True)
    # A compiled model may be compiled for small inputs and again for larger ones (Inductor's scheduler
    # has such a guard, at 5,242,880 elements in torch 2.11): it warms beyond that.
    low, grow = session.size.length // (2 if compiled else 8), session.values["grow"]
    # Below the full length, at which a compiled model would be another one.
    full = session.size.length * 7 // 8

    def body(number: int) -> None:
        high = min(full, low + int(grow * number) + 16)
        length = session.random.randrange(low, high + 1) // 16 * 16
        training.step_of(number, max(length, 16 if session.cuda else 4))

    session.warm(body)
    session.run(body)


def other_process(session: Session) -> None:
    training = Training(session)
    session.warm(training.step)

    def body(number: int) -> None:
        training.step(number)
        session.watch_foreign(number)

    with session.neighbour():
        session.run(body)


MEMORY = (
    Program(
        "recapture",
        "cache_flush",
        recapture,
        (Bound("captures", least=3), *FLUSHED),
        (variant(CAPTURED, every=40), variant(CAPTURED, every=15), variant((), False, every=25)),
    ),
    Program(
        "allocator_retries",
        "allocator_retries",
        allocator_retries,
        (Bound("retries", least=1),),
        (
            variant(multiple=8, ballast=False),
            variant(multiple=16, ballast=True),
            variant((), False, multiple=64, ballast=False),
        ),
    ),
    Program(
        "cache_flush",
        "cache_flush",
        cache_flush,
        FLUSHED,
        (
            variant(COMPILED, compiled=True, every=1),
            variant((), compiled=False, every=20),
            variant((), False, compiled=True, every=5),
        ),
    ),
    Program(
        "leak",
        "leak",
        leak,
        # A small leak fills what the allocator already holds: the device shows nothing for a while.
        (Bound("allocated_mib", least=100),),
        (
            variant(COMPILED, how="compiled", mib=20),
            variant(CAPTURED, how="captured", mib=90),
            variant((), False, how="eager", mib=2),
        ),
    ),
    Program(
        "fragmentation",
        "fragmentation",
        fragmentation,
        (
            Bound("reserved_mib", least=100),
            Bound("inactive_mib", least=500),
            Bound("allocated_mib", least=-40, most=400),
        ),
        (
            variant(COMPILED, mib=3, blocks=3),
            variant(COMPILED, mib=6, blocks=2),
            variant((), False, mib=9, blocks=1),
        ),
    ),
    Program(
        "unbounded_shapes",
        "unbounded_shapes",
        unbounded_shapes,
        (Bound("reserved_mib", least=150), Bound("graphs", most=0)),
        (
            variant(compiled=False, grow=4),
            variant(COMPILED, compiled=True, grow=6),
            variant((), False, compiled=False, grow=12),
        ),
    ),
    Program(
        "other_process",
        "other_process",
        other_process,
        (Bound("foreign_mib_total", least=256), Bound("reserved_mib", least=0, most=0)),
        (
            variant(COMPILED, pattern="stairs", mib=1500, period_s=0.4),
            variant(COMPILED, pattern="ramp", mib=200, period_s=0.2),
            variant((), False, pattern="saw", mib=600, period_s=0.3),
        ),
    ),
)
