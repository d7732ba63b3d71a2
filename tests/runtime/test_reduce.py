"""The drafters' sum and their comparison, in threads on a CPU.

The order of arrival is set with events, so nothing here depends on how fast a thread is.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import ConfigError, RunError
from draftline.runtime import reduce as module
from draftline.runtime.nodes import Nodes
from draftline.runtime.reduce import (
    Reducer,
    add_in_pieces,
    checksum,
    choose_reduction,
    describe_difference,
)

CPU = torch.device("cpu")
GPUS = [torch.device("cuda", index) for index in range(4)]
LONG_S = 60.0


def make(buffers: list[Tensor], deadline_s: float = 10 * LONG_S, nodes: Any = None) -> Reducer:
    return Reducer(buffers, how="auto", choices=Choices(), nodes=nodes, deadline_s=deadline_s)


def in_threads(count: int, work: Callable[[int], object]) -> dict[int, BaseException]:
    """Runs `work(rank)` in `count` threads; the error of each rank that raised one."""
    errors: dict[int, BaseException] = {}

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), "a drafter hangs"
    return errors


def until_waiting(barrier: threading.Barrier, count: int) -> None:
    end = time.monotonic() + LONG_S
    while barrier.n_waiting < count:
        assert time.monotonic() < end, "nobody comes"
        time.sleep(0.001)


def sequential_sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class OtherMachine:
    """Stands for the machines beside this one: adds what they would."""

    def __init__(self, addend: Tensor, sums: list[list[tuple[int, int]]] | None = None) -> None:
        self.addend, self.sums = addend, sums or []
        self.calls: list[str] = []

    def all_reduce(self, tensor: Tensor) -> None:
        self.calls.append(threading.current_thread().name)
        tensor.add_(self.addend)

    def gather(self, value: object) -> list[object]:
        return [value, *self.sums]


# Which way to sum


@pytest.mark.parametrize(
    ("how", "devices", "has_nccl", "got"),
    [
        ("auto", GPUS[:2], True, "nccl"),
        ("nccl", GPUS, True, "nccl"),
        ("ordered", GPUS, True, "ordered"),
        ("auto", GPUS[:2], False, "ordered"),
        ("auto", [GPUS[0], GPUS[1], GPUS[0]], True, "ordered"),
        ("auto", [CPU, CPU], True, "ordered"),
        ("auto", [GPUS[0]], True, "ordered"),
        ("nccl", [GPUS[0]], True, "ordered"),
    ],
)
def test_nccl_is_taken_where_every_drafter_has_a_gpu(
    how: Any, devices: list[torch.device], has_nccl: bool, got: str
) -> None:
    assert choose_reduction(how, devices, has_nccl=has_nccl)[0] == got


@pytest.mark.parametrize(
    ("how", "devices", "has_nccl", "message"),
    [
        (
            "nccl",
            [GPUS[1], GPUS[1]],
            True,
            "a CUDA device for each drafter, they lie on cuda:1, cuda:1",
        ),
        ("nccl", [CPU, CPU], True, "they lie on cpu, cpu"),
        ("nccl", GPUS[:2], False, "without NCCL"),
        ("auto", [CPU, GPUS[0]], True, "drafters on cpu, cuda:0 cannot be summed"),
    ],
)
def test_what_cannot_be_summed_that_way_is_the_callers_fault(
    how: Any, devices: list[torch.device], has_nccl: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_reduction(how, devices, has_nccl=has_nccl)


def test_the_choice_is_recorded_with_its_reason() -> None:
    choices = Choices(strict=True)
    Reducer([torch.ones(1)] * 2, how="auto", choices=choices, nodes=None, deadline_s=1)
    [entry] = choices.entries
    assert (entry.what, entry.wanted, entry.got) == ("topology.reduction", "auto", "ordered")
    assert "cpu, cpu" in entry.reason


def test_nccl_for_drafters_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology\.reduction=nccl"):
        Reducer([torch.ones(1)] * 2, how="nccl", choices=Choices(), nodes=None, deadline_s=1)


# The sum


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_drafters_end_with_the_sum_in_their_order(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    parts = [torch.randn(1001).mul(10.0**rank).to(dtype) for rank in range(count)]
    buffers = [part.clone() for part in parts]
    reducer = make(buffers)
    assert in_threads(count, reducer.reduce) == {}
    for buffer in buffers:
        assert torch.equal(buffer, sequential_sum(parts))


def test_the_order_matters_for_these_numbers() -> None:
    """The twin of the test above: another order would have been seen."""
    parts = [torch.randn(1001).mul(10.0**rank) for rank in range(3)]
    assert not torch.equal(sequential_sum(parts), sequential_sum(parts[::-1]))


def test_fifty_steps_with_the_drafters_arriving_in_any_order() -> None:
    count, steps = 3, 50
    chance = random.Random(0)
    torch.manual_seed(0)
    parts = torch.randn(steps, count, 257)
    buffers = [torch.zeros(257) for _ in range(count)]
    reducer = make(buffers)
    # Each step's drafters start one after the other, in an order drawn for the step.
    orders = [chance.sample(range(count), count) for _ in range(steps)]
    gates = [[threading.Event() for _ in range(count)] for _ in range(steps)]
    seen: list[list[Tensor]] = [[] for _ in range(count)]

    def drafter(rank: int) -> None:
        for step in range(steps):
            place = orders[step].index(rank)
            if place:
                assert gates[step][place - 1].wait(LONG_S)
            buffers[rank].copy_(parts[step, rank])
            gates[step][place].set()
            reducer.reduce(rank)
            seen[rank].append(buffers[rank].clone())

    assert in_threads(count, drafter) == {}
    for step in range(steps):
        expected = sequential_sum(list(parts[step]))
        assert all(torch.equal(seen[rank][step], expected) for rank in range(count)), step


def test_one_drafter_alone_keeps_its_buffer_and_waits_for_nobody() -> None:
    buffer = torch.arange(5.0)
    reducer = make([buffer])
    reducer.abort()  # a meeting would raise now
    reducer.reduce(0)
    reducer.check_replicas(0, buffer, 1)
    assert torch.equal(buffer, torch.arange(5.0))


def test_pieces_through_a_scratch_are_the_plain_sum() -> None:
    torch.manual_seed(0)
    total, other = torch.randn(1000), torch.randn(1000)
    for size in (1, 7, 1000, 4096):
        got = total.clone()
        add_in_pieces(got, other, torch.full((size,), torch.nan))
        assert torch.equal(got, total + other), size


@pytest.mark.parametrize("count", [1, 3])
def test_the_other_machines_are_added_before_the_sum_is_handed_back(count: int) -> None:
    parts = [torch.randn(64) for _ in range(count)]
    other = OtherMachine(torch.randn(64))
    buffers = [part.clone() for part in parts]
    reducer = make(buffers, nodes=other)
    assert in_threads(count, reducer.reduce) == {}
    assert len(other.calls) == 1
    assert all(torch.equal(b, sequential_sum(parts) + other.addend) for b in buffers)


@pytest.mark.parametrize("machines", [1, 2])
def test_nccl_gets_all_buffers_and_streams_in_one_call(
    machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def spy(name: str) -> Callable[..., None]:
        def call(buffers: list[Tensor], *, streams: list[Any], root: int | None = None) -> None:
            calls.append(name)
            assert (root, streams) == (None if name == "all_reduce" else 0, ["s0", "s1", "s2"])
            if name != "broadcast":
                buffers[0].copy_(sequential_sum(buffers))
            if name != "reduce":
                for buffer in buffers[1:]:
                    buffer.copy_(buffers[0])

        return call

    for name in ("all_reduce", "reduce", "broadcast"):
        monkeypatch.setattr(module.nccl, name, spy(name))
    buffers = [torch.full((4,), 10.0**rank) for rank in range(3)]
    other = OtherMachine(torch.full((4,), 0.5))
    reducer = make(buffers, nodes=other if machines == 2 else None)
    reducer.how = "nccl"
    reducer._streams = cast(Any, ["s0", "s1", "s2"])
    assert in_threads(3, reducer.reduce) == {}
    assert calls == (["all_reduce"] if machines == 1 else ["reduce", "broadcast"])
    assert [b.tolist() for b in buffers] == [[111.0 if machines == 1 else 111.5] * 4] * 3


# What is queued on which stream


class FakeGpu:
    """Stands for streams, events and buffers of GPUs; `log` is what was queued, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        # As in a drafter's thread: its own stream on its device, the default one elsewhere.
        self.current = {GPUS[0]: "s0"}

    def stream_of(self, device: torch.device) -> str:
        return self.current.get(device, f"default of {device}")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = dict(self.current)
        self.current[stream.device] = stream.name
        yield
        self.current = before


