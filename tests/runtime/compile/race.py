"""Three worker threads that compile and step, without the compile gate and with it.

    python tests/runtime/compile/race.py ungated | poisoned | gated

prints what happened as one JSON object. Every meeting of threads is made by events and barriers:
the compiler (crew.py), a Dynamo backend, stops inside a compile until the others are where they do
harm, or until the gate holds them. Needs torch (2.11 or later) and draftline, no GPU.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from crew import WAIT_S, WORKERS, Crew, SlowCompiler, said, until
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import CompileError
from draftline.runtime.compile.gate import CompileGate, own_code

SHAPES = (4, 7)
STEPS = 20
LATE_ROWS = 11
TARGET = torch.nn.Linear(16, 16)


def drafter(x: Tensor, weight: Tensor) -> Tensor:
    """A loss of x [rows, 16] and weight [16, 16]."""
    hidden = torch.nn.functional.silu(x @ weight) * 0.5 + x.sin()
    return hidden.square().mean()


def train_step(function: Callable[..., Tensor], rows: int) -> None:
    """Forward and backward of `function`, compared with the eager drafter's."""
    made = torch.Generator().manual_seed(rows)
    x, start = torch.randn(rows, 16, generator=made), torch.randn(16, 16, generator=made)
    weight, reference = (start.clone().requires_grad_() for _ in range(2))
    loss, expected = function(x, weight), drafter(x, reference)
    loss.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    if weight.grad is None or reference.grad is None:
        raise AssertionError("no gradient")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(weight.grad, reference.grad)


def unit(function: Callable[..., Tensor], rows: int) -> None:
    """What a worker does under the gate: an eager target's forward, and a step."""
    TARGET(torch.ones(1, 16))
    train_step(function, rows)


# Without the gate


def stepping_while_another_compiles() -> dict[str, Any]:
    """Workers 0 and 1 are warm and step while worker 2 is inside the compile of its backward."""
    compiling, stepped = threading.Event(), threading.Event()
    compiler = SlowCompiler()
    functions = [
        torch.compile(own_code(drafter, f"drafter_{i}"), backend=compiler, fullgraph=True)
        for i in range(WORKERS)
    ]
    for function in functions[:2]:
        train_step(function, SHAPES[0])
    faults: dict[str, list[str]] = {"drafter": [], "target": []}
    left = threading.Semaphore(0)

    def hold() -> None:
        compiling.set()
        stepped.wait(WAIT_S)

    compiler.hook = hold

    def work(index: int) -> None:
        if index == 2:
            train_step(functions[2], SHAPES[0])
            return
        compiling.wait(WAIT_S)
        for name, call in (
            ("drafter", lambda: train_step(functions[index], SHAPES[0])),
            ("target", lambda: TARGET(torch.ones(1, 16))),
        ):
            try:
                call()
            except Exception as error:
                faults[name].append(said(f"worker {index}", error))
        left.release()

    crew = Crew(work).start()
    for _ in range(2):
        left.acquire(timeout=WAIT_S)
    stepped.set()
    return {"errors": crew.join(), **{name: sorted(found) for name, found in faults.items()}}


def backward_of_one_function() -> dict[str, Any]:
    """Three threads call backward of outputs of one compiled function, which is compiled once."""
    meeting = threading.Barrier(WORKERS, timeout=WAIT_S)
    compiler = SlowCompiler(lambda: (meeting.wait(), None)[1], trace=False)
    function = torch.compile(own_code(drafter, "shared"), backend=compiler, fullgraph=True)
    losses = [
        function(torch.ones(4, 16), torch.ones(16, 16, requires_grad=True)) for _ in range(WORKERS)
    ]
    errors = Crew(lambda index: losses[index].backward()).start().join()
    return {
        "errors": errors,
        "forward_compiles": compiler.forward,
        "backward_compiles": compiler.backward,
        "most_at_once": compiler.most_at_once,
    }


def overlapping_traces() -> dict[str, Any]:
    """Two symbolic traces that overlap; what is left behind, and what the gate says to it."""
    inside = [threading.Event() for _ in range(2)]
    leave = [threading.Event() for _ in range(2)]
    errors: list[str] = []

    def trace(index: int) -> None:
        def traced(x: Any) -> Any:
            inside[index].set()
            leave[index].wait(WAIT_S)
            return x + 1

        try:
            torch.fx.symbolic_trace(traced)
        except Exception as error:
            errors.append(said(f"trace {index}", error))

    threads = [threading.Thread(target=trace, args=(index,)) for index in range(2)]
    for thread, event in zip(threads, inside, strict=True):
        thread.start()
        event.wait(WAIT_S)
    for thread, event in zip(threads, leave, strict=True):
        event.set()
        thread.join(WAIT_S)
    try:
        with CompileGate(Choices()) as gate:
            gate.seal()
        refused = ""
    except CompileError as error:
        refused = str(error)
    return {"errors": errors, "refused": refused}


