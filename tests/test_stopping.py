"""Ctrl-C reaches the command, whatever the code that it meets would catch."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline.stopping import stopping

# Raises the signal while it is imported, and catches whatever comes of it, as lazy packages do.
_LAZY = """
import signal, time
passed = False
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.2)
    passed = True
except BaseException:
    pass
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lazy_as_transformers.py").write_text(_LAZY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_as_transformers", raising=False)
    return "lazy_as_transformers"


def test_an_import_is_finished_first(lazy: str) -> None:
    def imports() -> None:
        importlib.import_module(lazy)
        assert sys.modules[lazy].passed
        time.sleep(5)

    with stopping(), pytest.raises(KeyboardInterrupt):
        imports()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_finalizer_swallows_nothing() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def finalizes() -> None:
        Finalized()
        time.sleep(5)

    with stopping(), pytest.raises(KeyboardInterrupt):
        finalizes()


def test_elsewhere_it_is_raised_at_once() -> None:
    with stopping(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_one_does_not_wait_for_the_import(lazy: str, tmp_path: Path) -> None:
    text = _LAZY.replace("time.sleep(0.2)", "signal.raise_signal(signal.SIGINT)")
    (tmp_path / f"{lazy}.py").write_text(text)
    program = (
        "from draftline.stopping import stopping\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"with stopping():\n import {lazy}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_one_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
