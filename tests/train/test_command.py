"""`draftline train` in processes of its own: how it fails, and how it is interrupted.

All of them start together; each waits for its test.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftline.checkpoint.store import checkpoint_paths, load_checkpoint
from draftline.train.loop import train
from tests.support.forked import Forked
from tests.support.runs import (
    WAIT_S,
    assert_same,
    configured,
    environment,
    error_lines,
    workers,
    write_talks,
)

# Something is in the drafter's fourth update, behind the checkpoint of the second.
SCRIPT = """
import sys, threading
import pytest
from draftline.cli.app import main
from draftline.runtime import workers
from draftline.train.step.step import TrainStep
from tests.support.runs import CtrlC, after

mode = sys.argv.pop(1)
patch, count, forever = pytest.MonkeyPatch(), 0, threading.Event()
patch.setattr(workers, "_GRACE_S", 0.5)
ctrl_c = CtrlC(patch)

def updated(*_):
    global count
    count += 1
    if count != 4:
        return
    if mode == "error":
        raise ValueError("the cause of it")
    if mode == "hang":
        forever.wait()
    print("in step", flush=True)
    ctrl_c.noticed()
    if mode == "twice":
        print("asked to stop", flush=True)
        forever.wait()

after(patch, TrainStep, "update", updated)
main()
"""
OPTIONS = {"error": (), "hang": ("topology.deadline_s=5",), "once": (), "twice": ()}


@dataclass
class Process:
    """One command and its run directory."""

    run: Path
    child: Forked

    def line(self) -> str:
        return self.child.line(WAIT_S)

    def end(self) -> tuple[int | None, str, str]:
        """Exit code, output and errors."""
        out, err = self.child.communicate(timeout=WAIT_S)
        return self.child.returncode, out, err

    @property
    def steps(self) -> list[int]:
        """The steps of its checkpoints, all of them whole."""
        paths = checkpoint_paths(self.run / "checkpoints")
        return [load_checkpoint(path).step for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("command")
    write_talks(made / "talks.jsonl")
    return made


@pytest.fixture(scope="module")
def processes(folder: Path, target_dir: Callable[[str], Path]) -> Iterator[dict[str, Process]]:
    made = {}
    for mode, options in OPTIONS.items():
        config = configured(
            folder / mode,
            target_dir("llama"),
            folder / "talks.jsonl",
            *workers(1, 1),
            "train.steps=6",
            "train.checkpoint_every=2",
        )
        file = folder / f"{mode}.yaml"
        file.write_text(config.to_yaml())
        child = Forked(SCRIPT, mode, "train", str(file), *options, env=environment())
        made[mode] = Process(folder / mode, child)
    yield made
    for process in made.values():
        process.child.kill()


@pytest.fixture(scope="module")
def continued(folder: Path, target_dir: Callable[[str], Path]) -> Callable[[str], Path]:
    """Trains the rest of a run, or a whole one, and returns its last checkpoint."""

    def go_on(name: str) -> Path:
        config = configured(
            folder / name,
            target_dir("llama"),
            folder / "talks.jsonl",
            *workers(1, 1),
            "train.steps=6",
            "train.checkpoint_every=2",
        )
        return train(config, resume=(folder / name).exists()).checkpoint

    return go_on


def test_a_failure_is_one_line_and_exits_with_1(
    processes: dict[str, Process], continued: Callable[[str], Path]
) -> None:
    code, _, err = processes["error"].end()
    assert code == 1, err
    [line] = error_lines(err)
    assert line.startswith("error: drafter-0 on cpu, step 4, ")
    assert line.endswith("ValueError: the cause of it")
    assert processes["error"].steps == [2]
    assert_same(continued("whole"), continued("error"))


def test_ctrl_c_ends_the_step_and_saves(
    processes: dict[str, Process], continued: Callable[[str], Path]
) -> None:
    process = processes["once"]
    assert process.line() == "in step"
    process.child.send_signal(signal.SIGINT)
    code, out, err = process.end()
    assert code == 130, err
    assert f"interrupted at step 4 of 6, saved in {process.run}" in out
    assert "--resume" in out
    assert not error_lines(err)
    assert process.steps == [4, 2]
    assert_same(continued("whole-again"), continued("once"))


def test_ctrl_c_twice_does_not_wait_for_the_step(processes: dict[str, Process]) -> None:
    """Which here would never end."""
    process = processes["twice"]
    assert process.line() == "in step"
    process.child.send_signal(signal.SIGINT)
    assert process.line() == "asked to stop"
    process.child.send_signal(signal.SIGINT)
    code, _, err = process.end()
    assert code == 130, err
    assert not error_lines(err)
    assert process.steps == [2]


def test_a_worker_that_hangs_is_left_behind(processes: dict[str, Process]) -> None:
    code, _, err = processes["hang"].end()
    assert code == 1, err
    [line] = error_lines(err)
    assert line.startswith("error: drafter-0 on cpu, step 4, ")
    assert line.endswith("s; it hangs")
    assert "left behind without an answer: drafter-0" in err
    assert processes["hang"].steps == [2]
