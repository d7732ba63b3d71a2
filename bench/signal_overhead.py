"""What recording costs: a step's own record, the readings it is made of, and a step with and without.

    python bench/signal_overhead.py [--pairs 12] [--block 20] [--step-ms 150] [--out FILE]

1. `record`: microseconds that `Recorder.step` adds to the calling thread, on an empty step.
2. `read`: microseconds of one reading of the allocator (flat, nested, and the signal's own), with few
   and with thousands of segments, and of one look at a device through NVML.
3. `thread`: CPU milliseconds per second that the sampling thread takes, at 5 samples per second.
4. `step`: a step of 150 ms with and without recording, blocks of one and the other in turn: once with
   few long kernels, once with so many short ones that Python is busy all the time.

Without a GPU the steps are matrix products on the CPU and what needs CUDA is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from machine import describe

from draftline.signal.recorder import counters
from draftline.signal.recorder.nvml import Unavailable, open_source
from draftline.signal.recorder.record import Recorder

WARM = 50
Row = dict[str, object]


def microseconds(work: Callable[[], object], times: int) -> Row:
    """p50, p99 and the most that one call took."""
    took = []
    for _ in range(times + WARM):
        began = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - began) / 1000)
    took = sorted(took[WARM:])
    at = {"p50_us": 0.5, "p99_us": 0.99, "max_us": 1.0}
    return {k: round(took[min(len(took) - 1, int(q * len(took)))], 1) for k, q in at.items()}


@contextmanager
def recording(folder: Path) -> Iterator[Recorder]:
    with Recorder(folder / f"{time.monotonic_ns()}.jsonl") as recorder:
        yield recorder


def compile_something(device: torch.device) -> None:
    """So that Dynamo is loaded, listened to and counted, as in the program that is recorded."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1, device=device))


def record_cost(folder: Path, device: torch.device, times: int) -> list[Row]:
    rows: list[Row] = []
    for name, own_peak in (("step", False), ("step, own_peak", True)):
        with Recorder(folder / f"{name}.jsonl", own_peak=own_peak) as recorder:

            def empty(recorder: Recorder = recorder) -> None:
                with recorder.step(tokens=1):
                    pass

            rows.append({"what": name, **microseconds(empty, times)})
    with recording(folder) as recorder:
        rows.append({"what": "mark_step", **microseconds(recorder.mark_step, times)})
        rows.append({"what": "trace() for a verdict", **microseconds(recorder.trace, 50)})
    return rows


def read_cost(times: int) -> list[Row]:
    """Of the allocator's counters, before and after thousands of segments were taken."""
    rows = []
    ballast: list[torch.Tensor] = []
    free, _ = torch.cuda.mem_get_info()
    for segments in (0, min(4000, free // 2 // (12 << 20))):
        # Of more than 10 MiB each has a segment of its own.
        ballast += [
            torch.empty(12 << 20, dtype=torch.uint8, device="cuda") for _ in range(segments)
        ]
        held = torch.cuda.memory_stats()["segment.all.current"]
        for name, ask in (
            ("memory_stats", torch.cuda.memory_stats),
            ("memory_stats_as_nested_dict", torch.cuda.memory_stats_as_nested_dict),
            ("counters.allocator", lambda: counters.allocator(0)),
        ):
            rows.append({"what": f"{name}, {held} segments", **microseconds(ask, times)})
    return rows


def nvml_cost(times: int) -> list[Row]:
    try:
        source = open_source()
    except Unavailable as error:
        return [{"what": f"driver: {error}"}]
    name = source.devices()[0].name
    cost = microseconds(lambda: source.read({name}), times)
    source.close()
    return [{"what": f"one device through {type(source).__name__}", **cost}]


def thread_cost(folder: Path, seconds: float) -> Row:
    """CPU time of the sampling thread while the program waits."""
    with recording(folder) as recorder:
        recorder.mark_step()
        (thread,) = [t for t in threading.enumerate() if t.name == "signal-sampler"]
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        began = time.clock_gettime(clock)
        time.sleep(seconds)
        spent = time.clock_gettime(clock) - began
    return {"what": "sampling thread", "cpu_ms_a_second": round(spent / seconds * 1000, 3)}


def make_step(device: torch.device, wanted_s: float, *, short: bool) -> Callable[[], None]:
    """A step of about `wanted_s`: matrix products, many short ones or few long ones."""
    width = (64 if short else 512) if device.type == "cpu" else (256 if short else 8192)
    a = torch.randn(width, width, device=device)
    b = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=b)
        if device.type == "cuda":
            torch.cuda.synchronize()

    products(20)
    began = time.perf_counter()
    products(20)
    count = max(1, round(wanted_s / ((time.perf_counter() - began) / 20)))
    return lambda: products(count)


def step_cost(
    folder: Path, device: torch.device, pairs: int, block: int, step_s: float, *, short: bool
) -> Row:
    """Milliseconds per step with and without, and the mean of the paired differences."""
    step = make_step(device, step_s, short=short)
    means: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            with recording(folder) if on else nullcontext() as recorder:
                step()
                began = time.perf_counter()
                for _ in range(block):
                    with recorder.step() if recorder else nullcontext():
                        step()
                means[on].append((time.perf_counter() - began) / block * 1000)
    differences = [a - b for a, b in zip(means[True], means[False], strict=True)]
    without = statistics.median(means[False])
    error = statistics.stdev(differences) / len(differences) ** 0.5 if pairs > 1 else float("nan")
    return {
        "what": f"{'many short' if short else 'few long'} kernels",
        "without_ms": round(without, 3),
        "with_ms": round(statistics.median(means[True]), 3),
        "difference_pct": round(100 * statistics.median(differences) / without, 3),
        "standard_error_pct": round(100 * error / without, 3),
    }


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(columns))]
    for line in table:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    torch.ones(1, device=device)
    compile_something(device)
    result: dict[str, object] = dict(describe(device))
    print(" ".join(f"{key}={value}" for key, value in result.items()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, list[Row]] = {
            "record": record_cost(folder, device, options.times),
            "thread": [thread_cost(folder, 3.0)],
            "step": [
                step_cost(
                    folder,
                    device,
                    options.pairs,
                    options.block,
                    options.step_ms / 1000,
                    short=short,
                )
                for short in (False, True)
            ],
            "read": (read_cost(options.times) if cuda else []) + nvml_cost(options.times),
        }
    for title, rows in parts.items():
        show(title, rows)
    if options.out is not None:
        options.out.write_text(json.dumps(result | parts, indent=1) + "\n")


if __name__ == "__main__":
    main()