# With the gate


def gated() -> dict[str, Any]:
    """Warm one at a time while those already warm try to step; seal; step; a shape that was not
    warmed; a late warm-up while everybody steps."""
    devices = [torch.device("cpu", index) for index in range(WORKERS)]
    names = {f"worker {index}" for index in range(WORKERS)}
    compiler, steps = SlowCompiler(), [0] * WORKERS
    intruders: list[str] = []
    warmed: set[str] = set()
    finish, stop = threading.Event(), threading.Event()
    gate = CompileGate(Choices(), backend=compiler, device_types=("cpu",), deadline_s=WAIT_S)

    def hold() -> None:
        """Goes on when everybody else is held at the gate, or somebody got past it."""
        others = names - {threading.current_thread().name}
        before = list(steps)
        until(
            lambda: others <= set(gate._lock.waiting()) or compiler.active > 1 or steps != before,
            "the others held at the gate",
        )
        intruders.extend(gate._lock.inside())
        if compiler.active > 1 or steps != before:
            intruders.append(f"{compiler.active} at once, steps {before} -> {steps}")

    def step(index: int, rows: int) -> None:
        with gate.running():
            unit(functions[index], rows)
            steps[index] += 1

    def warm_up(index: int) -> None:
        for rows in SHAPES:
            unit(functions[index], rows)

    def work(index: int) -> None:
        gate.warm("drafter forward+backward", devices[index], lambda: warm_up(index))
        warmed.add(threading.current_thread().name)
        while not finish.is_set():
            step(index, SHAPES[0])
        crew.barrier.wait()  # everybody is warm
        crew.barrier.wait()  # sealed
        for n in range(STEPS):
            step(index, SHAPES[n % 2])
        crew.barrier.wait()
        while not stop.is_set():
            step(index, SHAPES[1])

    report: dict[str, Any] = {}
    with gate:
        functions = [gate.compile(drafter, "drafter", device) for device in devices]
        compiler.hook = hold
        crew = Crew(work, others=1).start()
        try:
            crew.barrier.wait()
            until(lambda: warmed == names or bool(crew.errors), "everybody warm")
            finish.set()
            crew.barrier.wait()
            gate.seal()
            crew.barrier.wait()
            crew.barrier.wait()
            report["compiles"] = [compiler.forward, compiler.backward, gate.compiles]
            report["most_at_once"] = compiler.most_at_once
            report["intruders_in_warm_up"] = list(intruders)
            report["table"] = gate.table()

            report["unwarmed"] = ""
            try:
                with gate.running():
                    unit(functions[1], LATE_ROWS)
            except CompileError as error:
                report["unwarmed"] = str(error)
            report["compiles_after_refusal"] = [compiler.forward, compiler.backward]

            intruders.clear()
            late_began = list(steps)
            gate.late("drafter late", devices[1], lambda: unit(functions[1], LATE_ROWS))
            report["intruders_in_late"] = list(intruders)
            report["compiles_after_late"] = [compiler.forward, compiler.backward, gate.compiles]
            until(
                lambda: all(n > m for n, m in zip(steps, late_began, strict=True)),
                "every worker going on after the late warm-up",
            )
            with gate.running():
                unit(functions[1], LATE_ROWS)
            report["rows"] = [[r.name, r.device, r.outcome, r.compiles, r.late] for r in gate.rows]
            gate.check()
        except (threading.BrokenBarrierError, AssertionError) as error:
            crew.errors.append(said("main", error))
        finally:
            finish.set()
            stop.set()
            report["errors"] = crew.join()
    return report


def main(mode: str) -> None:
    faulthandler.dump_traceback_later(3 * WAIT_S, exit=True)
    torch.set_num_threads(1)
    # torch 2.11's CUDA build crashes without a GPU when a thread that ends is the first to trace.
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    report: dict[str, Any] = {"torch": torch.__version__, "mode": mode}
    report["flag_per_process"] = hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
    if mode == "ungated":
        report["double"] = backward_of_one_function()
        report["stepping"] = stepping_while_another_compiles()
    elif mode == "poisoned":
        report["overlap"] = overlapping_traces()
    else:
        report["gated"] = gated()
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
