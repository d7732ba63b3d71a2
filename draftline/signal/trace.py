"""What is known of a program's GPU memory over time: device samples, step counters and events.

The readers and the recorder make a Trace, the judge judges one; none needs torch.
Unknown is NaN or an absent column, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from draftline.signal.words import OF_COMPILER

Column = npt.NDArray[np.float64]
MIB = 2**20
GIB = 2**30

# What a step may carry besides its time. Totals only grow (since the start of the process or the last
# reset of the counter), levels are readings at the end of the step.
TOTALS = (
    "allocator_calls",  # requests served by PyTorch's caching allocator
    "device_allocations",  # segments taken from the driver (cudaMalloc or a mapping)
    "device_frees",
    "retries",  # failed device allocations that flushed the cache
    "ooms",
    "frames",  # Dynamo: frames looked at
    "frames_ok",  # Dynamo: of these, compiled
    "compiles",  # compiles started, lazy backwards included
    "compile_s",  # seconds spent in them
    "graph_breaks",
    "recompiles",
    "recompile_limits",  # code objects given up at the recompile limit (eager from then on)
    "graph_replays",  # CUDA-graph replays
    "captures",  # CUDA-graph captures
    "capture_skips",  # captures that Inductor refused (its counter cudagraph_skips)
)
LEVELS = (
    "tokens",  # work of this step
    "allocated_bytes",  # in use by tensors
    "peak_bytes",  # most in use during this step
    "reserved_bytes",  # held by the caching allocator
    "inactive_bytes",  # held in split blocks that nobody uses: fragmentation
)


def one_line(text: str, most: int = 400) -> str:
    """`text` as it may be shown on a terminal: printable characters on one line, at most so many."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def device_name(device: str) -> str:
    """A device for people: `GPU 3` for a driver's index, else its own name."""
    return f"GPU {device}" if device.isdecimal() else device


@dataclass(frozen=True, slots=True)
class Samples:
    """Memory of one device as its driver sees it. `device` is the driver's index as text, or a uuid.

    `time_s` [n] rises (seconds since 1970 in UTC, or since the first row where `dated` is False),
    `used_bytes` and `util_pct` [n] may hold NaN. `by_process` gives bytes [n] by process id.
    """

    device: str
    time_s: Column
    used_bytes: Column
    util_pct: Column
    total_bytes: float | None = None
    by_process: Mapping[int, Column] = field(default_factory=dict)
    dated: bool = True


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one program on one device: `number`, `time_s` (its end) and `wall_ms`, all [n], and
    `values`, columns [n] named as in TOTALS and LEVELS."""

    device: str
    number: Column
    time_s: Column
    wall_ms: Column
    values: Mapping[str, Column] = field(default_factory=dict)

    def known(self, name: str) -> Column | None:
        """The column, or None where it is absent or holds nothing but NaN."""
        column = self.values.get(name)
        return None if column is None or not np.isfinite(column).any() else column


@dataclass(frozen=True, slots=True)
class Event:
    """Something at a moment, of a kind in `words.EVENTS`; `text` says what in words (a
    guard's reason, a phase's name)."""

    time_s: float
    kind: str
    text: str = ""
    device: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One device's allocator at a moment, of a PyTorch memory snapshot. Bytes; `segments` counts
    what was taken from the driver; `history` is [time_s, allocated_bytes] in order, [0, 2] where
    nothing was recorded; `largest` the largest live blocks with the innermost frames that asked."""

    device: str
    reserved_bytes: float
    allocated_bytes: float
    inactive_bytes: float
    segments: int
    history: Column
    flushes: int
    ooms: int
    largest: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """What a recording says of its program. `expects` holds "compiled" and "captured" where the
    program declares that its steps are; `pid` is its process; `facts` what it knew of its environment
    (versions, variables, stance)."""

    name: str = ""
    pid: int | None = None
    expects: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything read of one run. `notes` say in plain words what a reader mended or missed."""

    samples: tuple[Samples, ...] = ()
    steps: tuple[Steps, ...] = ()
    events: tuple[Event, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    program: Program | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> list[str]:
        """Every device named, numbers in order first; cpu where there are compile events alone."""
        names = {s.device for s in self.samples} | {s.device for s in self.steps}
        names |= {s.device for s in self.snapshots}
        if not names and any(event.kind in OF_COMPILER for event in self.events):
            return ["cpu"]
        return sorted(names, key=lambda n: (not n.isdecimal(), len(n) if n.isdecimal() else 0, n))


def join(traces: Iterable[Trace]) -> Trace:
    """The parts of one run side by side, as they are: `read` aligns their clocks and devices."""
    parts = list(traces)
    programs = [part.program for part in parts if part.program is not None]
    return Trace(
        samples=tuple(s for part in parts for s in part.samples),
        steps=tuple(s for part in parts for s in part.steps),
        events=tuple(sorted((e for p in parts for e in p.events), key=lambda e: e.time_s)),
        snapshots=tuple(s for part in parts for s in part.snapshots),
        program=programs[0] if programs else None,
        sources=tuple(s for part in parts for s in part.sources),
        notes=tuple(n for part in parts for n in part.notes),
    )
