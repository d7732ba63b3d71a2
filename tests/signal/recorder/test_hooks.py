"""Compile events as they happen, with the real Dynamo and with one that lacks what is read."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from draftline.signal.recorder.hooks import CompileHooks
from draftline.signal.trace import Event
from tests.support.fake_cuda import FakeCuda


class Watched:
    """Hooks with the events they gave."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.hooks = CompileHooks(self.events.append)
        self.hooks.refresh()
        self.events.clear()

    def texts(self, kind: str) -> list[str]:
        self.hooks.refresh()
        return [event.text for event in self.events if event.kind == kind]


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Dynamo with nothing compiled, counted or listened to, before and after."""
    import torch._dynamo

    def clean() -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.clear_compilation_metrics()

    clean()
    yield torch._dynamo
    clean()


@pytest.fixture
def watched(dynamo: Any) -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.hooks.close()


def scaler(**options: Any) -> Callable[[Any, int], Any]:
    import torch

    def scale(x: Any, factor: int) -> Any:
        return x * factor

    return torch.compile(scale, backend="eager", dynamic=False, **options)


def place_of(function: Any) -> str:
    return f"(test_hooks.py:{function.__wrapped__.__code__.co_firstlineno})"


def test_nothing_is_known_before_something_is_compiled(watched: Watched) -> None:
    watched.hooks.refresh()
    assert watched.hooks.values() == {}


def test_compiles_and_recompiles_have_name_seconds_and_reason(watched: Watched) -> None:
    import torch

    scale, x = scaler(fullgraph=True), torch.ones(2)
    for factor in (3, 3, 4):
        scale(x, factor)
    named = place_of(scale)
    assert watched.texts("compile") == [f"scale {named}, forward"] * 2
    (again,) = watched.texts("recompile")
    assert again.startswith(f"scale {named}: value of `factor` changed from 3 to another")
    assert "which test_hooks.py:" in again
    assert all(event.seconds is not None and event.seconds > 0 for event in watched.events)
    values = watched.hooks.values()
    assert values["compile_s"] > 0
    assert (values["compiles"], values["recompiles"], values["recompile_limits"]) == (2, 1, 0)


def test_a_backward_is_named_after_its_function(watched: Watched) -> None:
    import torch

    @torch.compile(backend="aot_eager")
    def squared(x: Any) -> Any:
        return (x * x).sum()

    squared(torch.ones(2, requires_grad=True)).backward()
    named = f"squared {place_of(squared)}"
    assert watched.texts("compile") == [f"{named}, forward", f"{named}, backward"]


def test_a_reached_limit_is_no_compile(watched: Watched, dynamo: Any) -> None:
    import torch

    scale, x = scaler(), torch.ones(2)
    with dynamo.config.patch(recompile_limit=2):
        for factor in range(4):
            scale(x, factor)
    assert len(watched.texts("compile")) == 2
    (limit,) = watched.texts("recompile_limit")
    assert limit.startswith(f"scale {place_of(scale)}: value of `factor` changed")
    assert watched.hooks.values()["recompile_limits"] == 1


def test_a_graph_break_says_where_and_why(watched: Watched) -> None:
    import torch

    @torch.compile(backend="eager")
    def broken(x: Any) -> Any:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    broken(torch.ones(2))
    first = broken.__wrapped__.__code__.co_firstlineno
    (text,) = watched.texts("graph_break")
    assert text.startswith(f"broken (test_hooks.py:{first + 3}): ")
    assert "graph_break" in text
    assert "Hint" not in text
    names = [text.split(" (")[0] for text in watched.texts("compile")]
    assert names == ["broken", f"broken after line {first + 3}"]


def test_a_reset_of_dynamo_does_not_end_it(watched: Watched, dynamo: Any) -> None:
    import torch

    scaler()(torch.ones(2), 1)
    dynamo.reset()
    assert dynamo.callback.callback_handler.start_callbacks == []
    watched.hooks.refresh()
    assert len(dynamo.callback.callback_handler.start_callbacks) == 1
    scaler()(torch.ones(2), 1)
    assert len(watched.texts("compile")) == 2
    assert watched.hooks.values()["compiles"] == 2


def test_more_compiles_in_a_step_than_torch_remembers(watched: Watched, dynamo: Any) -> None:
    """torch keeps the last 64, here 3: the callbacks read them in time."""
    import torch

    scale, x = scaler(), torch.ones(2)
    dynamo.utils.set_compilation_metrics_limit(3)
    try:
        for factor in range(7):
            scale(x, factor)
    finally:
        dynamo.utils.set_compilation_metrics_limit(64)
    watched.hooks.refresh()
    assert watched.hooks.values()["compiles"] == 7


def test_closing_takes_the_callbacks_out(dynamo: Any) -> None:
    watched = Watched()
    watched.hooks.close()
    watched.hooks.close()
    handler = dynamo.callback.callback_handler
    assert (handler.start_callbacks, handler.end_callbacks) == ([], [])


def test_the_program_keeps_its_warnings_logs_and_filters(dynamo: Any) -> None:
    def state() -> tuple[object, ...]:
        loggers = [logging.getLogger(name) for name in ("torch", "torch._dynamo", None)]
        handlers = [(logger.level, tuple(logger.handlers)) for logger in loggers]
        return (
            *handlers,
            warnings.showwarning,
            tuple(warnings.filters),
            os.environ.get("TORCH_LOGS"),
        )

    before = state()
    watched = Watched()
    scaler()(__import__("torch").ones(2), 1)
    assert watched.texts("compile")
    assert state() == before
    watched.hooks.close()


def test_an_eager_flex_attention_is_said_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.flex_attention as flex

    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", set())
    assert watched.texts("eager_flex") == []
    flex._WARNINGS_SHOWN.add("flex_attention_performance")
    for _ in range(2):
        watched.hooks.refresh()
    assert watched.texts("eager_flex") == ["flex_attention was called without torch.compile"]


class FakeHandler:
    """Dynamo's callbacks, run by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start_callbacks: list[Callable[[Any], None]] = []
        self.end_callbacks: list[Callable[[Any], None]] = []
        self.register_start_callback = self.start_callbacks.append
        self.register_end_callback = self.end_callbacks.append
        FakeCuda().install(monkeypatch)
        module = SimpleNamespace(callback_handler=self)
        monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)

    def compile(self, trigger: str, number: str) -> None:
        said = SimpleNamespace(callback_trigger=SimpleNamespace(name=trigger), compile_id=number)
        for callback in (*self.start_callbacks, *self.end_callbacks):
            callback(said)