class FakeStream:
    def __init__(self, gpu: FakeGpu, name: str, device: torch.device) -> None:
        self.gpu, self.name, self.device = gpu, name, device

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.log.append(f"{self.name}: wait {event.name}")


class FakeEvent:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record(self, stream: FakeStream) -> None:
        self.gpu.log.append(f"{stream.name}: record {self.name}")


class FakeBuffer:
    is_cuda = True

    def __init__(self, gpu: FakeGpu, name: str, device: torch.device, elements: int = 4) -> None:
        self.gpu, self.name, self.device, self.elements = gpu, name, device, elements

    def numel(self) -> int:
        return self.elements

    def __getitem__(self, part: slice) -> FakeBuffer:
        start, stop, _ = part.indices(self.elements)
        return FakeBuffer(self.gpu, f"{self.name}[{start}:{stop}]", self.device, stop - start)

    def add_(self, other: FakeBuffer) -> None:
        assert self.device == other.device
        self.gpu.log.append(f"{self.gpu.stream_of(self.device)}: {self.name} += {other.name}")

    def copy_(self, other: FakeBuffer, *, non_blocking: bool) -> None:
        assert non_blocking
        streams = {self.gpu.stream_of(d) for d in (other.device, self.device)}
        self.gpu.log.append(f"{'+'.join(sorted(streams))}: {self.name} = {other.name}")


