"""A process that two tracing threads have damaged is refused. tests/runtime/compile/test_race.py damages
a real one."""

from __future__ import annotations

import pytest
import torch

from draftline.errors import CompileError
from draftline.runtime.compile.tracing_state import check_tracing_state, tracing_scope


def test_a_sound_process_passes() -> None:
    check_tracing_state()


def test_a_flag_left_behind_means_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True, raising=False)
    with pytest.raises(CompileError, match=r"tracing flag is set although.*Restart it"):
        check_tracing_state()


def test_a_patched_module_call_means_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_: None)
    with pytest.raises(CompileError, match=r"nn.Module.__call__ is patched although.*Restart it"):
        check_tracing_state()


def test_the_scope_of_the_flag_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False, raising=False)
    assert "the gate is mandatory" in tracing_scope()
    monkeypatch.delattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag")
    assert "one tracing flag per thread" in tracing_scope()
    check_tracing_state()  # a torch without the flag
