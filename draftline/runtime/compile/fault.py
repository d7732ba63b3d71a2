"""What torch raises about compiling, said as a CompileError with the function, device and reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from draftline.errors import CompileError

EAGER_FLEX = "flex_attention called without torch.compile"
_RECOMPILE = "torch.compile stance is 'fail_on_recompile'"
_FOREIGN_TRACE = "using FX to symbolically trace"
_REASONS_SHOWN = 3


def explain(
    error: Exception, name: str, device: str, function: Callable[..., Any] | None, *, sealed: bool
) -> CompileError | None:
    """The CompileError for what `function`, called `name` on `device`, raised; None when `error`
    is about something else.

    A refused recompile is one only while `sealed`: before, the stance is not the gate's.
    """
    kind, text = type(error).__name__, str(error)
    who = f"{name} on {device}"
    if EAGER_FLEX in text:
        return CompileError(
            f"{who} called flex_attention without compiling it, which materialises rows x keys "
            "scores; call it inside a function that went through the gate"
        )
    if _RECOMPILE in text and sealed:
        if reasons := _changed(text, function):
            return CompileError(
                f"{who} would have to compile again: {reasons}. Every shape, dtype and grad mode "
                "is fixed by the warm-up: warm this one too, or pad the input"
            )
        return CompileError(
            f"{who} would have to compile: it was never called in the warm-up. Warm it before the "
            "seal"
        )
    if kind == "FailOnRecompileLimitHit":
        return CompileError(
            f"{who} was compiled for as many shapes as torch allows one function (8 by default, "
            "torch._dynamo.config.recompile_limit); warm fewer shapes, or compile it once per shape"
        )
    if kind == "Unsupported":
        return CompileError(f"{who} cannot be compiled as one graph: {_graph_break(text)}")
    if _FOREIGN_TRACE in text:
        return CompileError(
            f"{who} was called while another thread traces: something compiles outside the gate. "
            "Run it inside warm() or late(); restart this process, its compiler state may be lost"
        )
    return None


def _changed(text: str, function: Callable[..., Any] | None) -> str:
    """The failed guards of a refused recompile, newest first, with the function's own names."""
    found = re.findall(r"^\s*- \d+/\d+: (.*)$", text, re.MULTILINE)
    reasons = list(dict.fromkeys(_named(r.partition("  # ")[0].strip(), function) for r in found))
    more = len(reasons) - _REASONS_SHOWN
    return "; ".join(reasons[:_REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _named(reason: str, function: Callable[..., Any] | None) -> str:
    """`args[0]` and `kwargs['by']` are the gate's own wrapper's names for the arguments."""
    try:
        names = list(inspect.signature(function).parameters) if function is not None else []
    except (TypeError, ValueError):  # a callable written in C has no signature
        names = []

    def positional(found: re.Match[str]) -> str:
        index = int(found[1])
        return names[index] if index < len(names) else found[0]

    reason = re.sub(r"\bargs\[(\d+)\]", positional, reason)
    return re.sub(r"\bkwargs\['(\w+)'\]", r"\1", reason)


def _graph_break(text: str) -> str:
    """The first line, torch's explanation, and the innermost user line."""
    lines = text.splitlines()
    said = [lines[0].rstrip(".")] if lines else []
    said += [x.strip() for x in lines if x.strip().startswith("Explanation:")][:1]
    if places := re.findall(r'File ".*?([^/"]+)", line (\d+), in (\S+)', text):
        file, line, function = places[-1]
        said.append(f"at {file}:{line} in {function}")
    return "; ".join(said)
