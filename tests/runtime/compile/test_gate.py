"""The compile gate: on a CPU it only says so; sealed, a compile is an error with a name.

The gate that compiles runs here on CPU devices, with backends of Dynamo that generate no code and
compile the same number of times. tests/runtime/compile/test_race.py has the threads.
"""

from __future__ import annotations

import ast
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import draftline
from draftline.choices import Choices
from draftline.errors import CompileError
from draftline.runtime.compile.gate import CompileGate, own_code

PACKAGE = Path(draftline.__file__).parent
CPU = torch.device("cpu")
DEVICES = [torch.device("cpu", index) for index in range(2)]


def scale(x: Tensor, *, by: float = 2.0) -> Tensor:
    return x * by


# Where it is spelled


def spelled(path: Path) -> set[str]:
    """Dotted names used in a file, such as torch.cuda.graph, however they were imported."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_that_spell(name: str, package: Path = PACKAGE) -> set[str]:
    return {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(s == name or s.startswith(f"{name}.") for s in spelled(path))
    }


def test_each_is_spelled_in_one_file() -> None:
    assert files_that_spell("torch.compile") == {"runtime/compile/gate.py"}
    assert files_that_spell("torch.cuda.graph") == {"runtime/graphs.py"}
    assert files_that_spell("torch.cuda.CUDAGraph") == {"runtime/graphs.py"}
    assert files_that_spell("torch.cuda.make_graphed_callables") == set()
    assert files_that_spell("torch.cuda.current_device") <= {"runtime/devices.py"}


@pytest.mark.parametrize(
    "text", ["import torch\nf = torch.compile(g)\n", "from torch import compile as c\n"]
)
def test_a_second_place_would_be_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("import torch\ntorch.compiler.reset()  # torch.compile\n")
    assert files_that_spell("torch.compile", tmp_path) == {"deep/a.py"}


# On a CPU


def test_on_a_cpu_the_function_stays_as_it_is_and_the_choice_is_recorded() -> None:
    choices = Choices()
    with CompileGate(choices) as gate:
        assert gate.compile(scale, "step", CPU) is scale
        assert gate.compile(scale, "step", CPU) is scale
        assert gate.warm("step", CPU, lambda: 7) == 7
        assert gate.warm("graph", CPU, lambda: 8, captures=True) == 8
        gate.seal()
        assert gate.late("other", CPU, lambda: 9) == 9
        gate.check()
    [entry] = choices.entries
    assert (entry.what, entry.wanted) == ("compile step", "torch.compile")
    assert "eager" in entry.got
    assert "cpu" in entry.reason
    assert not entry.fallback
    assert [row.outcome for row in gate.rows] == ["nothing to compile"] * 3


def test_on_a_cpu_nothing_of_the_process_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    before = list(warnings.filters)
    with CompileGate(Choices()) as gate:
        gate.compile(scale, "step", CPU)
        gate.seal()
        gate.late("step", CPU, lambda: None)
        assert list(warnings.filters) == before
    assert stances == []


# Where it compiles


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default", "the stance outlived the gate"
    torch.compiler.reset()


def opened(backend: str = "eager", **given: Any) -> CompileGate:
    return CompileGate(Choices(), backend=backend, device_types=("cpu",), **given)


def test_each_device_compiles_once_for_itself_and_repeats_run() -> None:
    x = torch.ones(3)
    with opened() as gate:
        runs = [gate.compile(scale, "step", device) for device in DEVICES]
        for device, run in zip(DEVICES, runs, strict=True):
            for _ in range(2):
                assert torch.equal(gate.warm("step", device, lambda run=run: run(x, by=3.0)), x * 3)
        assert gate.compiles == 2
    assert [(row.name, row.device, row.outcome, row.compiles) for row in gate.rows] == [
        ("step", "cpu:0", "compiled", 1),
        ("step", "cpu:0", "nothing to compile", 0),
        ("step", "cpu:1", "compiled", 1),
        ("step", "cpu:1", "nothing to compile", 0),
    ]
    assert not any(row.late for row in gate.rows)


def test_a_warm_up_counts_the_backward_and_marks_a_capture() -> None:
    weight = torch.ones(2, requires_grad=True)
    with opened("aot_eager") as gate:
        run = gate.compile(scale, "step", CPU)
        gate.warm("step", CPU, lambda: run(weight).sum().backward())
        gate.warm("graph", CPU, lambda: None, captures=True)
        gate.seal()
        run(weight).sum().backward()
        gate.check()
    assert [(row.outcome, row.compiles) for row in gate.rows] == [("compiled", 2), ("captured", 0)]


def test_a_warmed_shape_runs_after_the_seal_and_another_is_refused_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torch._dynamo.callback import callback_handler

    callbacks, filters = list(callback_handler.start_callbacks), list(warnings.filters)
    narrow, wide = torch.ones(3), torch.ones(5)
    choices = Choices()
    gate = CompileGate(choices, backend="eager", device_types=("cpu",))
    with gate, caplog.at_level(logging.INFO):
        run, idle = (gate.compile(scale, name, DEVICES[1]) for name in ("step", "idle"))
        gate.warm("step", DEVICES[1], lambda: run(narrow, by=3.0))
        gate.seal()
        gate.seal()
        assert torch.equal(run(narrow, by=3.0), narrow * 3)
        with pytest.raises(
            CompileError, match=r"step on cpu:1 .*tensor 'x' size mismatch.*expected 3, actual 5"
        ):
            run(wide, by=3.0)
        with pytest.raises(CompileError, match=r"idle on cpu:1 .* never called in the warm-up"):
            idle(narrow)
        gate.check()
    for line in (*gate.table(), "compiled 1 graphs; sealed"):
        assert caplog.text.count(line) == 1
    assert "idle on cpu:1 was never called" in caplog.text
    assert choices.entries == []
    assert list(callback_handler.start_callbacks) == callbacks
    assert list(warnings.filters) == filters
    assert torch.equal(run(wide, by=3.0), wide * 3)


def test_the_table_shows_every_compile_and_who_was_never_called() -> None:
    with opened("aot_eager") as gate:
        step = gate.compile(scale, "step", DEVICES[0])
        weight = torch.ones(2, requires_grad=True)
        gate.compile(scale, "head", DEVICES[1])
        gate.warm("all", DEVICES[0], lambda: step(weight).sum().backward())
        head, *graphs, row, cold, coverage = gate.table()
    assert head.split() == ["graph", "device", "part", "outcome", "seconds"]
    assert graphs[0].split()[:4] == ["step", "cpu:0", "forward", "compiled"]
    assert row.split()[:4] == ["all", "cpu:0", "whole", "compiled"]
    assert cold.split()[:5] == ["head", "cpu:1", "-", "never", "called"]
    assert coverage.startswith("1 of 2 warmed in ")


def test_a_graph_break_is_an_error_before_the_seal_too() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with opened() as gate:
        run = gate.compile(breaks, "broken", DEVICES[0])
        with pytest.raises(
            CompileError, match=r"broken on cpu:0 cannot be compiled as one graph.*at .*in breaks"
        ) as caught:
            run(torch.ones(2))
    assert isinstance(caught.value.__cause__, torch._dynamo.exc.Unsupported)


def test_more_shapes_than_torch_allows_are_an_error_and_no_slow_path() -> None:
    with opened() as gate:
        run = gate.compile(scale, "step", DEVICES[0])

        def shapes() -> None:
            for n in range(2, 30):
                run(torch.ones(n))

        with pytest.raises(CompileError, match="step on cpu:0 was compiled for as many shapes"):
            gate.warm("step", DEVICES[0], shapes)
    assert gate.rows == [], "a warm-up that failed is no row"


def test_an_error_of_the_function_itself_stays_what_it_is() -> None:
    def fails(x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)

    with opened("aot_eager") as gate:
        run = gate.compile(fails, "step", DEVICES[0])
        with pytest.raises(Exception, match=r"7x7|shapes|size") as caught:
            run(torch.ones(2, 2))
    assert not isinstance(caught.value, CompileError)


def test_an_eager_flex_attention_is_an_error_while_the_gate_compiles() -> None:
    def warn() -> None:
        warnings.warn("flex_attention called without torch.compile() - slow", stacklevel=1)

    with opened() as gate:
        gate.compile(scale, "step", CPU)
        with pytest.raises(CompileError, match="step on cpu called flex_attention without"):
            gate.warm("step", CPU, warn)
        warnings.filterwarnings("error", message="something else")
        with pytest.raises(UserWarning, match="something else"):
            gate.warm("step", CPU, lambda: warnings.warn("something else", stacklevel=1))


def test_every_compiled_function_has_a_code_object_of_its_own() -> None:
    """Dynamo keys its cache and its recompile limit by code object."""
    first, second = own_code(scale, "step_cuda0"), own_code(scale, "step_cuda1")
    assert first.__code__ is not second.__code__
    assert (first.__code__.co_name, second.__code__.co_name) == ("step_cuda0", "step_cuda1")
    assert torch.equal(first(torch.ones(2), by=5.0), torch.full((2,), 5.0))
    assert torch.equal(second(torch.ones(2)), torch.full((2,), 2.0))


def test_torch_is_asked_for_one_static_graph_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def remember(function: Any, **given: Any) -> Any:
        asked.append((function.__code__.co_name, given))
        return function

    monkeypatch.setattr(torch, "compile", remember)
    with CompileGate(Choices()) as gate:
        for device in ("cuda:0", "cuda:1", "cuda"):
            gate.compile(scale, "step", torch.device(device))
        gate.compile(scale, "update", torch.device("cuda:0"), same_bits=True)
    given = {"fullgraph": True, "dynamic": False, "backend": "inductor", "options": None}
    # Replicas on two GPUs stay equal only if no kernel is chosen by its time on each.
    untimed = given | {"options": {"triton.autotune_pointwise": False}}
    assert asked == [
        ("step_cuda0", given),
        ("step_cuda1", given),
        ("step_cuda", given),
        ("update_cuda0", untimed),
    ]


def test_the_option_for_equal_bits_exists_in_this_torch() -> None:
    torch.compile(scale, options={"triton.autotune_pointwise": False})  # refuses unknown names
    with pytest.raises(RuntimeError, match="autotune_pointwis"):
        torch.compile(scale, options={"triton.autotune_pointwis": False})


# After the seal


def test_a_lazy_backward_after_the_seal_is_found_and_named() -> None:
    weight = torch.ones(2, requires_grad=True)
    with opened("aot_eager") as gate:
        run = gate.compile(scale, "step", DEVICES[1])
        loss = gate.warm("half of it", DEVICES[1], lambda: run(weight).sum())
        gate.seal()
        gate.check()
        loss.backward()
        for _ in range(2):  # it does not go away by being asked
            with pytest.raises(
                CompileError,
                match=r"1 compile\(s\) after the warm-up, first: LAZY_BACKWARD of step on cpu:1",
            ):
                gate.check()


def test_warming_after_the_seal_is_refused_and_late_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = torch.ones(5)
    with opened() as gate:
        run = gate.compile(scale, "step", DEVICES[0])
        assert gate.late("step", DEVICES[0], lambda: run(torch.ones(3))).shape == (3,)
        gate.seal()
        with pytest.raises(CompileError, match="warm-up of step on cpu:0 came after the seal"):
            gate.warm("step", DEVICES[0], lambda: run(wide))
        assert "late" not in caplog.text
        assert torch.equal(gate.late("step", DEVICES[0], lambda: run(wide)), wide * 2)
        assert "late warm-up of step on cpu:0" in caplog.text
        assert "everybody waited" in caplog.text
        assert torch.equal(run(wide), wide * 2)
        with pytest.raises(CompileError, match="would have to compile again"):
            run(torch.ones(6))
        gate.check()
    assert [(row.compiles, row.late) for row in gate.rows] == [(1, False), (1, True)]
    assert sum("compiled, late" in line for line in gate.table()) == 1


def test_a_late_warm_up_that_fails_leaves_the_gate_sealed() -> None:
    def boom() -> None:
        raise ValueError("boom")

    with opened() as gate:
        run = gate.compile(scale, "step", DEVICES[0])
        gate.warm("step", DEVICES[0], lambda: run(torch.ones(3)))
        gate.seal()
        with pytest.raises(ValueError, match="boom"):
            gate.late("step", DEVICES[0], boom)
        with pytest.raises(CompileError, match="would have to compile again"):
            run(torch.ones(5))
        with gate.running():
            run(torch.ones(3))


def test_a_late_warm_up_says_who_does_not_stop() -> None:
    entered, leave = threading.Event(), threading.Event()
    with opened(deadline_s=0.05) as gate:
        gate.seal()

        def work() -> None:
            with gate.running():
                entered.set()
                leave.wait(30)

        worker = threading.Thread(target=work, name="target cuda:0")
        worker.start()
        try:
            assert entered.wait(30)
            with pytest.raises(CompileError, match="still running: target cuda:0"):
                gate.late("step", DEVICES[0], lambda: None)
        finally:
            leave.set()
            worker.join()


def test_a_worker_cannot_warm_inside_its_own_unit_of_work() -> None:
    with (
        opened() as gate,
        gate.running(),
        pytest.raises(CompileError, match="warm-up of step on cpu:0 was asked for by MainThread"),
    ):
        gate.warm("step", DEVICES[0], lambda: None)


def test_a_damaged_process_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as gate:
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True, raising=False)
        with pytest.raises(CompileError, match="Restart it"):
            gate.seal()
        assert not gate.sealed


# Opening and closing


def test_one_gate_a_process_and_the_next_after_an_error() -> None:
    with pytest.raises(ValueError, match="boom"), opened() as gate:  # noqa: PT012
        gate.compile(scale, "step", CPU)(torch.ones(2))
        gate.seal()
        with pytest.raises(CompileError, match="another compile gate"), opened():
            pass
        with pytest.raises(CompileError, match="another compile gate"), gate:
            pass
        raise ValueError("boom")
    with opened() as gate:
        assert gate.compile(scale, "step", CPU)(torch.ones(2)).sum() == 4


def test_compiling_needs_an_entered_gate() -> None:
    with pytest.raises(CompileError, match="not entered"):
        opened().compile(scale, "step", CPU)


def test_a_function_compiled_first_after_an_empty_seal_is_refused_as_well() -> None:
    with opened() as gate:
        gate.seal()
        run = gate.compile(scale, "step", DEVICES[0])
        with pytest.raises(CompileError, match="never called in the warm-up"):
            run(torch.ones(2))
        assert gate.late("step", DEVICES[0], lambda: run(torch.ones(2))).sum() == 4


def test_compiles_outside_an_open_gate_are_not_counted() -> None:
    with opened() as gate:
        run = gate.compile(scale, "step", CPU)
        run(torch.ones(2))
    run(torch.ones(3))
    assert gate.compiles == 1
