"""What torch keeps about tracing for the whole process, and the marks that an accident leaves."""

from __future__ import annotations

import torch

from draftline.errors import CompileError


def check_tracing_state() -> None:
    """CompileError when an accident between two tracing threads has left its marks.

    Neither mark goes away by itself: with the first every compiled call fails, with the second
    every module runs through a tracer's patch.
    """
    tracing = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
    original = getattr(torch.fx._symbolic_trace, "_orig_module_call", torch.nn.Module.__call__)
    marks = ["the FX tracing flag is set"] if tracing else []
    marks += ["nn.Module.__call__ is patched"] if torch.nn.Module.__call__ is not original else []
    if marks:
        raise CompileError(
            f"{' and '.join(marks)} although nobody traces: two threads traced at the same time "
            "outside the gate and left the process damaged. Restart it; it cannot be repaired"
        )


def tracing_scope() -> str:
    """Whether this torch's FX tracing flag is the process's or a thread's own (2.14 and later)."""
    if hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        return f"torch {torch.__version__} has one tracing flag per process: the gate is mandatory"
    return (
        f"torch {torch.__version__} has one tracing flag per thread; patches are still a process's"
    )
