"""torch's errors about compiling, said with function, device and reason. The texts are torch's
(2.11, 2.13 and 2.14 alike); tests/runtime/test_compiled.py has torch raise them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftline.runtime.compile.fault import explain

REFUSED = (
    "Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: "
    "'/somewhere/probe.py', function name: 'step_cpu0', line number: 7"
)
GUARDS = """
    triggered by the following guard failure(s):
    - 0/2: tensor 'args[0]' size mismatch at index 0. expected 4, actual 3
    - 0/1: not kwargs                                # def wrapper(*args, **kwargs): # mp/probe.py:7
    - User stack trace:
    -   File "/somewhere/probe.py", line 7, in step_cpu0
    -     def wrapper(*args, **kwargs): return inner(*args, **kwargs)
    - 0/0: tensor 'args[0]' size mismatch at index 0. expected 4, actual 3"""


def scale(x: Any, w: Any, *, by: float = 2.0) -> Any:
    return x * w * by


def said(text: str, *, sealed: bool = True, function: Any = scale) -> str:
    fault = explain(RuntimeError(text), "drafter", "cuda:1", function, sealed=sealed)
    return str(fault) if fault is not None else ""


def test_a_refused_recompile_names_function_device_and_each_changed_argument_once() -> None:
    text = said(REFUSED + GUARDS)
    assert text.startswith(
        "drafter on cuda:1 would have to compile again: tensor 'x' size mismatch at index 0. "
        "expected 4, actual 3; not kwargs. "
    )
    assert "File" not in text


def test_a_keyword_has_its_own_name() -> None:
    guard = "\n    - 0/0: tensor 'kwargs['by']' dtype mismatch. expected Float, actual Double"
    assert "tensor 'by' dtype mismatch" in said(REFUSED + guard)


def test_more_reasons_than_can_be_read_are_counted() -> None:
    guards = "".join(f"\n  - 0/{n}: tensor 'args[1]' expected {n}, actual 9" for n in range(5))
    text = said(REFUSED + guards)
    assert "tensor 'w' expected 0, actual 9; " in text
    assert "expected 3" not in text
    assert "; and 2 more" in text


@pytest.mark.parametrize("function", [lambda *given: given, math.hypot, dict.fromkeys, None])
def test_an_argument_without_a_name_keeps_torchs(function: Any) -> None:
    guard = "\n    - 0/0: tensor 'args[7]' size mismatch"
    assert "tensor 'args[7]' size mismatch" in said(REFUSED + guard, function=function)


def test_a_function_that_was_never_warmed_is_told_so() -> None:
    assert "drafter on cuda:1 would have to compile: it was never called" in said(REFUSED)


def test_a_recompile_is_refused_by_the_gate_only_once_sealed() -> None:
    assert said(REFUSED + GUARDS, sealed=False) == ""


@pytest.mark.parametrize("sealed", [True, False])
def test_an_eager_flex_attention_and_a_foreign_trace_are_faults_at_any_time(sealed: bool) -> None:
    flex = "flex_attention called without torch.compile() - this will use an unfused"
    assert "drafter on cuda:1 called flex_attention without compiling" in said(flex, sealed=sealed)
    trace = "Detected that you are using FX to symbolically trace a dynamo-optimized function."
    assert "something compiles outside the gate" in said(trace, sealed=sealed)


def test_another_error_is_not_about_compiling() -> None:
    assert said("CUDA out of memory") == ""
    assert said("") == ""