def test_the_ordered_sum_runs_on_the_drafters_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters 0 and 1 share a GPU, drafter 2 has another; the scratch holds 3 of 4 elements."""
    gpu = FakeGpu()
    devices = [GPUS[0], GPUS[0], GPUS[1]]
    streams = [FakeStream(gpu, f"s{rank}", device) for rank, device in enumerate(devices)]
    reducer = cast(Any, make([torch.ones(4)] * 3))
    reducer._buffers = [FakeBuffer(gpu, f"g{rank}", d) for rank, d in enumerate(devices)]
    reducer._scratch = FakeBuffer(gpu, "scratch", GPUS[0], 3)
    reducer._ready = [FakeEvent(gpu, f"ready{rank}") for rank in range(3)]
    reducer._done = FakeEvent(gpu, "done")
    of_thread: dict[int, FakeStream] = {}
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: of_thread[threading.get_ident()]
    )

    def drafter(rank: int) -> None:
        of_thread[threading.get_ident()] = streams[rank]
        until_waiting(reducer._arrive, rank)  # they come one after the other
        reducer.reduce(rank)

    assert in_threads(3, drafter) == {}
    assert gpu.log[:-2] == [
        "s0: record ready0",
        "s1: record ready1",
        "s2: record ready2",
        "s0: wait ready1",
        "s0: g0 += g1",
        "s0: wait ready2",
        "s0+s2: scratch[0:3] = g2[0:3]",
        "s0: g0[0:3] += scratch[0:3]",
        "s0+s2: scratch[0:1] = g2[3:4]",
        "s0: g0[3:4] += scratch[0:1]",
        "s0: g1 = g0",
        "s0+s2: g2 = g0",
        "s0: record done",
    ]
    assert sorted(gpu.log[-2:]) == ["s1: wait done", "s2: wait done"]


# Who does not come


def test_after_the_deadline_the_missing_drafter_is_named() -> None:
    reducer = make([torch.ones(2)] * 2, deadline_s=0.05)
    with pytest.raises(
        RunError,
        match=r"drafter 0 \(cpu\) waited 0\.1 s for the gradient sum; missing: drafter 1 \(cpu\)\.",
    ):
        reducer.reduce(0)
    with pytest.raises(threading.BrokenBarrierError):
        reducer.reduce(1)  # too late


def test_of_several_that_waited_one_reports_and_nobody_stays() -> None:
    reducer = make([torch.ones(2)] * 4)

    def work(rank: int) -> None:
        if rank == 1:
            until_waiting(reducer._arrive, 3)
            reducer._arrive.abort()  # as the first waiter does whose time is up
        else:
            reducer.reduce(rank)

    errors = in_threads(4, work)
    assert sorted(errors) == [0, 2, 3]
    [fault] = [e for e in errors.values() if isinstance(e, RunError)]
    assert "drafter 0 (cpu), drafter 2 (cpu), drafter 3 (cpu) waited" in str(fault)
    assert "missing: drafter 1 (cpu)." in str(fault)
    rest = [e for e in errors.values() if e is not fault]
    assert all(isinstance(e, threading.BrokenBarrierError) for e in rest)


def test_abort_wakes_everybody_now_and_later() -> None:
    reducer = make([torch.ones(2)] * 3)

    def work(rank: int) -> None:
        if rank == 2:
            until_waiting(reducer._arrive, 2)
            reducer.abort()
        else:
            reducer.reduce(rank)

    errors = in_threads(3, work)
    assert sorted(errors) == [0, 1]
    assert all(isinstance(e, threading.BrokenBarrierError) for e in errors.values())
    with pytest.raises(threading.BrokenBarrierError):
        reducer.reduce(2)


def test_a_failing_sum_is_raised_once_and_wakes_the_others() -> None:
    class Broken(OtherMachine):
        def all_reduce(self, tensor: Tensor) -> None:
            raise RunError("machine 0 of 2: the link is down")

    reducer = make([torch.ones(2)] * 3, nodes=Broken(torch.zeros(2)))
    errors = in_threads(3, reducer.reduce)
    assert isinstance(errors.pop(0), RunError)
    assert sorted(errors) == [1, 2]
    assert all(isinstance(e, threading.BrokenBarrierError) for e in errors.values())


def test_abort_does_not_wait_for_a_sum_that_hangs() -> None:
    summing, go_on = threading.Event(), threading.Event()

    class Hangs(OtherMachine):
        def all_reduce(self, tensor: Tensor) -> None:
            summing.set()
            assert go_on.wait(LONG_S)

    reducer = make([torch.ones(2)] * 2, nodes=Hangs(torch.zeros(2)))

    def work(rank: int) -> None:
        try:
            reducer.reduce(rank)
        finally:
            if rank == 1:
                go_on.set()  # only once this thread is free

    def stop() -> None:
        assert summing.wait(LONG_S)
        reducer.abort()

    errors = in_threads(3, lambda rank: work(rank) if rank < 2 else stop())
    assert sorted(errors) == [0, 1]
    assert all(isinstance(e, threading.BrokenBarrierError) for e in errors.values())


def test_a_sum_that_does_not_end_is_named() -> None:
    go_on = threading.Event()

    class Hangs(OtherMachine):
        def all_reduce(self, tensor: Tensor) -> None:
            assert go_on.wait(LONG_S)

    reducer = make([torch.ones(2)] * 2, deadline_s=30, nodes=Hangs(torch.zeros(2)))
    reducer._leave = threading.Barrier(2, timeout=0.05)

    def work(rank: int) -> None:
        try:
            reducer.reduce(rank)
        finally:
            go_on.set()

    errors = in_threads(2, work)
    assert isinstance(errors[1], RunError)
    assert "drafter 0 did not finish the gradient sum within 90 s" in str(errors[1])
    assert isinstance(errors[0], threading.BrokenBarrierError)


def test_drafters_at_different_steps_are_an_error() -> None:
    reducer = make([torch.ones(2)] * 2)
    errors = in_threads(2, lambda rank: reducer.check_replicas(rank, torch.ones(2), 100 + rank))
    assert isinstance(errors[0], RunError)
    assert "step 100" in str(errors[0])
    assert "step 101" in str(errors[0])
    assert isinstance(errors[1], threading.BrokenBarrierError)


# Do the drafters stay equal


def compared(parameters: list[Tensor], nodes: Any = None) -> dict[int, BaseException]:
    reducer = make([torch.ones(1)] * len(parameters), nodes=nodes)
    return in_threads(
        len(parameters), lambda rank: reducer.check_replicas(rank, parameters[rank], 300)
    )


def test_equal_parameters_pass_again_and_again() -> None:
    parameters = torch.randn(999)
    reducer = make([torch.ones(1)] * 3)

    def work(rank: int) -> None:
        for step in range(5):
            reducer.reduce(rank)
            reducer.check_replicas(rank, parameters.clone(), step)

    assert in_threads(3, work) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_names_step_drafter_and_values(dtype: torch.dtype) -> None:
    parameters = [torch.arange(50.0).to(dtype) for _ in range(3)]
    bits = parameters[1].view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[17] ^= 1
    errors = compared(parameters)
    fault = errors.pop(0)
    assert isinstance(fault, RunError)
    assert all(isinstance(e, threading.BrokenBarrierError) for e in errors.values())
    assert "step 300: the drafters' parameters are no longer the same: drafter 1 has " in str(fault)
    assert str(checksum(parameters[1])) in str(fault)
    assert f"2 of 3 have {checksum(parameters[0])}" in str(fault)


def test_another_machines_drafter_is_named_with_its_machine() -> None:
    parameters = torch.arange(50.0)
    same = checksum(parameters)
    assert compared([parameters] * 2, OtherMachine(parameters, [[same]])) == {}
    errors = compared([parameters] * 2, OtherMachine(parameters, [[same, (1, 2)], [same]]))
    assert "drafter 1 of machine 1 has (1, 2); 4 of 5 have" in str(errors[0])


def test_the_odd_ones_are_those_that_differ_from_most() -> None:
    assert describe_difference([[(1, 1)] * 3]) is None
    assert describe_difference([[(9, 9), (1, 1), (1, 1)]]) == (
        "drafter 0 has (9, 9); 2 of 3 have (1, 1)"
    )
    assert describe_difference([[(1, 1), (2, 2)]]) == "drafter 1 has (2, 2); 1 of 2 have (1, 1)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_flipped_bit_and_every_swap_changes_the_checksum(dtype: torch.dtype) -> None:
    flat = torch.arange(1, 41).to(dtype)
    bits = flat.view(module._BITS[flat.element_size()])
    whole = checksum(flat)
    width = 8 * flat.element_size()
    for place in (0, 1, 39):
        for bit in range(width):
            mask = torch.tensor(1, dtype=torch.int64) << bit
            before = bits[place].clone()
            bits[place] = (before.long() ^ mask).to(bits.dtype)
            assert checksum(flat) != whole, (place, bit)
            bits[place] = before
    assert checksum(flat) == whole
    flat[[3, 30]] = flat[[30, 3]]
    assert checksum(flat) != whole


def test_the_checksum_does_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    flat = torch.randn(1000)
    bits = flat.view(torch.int32).tolist()
    expected = [sum(bits), sum(place * b for place, b in enumerate(bits, 1))]
    wrapped = tuple((value + 2**63) % 2**64 - 2**63 for value in expected)
    assert checksum(flat) == wrapped
    for size in (1, 7, 999):
        monkeypatch.setattr(module, "_CHECKSUM_ELEMENTS", size)
        assert checksum(flat) == wrapped, size


def test_the_checksum_wraps_around() -> None:
    flat = torch.full((5,), -(2**63) + 1).view(torch.float64)
    expected = [(k * (-(2**63) + 1) + 2**63) % 2**64 - 2**63 for k in (5, 15)]
    assert checksum(flat) == tuple(expected)


def test_negative_zero_and_nan_payloads_are_seen() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([torch.nan])) == checksum(torch.tensor([torch.nan]))


def test_nodes_offers_what_a_reducer_asks_of_it() -> None:
    for name in ("all_reduce", "gather"):
        assert callable(getattr(Nodes, name))