def test_without_torchs_list_the_callbacks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = FakeHandler(monkeypatch)
    watched = Watched()
    handler.compile("DYNAMO", "0/0")
    handler.compile("LAZY_BACKWARD", "0/0")
    assert watched.texts("compile") == ["0/0", "0/0"]
    assert watched.hooks.values()["compiles"] == 2


def test_a_recording_of_a_cuda_graph_is_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = FakeHandler(monkeypatch)
    watched = Watched()
    handler.compile("CUDAGRAPH_RECORDING", "3/0")
    assert watched.texts("capture") == ["graph of compile 3/0"]
    assert watched.hooks.values() == {"captures": 1}


def test_a_refused_cuda_graph_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHandler(monkeypatch)
    why = "skipping cudagraphs due to cpu device (primals_1)"
    entry = SimpleNamespace(co_name="f", compile_id="0/0", cudagraph_skip_reason=why)
    utils = SimpleNamespace(get_compilation_metrics=list)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    watched = Watched()
    utils.get_compilation_metrics = lambda: [entry]
    assert watched.texts("capture_skip") == [f"f: {why}"]


def test_a_torch_that_answers_otherwise_ends_the_events_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handler = FakeHandler(monkeypatch)
    utils = SimpleNamespace(get_compilation_metrics=lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    watched = Watched()
    handler.compile("CUDAGRAPH_RECORDING", "0/0")  # in the program's compile: must not raise
    watched.hooks.refresh()
    assert caplog.messages == ["compile events are no longer recorded"]


def test_a_forked_child_does_nothing_even_where_the_lock_was_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = FakeHandler(monkeypatch)
    watched = Watched()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    done = threading.Event()

    def child() -> None:
        handler.compile("CUDAGRAPH_RECORDING", "0/0")
        done.set()

    with watched.hooks._lock:
        threading.Thread(target=child).start()
        assert done.wait(10)
    assert watched.events == []
