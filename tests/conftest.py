"""What every test shares: one thread a process, no network, and tiny targets."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Set before torch is imported: on a shared machine, threads that wait for each other over matrices
# this small take a hundred times longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# A suite that runs in the background or under nohup inherits signals that are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# importlib mode puts no folder on the path; tests/support is imported from the root.
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny saved target by its family, made once a session; do not write into it."""
    made: dict[str, Path] = {}

    def build(family: str = "llama") -> Path:
        from tests.support.fakes import tiny_target_dir

        if family not in made:
            made[family] = tiny_target_dir(tmp_path_factory.mktemp(family) / "target", family)
        return made[family]

    return build
