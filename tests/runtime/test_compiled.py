"""The compile gate: on a CPU it only says so; sealed, a compile is an error with a name.

The gate for a GPU runs here with Dynamo's eager backend, which needs no GPU and compiles the same
number of times.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftline
from draftline.choices import Choices
from draftline.errors import CompileError
from draftline.runtime.compiled import CompileGate

PACKAGE = Path(draftline.__file__).parent
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    assert files_that_spell("torch.compile") == {"runtime/compiled.py"}
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
    with CompileGate(CPU, choices) as gate:
        assert gate.compile(scale, "step") is scale
        assert gate.compile(scale, "step") is scale
        gate.seal()
        gate.check()
    [entry] = choices.entries
    assert (entry.what, entry.wanted) == ("compile step", "torch.compile")
    assert "not compiled" in entry.got
    assert "CPU" in entry.reason
    assert not entry.fallback


def test_on_a_cpu_nothing_of_the_process_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    before = list(warnings.filters)
    with CompileGate(CPU, Choices()) as gate:
        gate.seal()
    assert stances == []
    assert list(warnings.filters) == before


# Sealed


def test_a_late_compile_is_an_error_with_a_name() -> None:
    gate = CompileGate(CPU, Choices())
    gate._on_compile(SimpleNamespace(callback_trigger="DYNAMO"))
    gate.seal()
    gate.check()
    gate._on_compile(SimpleNamespace(callback_trigger="LAZY_BACKWARD"))
    gate._on_compile(SimpleNamespace(callback_trigger="DYNAMO"))
    for _ in range(2):  # it does not go away by being asked
        with pytest.raises(
            CompileError, match=r"2 compile\(s\) after the warm-up, first: LAZY_BACKWARD"
        ):
            gate.check()
    assert gate.compiles == 3


def test_a_trigger_without_a_name_is_still_reported() -> None:
    gate = CompileGate(CPU, Choices())
    gate.seal()
    gate._on_compile("autotune")
    with pytest.raises(CompileError, match="first: autotune"):
        gate.check()


# A GPU's gate


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with warnings.catch_warnings():
        yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


@pytest.mark.usefixtures("eager_backend")
def test_a_warmed_shape_runs_after_the_seal_and_another_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torch._dynamo.callback import callback_handler

    callbacks = list(callback_handler.start_callbacks)
    warm, wide = torch.ones(3), torch.ones(5)
    choices = Choices()
    with CompileGate(GPU, choices) as gate, caplog.at_level(logging.INFO):
        run: Any = gate.compile(scale, "step")
        assert torch.equal(run(warm, by=3.0), warm * 3)
        assert gate.compiles == 1
        gate.seal()
        assert "compiled 1 graphs" in caplog.text
        assert torch.equal(run(warm, by=3.0), warm * 3)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            run(wide, by=3.0)
    assert choices.entries == []
    assert list(callback_handler.start_callbacks) == callbacks
    assert torch.equal(run(wide, by=3.0), wide * 3), "the stance outlived the gate"


@pytest.mark.usefixtures("eager_backend")
def test_a_graph_break_is_an_error_and_no_slow_path() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with CompileGate(GPU, Choices()) as gate:
        run: Any = gate.compile(breaks, "broken")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            run(torch.ones(2))


@pytest.mark.usefixtures("eager_backend")
def test_the_callback_sees_compiles_while_the_gate_is_open_only() -> None:
    def other(x: Tensor) -> Tensor:
        return x + 1

    gate = CompileGate(GPU, Choices())
    with gate:
        gate._sealed = True  # the stance, which would forbid the compile, stays as it is
        torch.compile(other)(torch.ones(2))
        assert gate.compiles == 1
        with pytest.raises(CompileError, match="after the warm-up"):
            gate.check()
    torch.compile(other)(torch.ones(2, 2))
    assert gate.compiles == 1


def test_every_compiled_function_has_a_code_object_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo keys its cache and its recompile limit by code object."""
    options: list[dict[str, Any]] = []

    def remember(function: Any, **given: Any) -> Any:
        options.append(given)
        return function

    monkeypatch.setattr(torch, "compile", remember)
    with warnings.catch_warnings():
        first, second = (
            CompileGate(torch.device("cuda", index), Choices()).compile(scale, "step")
            for index in (0, 1)
        )
        with pytest.raises(UserWarning, match=r"flex_attention called without torch\.compile"):
            warnings.warn("flex_attention called without torch.compile() - slow", stacklevel=1)
    assert first.__code__ is not second.__code__
    assert (first.__code__.co_name, second.__code__.co_name) == ("step_cuda0", "step_cuda1")
    assert torch.equal(first(torch.ones(2), by=5.0), torch.full((2,), 5.0))
    assert torch.equal(second(torch.ones(2)), torch.full((2,), 2.0))
    assert options == [{"fullgraph": True, "dynamic": False}] * 2
