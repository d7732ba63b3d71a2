"""Whole training runs on a tiny target: their configuration, faults in their workers, comparisons."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.checkpoint.store import load_checkpoint
from draftline.config.load import build_config
from draftline.config.schema import Config

# The module that looks up `interrupts`; the one line to change when that moves.
from draftline.train import loop as program
from tests.support.recordings import read_rows

WAIT_S = 300.0
_WORDS = (
    "hello",
    "there",
    "what",
    "is",
    "a",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "ran",
    "away",
    "again",
)


def write_talks(path: Path, count: int = 12) -> Path:
    """Conversations of about a hundred tokens, all different."""
    with path.open("w") as file:
        for n in range(count):
            words = [_WORDS[(n * 5 + i * (n + 1)) % len(_WORDS)] for i in range(30)]
            turns = [
                {"role": "user", "content": " ".join(words[:4])},
                {"role": "assistant", "content": " ".join(words)},
            ]
            file.write(json.dumps({"id": str(n), "messages": turns}) + "\n")
    return path


def tree(run: Path, target: Path, data: Path) -> dict[str, Any]:
    """Eight steps of 8 anchors on packs of 160 tokens, noise and average included."""
    return {
        "run": {"dir": str(run), "device": "cpu", "seed": 3},
        "target": {"path": str(target), "tap_layers": [1, 2]},
        "drafter": {"layers": 1},
        "block_size": 4,
        "token_budget": 160,
        "max_batch_size": 4,
        "max_anchors": 8,
        "data": {"train": [str(data)], "max_length": 128},
        "features": {"noise": 0.1},
        "train": {
            "steps": 8,
            "learning_rate": 1e-2,
            "ema": 0.9,
            "log_every": 2,
            "checkpoint_every": 3,
            "trackers": [],
        },
    }


def configured(run: Path, target: Path, data: Path, *overrides: str) -> Config:
    return build_config(tree(run, target, data), list(overrides))


def workers(targets: int, drafters: int) -> tuple[str, str]:
    """Overrides for so many workers on the CPU."""
    return (
        f"topology.targets=[{','.join(['cpu'] * targets)}]",
        f"topology.drafters=[{','.join(['cpu'] * drafters)}]",
    )


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    groups = load_checkpoint(checkpoint).tensors
    return {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}


def assert_same(left: Path, right: Path, *, most: float = 0.0) -> None:
    """The same tensors in both checkpoints: to the last bit, or no more than `most` apart."""
    a, b = tensors(left), tensors(right)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if most:
            torch.testing.assert_close(b[name], tensor, rtol=most, atol=most, msg=name)
        else:
            assert torch.equal(tensor, b[name]), name


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_rows(run_dir / "metrics.jsonl")


def events(run_dir: Path) -> list[dict[str, Any]]:
    return read_rows(run_dir / "events.jsonl")


def before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[..., None]
) -> None:
    """Has `call(thread_name, *arguments)` run before each call of the method."""
    original = getattr(owner, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        call(threading.current_thread().name, *args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, hooked)


def after(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: Callable[..., None]
) -> None:
    """Has `call(thread_name, *arguments)` run after each call of the method."""
    original = getattr(owner, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call(threading.current_thread().name, *args)
        return result

    monkeypatch.setattr(owner, name, hooked)


class CtrlC:
    """Sends SIGINT to this process from a worker, and returns when the run has noticed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._interrupted: threading.Event | None = None
        original = program.interrupts

        @contextmanager
        def watched() -> Iterator[threading.Event]:
            with original() as interrupted:
                self._interrupted = interrupted
                yield interrupted

        monkeypatch.setattr(program, "interrupts", watched)

    def __call__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.noticed()

    def noticed(self) -> None:
        """Returns when a SIGINT, whoever sent it, was noticed."""
        assert self._interrupted is not None, "there is no run"
        assert self._interrupted.wait(WAIT_S), "nobody noticed"


def environment(**variables: object) -> dict[str, str]:
    """That of a process which imports this module, and is no part of a torchrun."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept["PYTHONPATH"] = str(Path(__file__).parents[2])
    return kept | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def error_lines(err: str) -> list[str]:
    """The lines of a command's stderr that say how it failed; it must hold no traceback."""
    assert "Traceback" not in err, err
    return [line for line in err.splitlines() if line.startswith("error:")]


def worker_threads() -> list[str]:
    """Names of the threads of runs that are alive."""
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n.startswith(("drafter-", "target-", "checkpoint-writer"))]
