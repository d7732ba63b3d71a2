"""How fast one drafter's whole step is at a configuration's shapes, and whether it is flat.

Weights, features and tokens are random; the target directory needs a config.json only. The step is
everything that a trainer does: anchors, mask, forward, loss, backward, clipping, AdamW on float32
masters, metrics. It is timed compiled and then captured, in one process.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import ConfigError, DeviceError
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.init import build_shape
from draftline.model.head import Head, TargetEnds
from draftline.model.target.facts import TargetFacts
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.devices import describe_device, on_device, pick_device, synchronize
from draftline.runtime.graphs import GraphPool
from draftline.runtime.memory import MemoryBaseline, MemoryChange
from draftline.train.assemble import step_spec
from draftline.train.plan.inputs import open_facts
from draftline.train.plan.work import step_flops
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep, compile_kernels

# Matrix work of an H200 in bfloat16, measured with 8192-cubed products of random numbers.
CEILING_TFLOPS = 790.0
_COMPILED_STEPS = _EARLY_STEPS = 10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of single steps, and what the allocator did meanwhile (CUDA only).

    `early_ms` is the median of the first ten, before a GPU at its power limit lowers its clock.
    """

    median_ms: float
    early_ms: float
    least_ms: float
    most_ms: float
    memory: MemoryChange | None
    peak_allocated_bytes: int


@dataclass(frozen=True, slots=True)
class StepBench:
    """`captured` is None on a CPU, where `compiled` is not compiled either. `floor_ms` is the step's
    matrix work at the ceiling, None there; `groups` milliseconds of one captured step by kernel
    group."""

    device: str
    rows: int
    context: int
    parameters: int
    warm_s: float
    floor_ms: float | None
    compiled: StepTimes
    captured: StepTimes | None
    steps: int
    groups: dict[str, float]
    kernels: list[tuple[float, int, str]]

    @property
    def rows_per_s(self) -> float:
        """The rate of the step as it trains: captured where there are graphs."""
        return 1000 * self.rows / (self.captured or self.compiled).median_ms

    def lines(self) -> list[str]:
        """An aligned table."""
        floor = ""
        if self.floor_ms is not None:
            floor = f"floor {self.floor_ms:.1f} ms at {CEILING_TFLOPS:g} TFLOP/s; "
        lines = [
            f"{self.device}: {self.rows} rows and {self.context} context tokens per step, "
            f"{self.parameters / 1e6:.0f} M parameters; {floor}warm-up {self.warm_s:.0f} s",
            f"{'':>10} {'step ms':>9} {'first 10':>8} {'most':>8} {'rows/s':>8} {'reserved GiB':>13} "
            f"{'changed MiB':>12} {'calls/step':>11}",
        ]
        modes = {
            ("compiled" if self.captured else "eager"): (self.compiled, _COMPILED_STEPS),
            "captured": (self.captured, self.steps),
        }
        for name, (times, steps) in modes.items():
            if times is None:
                continue
            memory = times.memory
            reserved = f"{memory.reserved_bytes / 2**30:.2f}" if memory else "?"
            changed = f"{memory.reserved_change_bytes / 2**20:.0f}" if memory else "?"
            calls = f"{memory.allocator_calls / steps:.0f}" if memory else "?"
            lines.append(
                f"{name:>10} {times.median_ms:9.1f} {times.early_ms:8.1f} {times.most_ms:8.1f} "
                f"{1000 * self.rows / times.median_ms:8.0f} {reserved:>13} {changed:>12} {calls:>11}"
            )
        if self.groups:
            parts = ", ".join(f"{name} {ms:.1f}" for name, ms in self.groups.items())
            lines.append(f"{'':>10} ms of one captured step: {parts}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_step(config: Config, *, steps: int, profile: bool) -> StepBench:
    """Times the step of `config` on `run.device`; raises the errors of a run that cannot start."""
    choices = Choices(strict=True)
    device = pick_device(config.run.device, choices)
    if profile and device.type != "cuda":
        raise ConfigError(f"--profile times the kernels of a GPU; this bench runs on {device}")
    facts = open_facts(config, device.type)
    # Events and graphs take the current device's stream, which is another one's unless it is said.
    with on_device(device), CompileGate(choices) as gate:
        began = time.perf_counter()
        step = _build(config, facts, device, gate)
        packs = [_random_pack(config, step, facts.vocab_size, seed) for seed in range(2)]

        def run(index: int) -> None:
            step.stage(packs[index % 2])
            step.gradients(index)
            step.update()

        gate.warm("step", device, step.compile)
        run(0)
        compiled_steps = _COMPILED_STEPS if device.type == "cuda" else steps
        compiled = _timed(run, compiled_steps, device)
        captured: StepTimes | None = None
        groups: dict[str, float] = {}
        kernels: list[tuple[float, int, str]] = []
        if device.type == "cuda":
            gate.warm("capture", device, step.capture, captures=True)
            warm_s = time.perf_counter() - began
            gate.seal()
            with _no_host_sync():
                captured = _timed(run, steps, device)
            if profile:
                groups, kernels = _profiled(run)
        else:
            warm_s = time.perf_counter() - began
        gate.check()
    shape = step.drafter.shape
    vocabulary = config.drafter.vocab_size or facts.vocab_size
    soft = config.loss.soft_labels > 0
    work = step_flops(shape, vocabulary, config.token_budget, config.anchors, soft=soft)
    return StepBench(
        device=describe_device(device),
        rows=config.anchors * config.block_size,
        context=config.token_budget,
        parameters=shape.num_parameters,
        warm_s=warm_s,
        floor_ms=work / CEILING_TFLOPS / 1e9 if device.type == "cuda" else None,
        compiled=compiled,
        captured=captured,
        steps=steps,
        groups=groups,
        kernels=kernels,
    )


def _build(
    config: Config, facts: TargetFacts, device: torch.device, gate: CompileGate
) -> TrainStep:
    torch.manual_seed(config.run.seed)
    shape = build_shape(config, facts, config.drafter.mask_token_id or 0)
    size = (facts.embedding_rows, facts.hidden_size)
    with torch.device(device):
        embedding = torch.empty(size, dtype=facts.dtype).normal_(std=0.02)
        head = embedding
        if facts.head_bytes:
            head = torch.empty(facts.vocab_size, size[1], dtype=facts.dtype).normal_(std=0.02)
        drafter = Drafter(shape)
    spec = step_spec(config, total_steps=1000, packs_per_step=1, machines=1)
    token_ids = None
    if config.drafter.vocab_size is not None:
        token_ids = torch.arange(config.drafter.vocab_size)
    kernels = compile_kernels(gate, TargetEnds(embedding, 1.0, Head(head)), token_ids, spec)
    width = (shape.num_taps + int(config.loss.soft_labels > 0)) * shape.hidden_size
    try:
        return TrainStep(
            drafter,
            kernels,
            spec,
            working_dtype=facts.dtype,
            width=width,
            pool=GraphPool(device),
        )
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"the drafter does not fit on {device}: {error}") from None


