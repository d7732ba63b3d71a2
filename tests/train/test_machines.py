"""Several machines, as processes of one target and one drafter each, against one machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.checkpoint.store import checkpoint_paths, load_checkpoint
from draftline.config.schema import Config
from draftline.train.loop import train
from tests.support.forked import Forked
from tests.support.runs import (
    assert_same,
    configured,
    environment,
    error_lines,
    metrics,
    workers,
    write_talks,
)

WAIT_S = 300.0
# Rank and fault come from the environment; the fault is in machine 1's fifth update.
SCRIPT = """
import os
import pytest
from draftline.cli.app import main
from draftline.train.step.step import TrainStep
from tests.support.runs import CtrlC, after

patch, count = pytest.MonkeyPatch(), 0
press = CtrlC(patch)

def updated(*_):
    global count
    count += 1
    if count == 5 and os.environ["RANK"] == "1":
        if os.environ.get("FAULT") == "error":
            raise ValueError("the cause of it")
        if os.environ.get("FAULT") == "interrupt":
            press()

after(patch, TrainStep, "update", updated)
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("machines")
    write_talks(made / "talks.jsonl", 24)
    (made / "machine.py").write_text(SCRIPT)
    return made


@pytest.fixture(scope="module")
def config(folder: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    def build(name: str, *overrides: str) -> Config:
        return configured(
            folder / name,
            target_dir("llama"),
            folder / "talks.jsonl",
            "train.packs_per_step=2",
            "drafter.feature_scale=true",
            "topology.deadline_s=60",
            *overrides,
        )

    return build


@pytest.fixture(scope="module")
def one_machine(config: Callable[..., Config]) -> Path:
    """The checkpoint of one target and two drafters in one process."""
    return train(config("one", *workers(1, 2))).checkpoint


@pytest.fixture
def machines(
    folder: Path, config: Callable[..., Config]
) -> Callable[..., list[tuple[int | None, str, str]]]:
    """Exit code, output and errors of two processes without torchrun, by rank."""

    def start(name: str, *options: str, **variables: str) -> list[tuple[int | None, str, str]]:
        file = folder / f"{name}.yaml"
        file.write_text(config(name).to_yaml())
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
        processes = [
            Forked(
                SCRIPT,
                "train",
                str(file),
                *options,
                env=environment(RANK=rank, **address, **variables),
            )
            for rank in range(2)
        ]
        said = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=WAIT_S)
                said.append((process.returncode, out, err))
        finally:
            for process in processes:
                process.kill()
        return said

    return start


def test_two_machines_train_what_one_does_bit_for_bit(
    folder: Path, config: Callable[..., Config], one_machine: Path
) -> None:
    """Under torchrun: equal to one target and two drafters, and to one of each."""
    (folder / "two.yaml").write_text(config("two").to_yaml())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(folder / "machine.py"), "train"),
            str(folder / "two.yaml"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    two = checkpoint_paths(folder / "two" / "checkpoints")[0]
    assert_same(one_machine, two)
    assert_same(train(config("alone", *workers(1, 1))).checkpoint, two)
    # The first machine writes what all have done, the other one its own log.
    together, alone = metrics(folder / "two"), metrics(folder / "one")
    assert [line["step"] for line in together] == [2, 4, 6, 8]
    for mine, theirs in zip(together, alone, strict=True):
        for key in ("blocks", "accepted", "anchors", "bad_packs"):
            assert mine[key] == theirs[key], key
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert (folder / "two" / "machine-1" / "events.jsonl").exists()
    assert not (folder / "two" / "machine-1" / "checkpoints").exists()


def test_a_failure_ends_the_other_machine_and_is_named_there(
    folder: Path,
    config: Callable[..., Config],
    machines: Callable[..., list[tuple[int | None, str, str]]],
    one_machine: Path,
) -> None:
    other, failed = machines("failed", FAULT="error")
    assert (other[0], failed[0]) == (1, 1)
    [mine] = error_lines(failed[2])
    assert mine == "error: drafter-0 on cpu, step 5, update: ValueError: the cause of it"
    [theirs] = error_lines(other[2])
    assert "machine 1 failed: drafter-0 on cpu, step 5, update: ValueError: the cause" in theirs
    assert checkpoint_paths(folder / "failed" / "checkpoints")[0].name == "step-00000003"
    done = train(config("failed", *workers(1, 2)), resume=True)
    assert_same(one_machine, done.checkpoint)


def test_ctrl_c_on_one_machine_stops_all_at_one_step_and_all_continue(
    folder: Path,
    machines: Callable[..., list[tuple[int | None, str, str]]],
    one_machine: Path,
) -> None:
    first = machines("stopped", FAULT="interrupt")
    for code, _, err in first:
        assert code in (0, 130), err
        assert not error_lines(err)
    assert first[1][0] == 130
    path = checkpoint_paths(folder / "stopped" / "checkpoints")[0]
    assert load_checkpoint(path).step == 5
    for code, out, err in machines("stopped", "--resume"):
        assert code == 0, err
        assert "trained to step 8, " in out
    assert_same(one_machine, checkpoint_paths(folder / "stopped" / "checkpoints")[0])
