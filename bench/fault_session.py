"""What every program of the corpus runs on: a recorded loop, counters, and proof.

A program (of `fault_run.PROGRAMS`) gets a Session, trains with it, and the session's counters then say
whether the fault really happened. CUDA needs nothing else; on a CPU a test passes its own
`capture` and a backend that compiles nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_model import Size
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as flex

from draftline.signal.recorder.record import Recorder

MIB = 1 << 20
MAX_STEPS = 400
Capture = Callable[[Callable[[], None], torch.device], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Bound:
    """A counter's change during the run phase that proves the program did what it says."""

    name: str
    least: float | None = None
    most: float | None = None

    def broken(self, evidence: Mapping[str, float]) -> str | None:
        """Why it does not hold, or None."""
        seen = evidence.get(self.name)
        if seen is None:
            return f"{self.name} is not known here"
        if self.least is not None and seen < self.least:
            return f"{self.name} {seen:g}, wanted at least {self.least:g}"
        if self.most is not None and seen > self.most:
            return f"{self.name} {seen:g}, wanted at most {self.most:g}"
        return None


@dataclass(frozen=True, slots=True)
class Variant:
    """One of a program's recordings: what it declares, what it is started with, how large it is."""

    values: Mapping[str, Any] = field(default_factory=dict)
    expects: tuple[str, ...] = ()
    marked: bool = True
    own_peak: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A fault or a healthy run. `cause` is what a diagnosis should name, `alarm` whether it should."""

    name: str
    cause: str
    body: Callable[[Session], None]
    needs: tuple[Bound, ...]
    variants: tuple[Variant, ...]

    @property
    def alarm(self) -> bool:
        return self.cause not in ("healthy", "pause")


def capture_graph(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The replay of `function`, captured on a stream of its own after two calls there."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


class LimitLog(logging.Handler):
    """Counts Dynamo's warnings that a function hit the recompile limit."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.hits = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.hits += "hit config" in str(record.msg)


@dataclass
class Session:
    """A program's device, recorder and loop. `evidence` holds the run phase's changes afterwards."""

    variant: Variant
    size: Size
    device: torch.device
    seconds: float
    random: random.Random
    recorder: Recorder = field(init=False)
    backend: str = "inductor"
    capture_with: Capture = capture_graph
    max_steps: int = MAX_STEPS
    counts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, float] = field(default_factory=dict)
    limit_log: LimitLog = field(default_factory=LimitLog)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _recorded: int = 0
    _phase: str = ""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def values(self) -> Mapping[str, Any]:
        return self.variant.values

    def phase(self, name: str) -> None:
        """Marks that `name` begins, where the variant marks phases and it has not begun already."""
        if self.variant.marked and name != self._phase:
            self.recorder.phase(name)
        self._phase = name

    def count(self, name: str, more: int = 1) -> None:
        """Adds to the recording's counter and to the evidence; from any thread."""
        with self._lock:
            self.recorder.count(name, more)
            self.counts[name] = self.counts.get(name, 0) + more

    def count_pause(self) -> None:
        """The steps were interrupted on purpose."""
        self.counts["pauses"] = self.counts.get("pauses", 0) + 1

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self.backend != "inductor":
            options.pop("mode", None)  # Inductor's own
        options.setdefault("backend", self.backend)
        compiled: Callable[..., Any] = torch.compile(function, **options)
        return compiled

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A counted replay of `function`."""
        replay = self.capture_with(function, self.device)
        self.count("captures")

        def play() -> None:
            replay()
            self.count("graph_replays")

        return play

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def warm(self, body: Callable[[int], None], steps: int = 6) -> None:
        """Recorded steps whose changes prove nothing."""
        self.phase("warm")
        for number in range(steps):
            self._step(body, number)

    def run(
        self,
        body: Callable[[int], None],
        *,
        between: Callable[[], None] | None = None,
        every: int = 0,
    ) -> None:
        """Steps for `seconds`, `between()` after each `every` of them; then sets `evidence`."""
        self.sync()
        self.phase("run")
        before, end, number = self.readings(), time.perf_counter() + self.seconds, 0
        while time.perf_counter() < end and self._recorded < self.max_steps:
            self._step(body, number)
            number += 1
            if between is not None and number % every == 0:
                between()
        after = self.readings()
        self.evidence = {name: after[name] - before.get(name, 0) for name in after}
        self.evidence |= {f"{name}_total": after[name] for name in after}
        self.evidence["steps"] = number
        self.evidence["graphs_a_step"] = self.evidence["graphs"] / max(number, 1)

    def _step(self, body: Callable[[int], None], number: int) -> None:
        due = time.perf_counter() + self.size.pace_ms / 1e3
        with self.recorder.step(tokens=self.size.batch * self.size.length):
            body(number)
            self.sync()
            time.sleep(max(0.0, due - time.perf_counter()))
        self._recorded += 1

    def readings(self) -> dict[str, float]:
        """Dynamo's, the allocator's and the program's own counters now; MiB for sizes."""
        values: dict[str, float] = {
            "frames": counters["frames"]["total"],
            "frames_ok": counters["frames"]["ok"],
            "breaks": sum(counters["graph_break"].values()),
            "graphs": counters["stats"]["unique_graphs"],
            "capture_skips": counters["inductor"]["cudagraph_skips"],
            "limits": self.limit_log.hits,
            "flex_warned": float("flex_attention_performance" in flex._WARNINGS_SHOWN),
            "graph_replays": 0,
        }
        if self.cuda:
            stats = torch.cuda.memory_stats(self.device)
            values |= {
                "retries": stats["num_alloc_retries"],
                "ooms": stats["num_ooms"],
                "device_allocations": stats["num_device_alloc"],
                "device_frees": stats["num_device_free"],
                "reserved_mib": stats["reserved_bytes.all.current"] / MIB,
                "allocated_mib": stats["allocated_bytes.all.current"] / MIB,
                "inactive_mib": stats["inactive_split_bytes.all.current"] / MIB,
            }
        return values | self.counts

    def missing(self, needs: tuple[Bound, ...]) -> str | None:
        """Which of `needs` the evidence does not bear out, or None."""
        broken = [why for need in needs if (why := need.broken(self.evidence)) is not None]
        return "; ".join(broken) or None

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        """Another process on the device, with the pattern that the variant's values name; the range
        of what others hold is counted as `foreign_mib` by `watch_foreign`."""
        values, index = self.values, self.device.index or 0
        command = [sys.executable, str(Path(__file__).with_name("fault_neighbour.py"))]
        command += [self.device.type, str(index), values["pattern"], str(values["mib"])]
        command.append(str(values["period_s"]))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                if other.stdout.readline() != b"ready\n":
                    raise RuntimeError("the other process did not start")
                yield
            finally:
                other.kill()

    def watch_foreign(self, number: int) -> None:
        """Reads what other processes hold, in MiB, every tenth step."""
        if not self.cuda or number % 10:
            return
        free, total = torch.cuda.mem_get_info(self.device)
        held = (total - free - torch.cuda.memory_reserved(self.device)) / MIB
        low = self.counts.setdefault("foreign_low_mib", held)
        high = self.counts.setdefault("foreign_high_mib", held)
        self.counts["foreign_low_mib"] = min(low, held)
        self.counts["foreign_high_mib"] = max(high, held)
        self.counts["foreign_mib"] = (
            self.counts["foreign_high_mib"] - self.counts["foreign_low_mib"]
        )