def _random_pack(config: Config, step: TrainStep, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    """Conversations of data.max_length tokens back to back, all of it supervised."""
    tokens, length = config.token_budget, config.data.max_length
    device = step.device
    generator = torch.Generator(device).manual_seed(seed)
    place = torch.arange(tokens, device=device)
    position = place % length
    shape = (tokens, step.width)
    return PackTensors(
        input_ids=torch.randint(0, vocab, (tokens,), device=device, generator=generator).int(),
        loss_mask=torch.ones(tokens, dtype=torch.bool, device=device),
        anchor_mask=(position < length - config.block_size) & (place < tokens - config.block_size),
        conversation=(place // length).int(),
        position=position.int(),
        start=(place - position).int(),
        features=torch.empty(shape, dtype=step.dtype, device=device).normal_(generator=generator),
    ).tensors()


def _timed(run: Callable[[int], None], steps: int, device: torch.device) -> StepTimes:
    memory, peak = None, 0
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = MemoryBaseline([device])
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for index in range(steps):
            run(index)
            marks[index + 1].record()
        memory = before.changes()[0]
        marks[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(marks)]
        peak = torch.cuda.max_memory_allocated(device)
    else:
        times = []
        for index in range(steps):
            began = time.perf_counter()
            run(index)
            times.append(1000 * (time.perf_counter() - began))
    return StepTimes(
        median_ms=statistics.median(times),
        early_ms=statistics.median(times[:_EARLY_STEPS]),
        least_ms=min(times),
        most_ms=max(times),
        memory=memory,
        peak_allocated_bytes=peak,
    )


@contextmanager
def _no_host_sync() -> Iterator[None]:
    """Any operation inside that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernel_group(name: str) -> str:
    """What a kernel of the step is for, by its name."""
    lower = name.lower()
    if "flex_attention" in lower:
        return "flex backward" if "backward" in lower else "flex forward"
    if any(part in lower for part in ("nvjet", "gemm", "cutlass", "xmma", "cublas")):
        return "matrix products"
    if "adam" in lower or ("lerp" in lower and "sqrt" in lower):
        return "optimizer"
    if "triton_red" in lower or "triton_per" in lower:
        return "fused reductions"
    if "triton" in lower:
        return "fused pointwise"
    return "copies" if "mem" in lower[:3] else "other"


def _profiled(
    run: Callable[[int], None],
) -> tuple[dict[str, float], list[tuple[float, int, str]]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run(0)
        torch.cuda.synchronize()
    groups: defaultdict[str, float] = defaultdict(float)
    kernels = []
    for event in recorded.key_averages():
        ms = event.device_time_total / 1000
        groups[kernel_group(event.key)] += ms
        kernels.append((round(ms, 3), event.count, event.key[:120]))
    ordered = sorted(groups.items(), key=lambda item: -item[1])
    return {name: round(ms, 2) for name, ms in ordered}, sorted(kernels, reverse=True)[:40]
