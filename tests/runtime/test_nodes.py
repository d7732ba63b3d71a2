"""Several machines, played by processes of this one that speak over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from draftline.errors import ConfigError, RunError
from draftline.runtime.nodes import Nodes
from tests.support.forked import Forked
from tests.support.runs import environment

_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_START = """
import json, os, sys, threading, time
import torch
from draftline.choices import Choices
from draftline.errors import RunError
from draftline.runtime.nodes import Nodes
from draftline.runtime.reduce import Reducer

nodes = Nodes.from_environment("cpu", 60.0)
rank = nodes.rank
said = {"rank": rank, "count": nodes.count, "first": nodes.is_first}

def tell():
    # Whole lines from processes that share a pipe.
    os.write(1, (json.dumps(said) + "\\n").encode())
"""
_REDUCE = """
DRAFTERS = 2
def part(machine, drafter):
    generator = torch.Generator().manual_seed(10 * machine + drafter)
    return torch.randn(501, generator=generator)

def in_threads(work):
    def guarded(drafter):
        try:
            work(drafter)
        except Exception as error:
            errors[drafter] = f"{type(error).__name__}: {error}"
    errors = {}
    threads = [threading.Thread(target=guarded, args=(d,)) for d in range(DRAFTERS)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return errors

with nodes:
    buffers = [part(rank, d) for d in range(DRAFTERS)]
    reducer = Reducer(buffers, how="auto", choices=Choices(), nodes=nodes, deadline_s=60.0)
    said["errors"] = in_threads(reducer.reduce)
    expected = sum(part(m, d) for m in range(nodes.count) for d in range(DRAFTERS))
    said["right"] = [torch.allclose(b, expected, rtol=1e-5, atol=1e-5) for b in buffers]
    said["same"] = in_threads(lambda d: reducer.check_replicas(d, buffers[d], 100))
    if rank == 1:
        buffers[1][7] += 1
    said["different"] = in_threads(lambda d: reducer.check_replicas(d, buffers[d], 200))
"""
_CALLS = """
    tensor = torch.arange(3.0) * 10**rank
    nodes.all_reduce(tensor)
    said["sum"] = tensor.tolist()
    tensor = torch.full((2,), float(rank))
    nodes.broadcast(tensor)
    said["broadcast"] = tensor.tolist()
    said["object"] = nodes.broadcast_object({"from": rank})
    said["gathered"] = nodes.gather(("r", rank))
    said["agree"] = [nodes.agree(False), nodes.agree(rank == 2), nodes.agree(True)]
    # Three threads that use the three groups in another order on each machine.
    got = {}
    kinds = {
        "agree": lambda: nodes.agree(rank == 1),
        "gather": lambda: nodes.gather(rank),
        "sum": lambda: nodes.all_reduce(torch.ones(1)),
    }
    names = list(kinds)[rank:] + list(kinds)[:rank]
    threads = []
    for name in names:
        run = lambda name=name: got.update({name: kinds[name]()})
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    said["threads"] = got
    before = nodes.poll_failure()
    nodes.gather(None)
    if rank == 1:
        nodes.fail("out of memory\\non cuda:3")
    nodes.gather(None)
    if rank == 2:
        nodes.fail("too late to be the first")
    nodes.gather(None)
    said["news"] = [before, nodes.poll_failure()]
tell()
"""
_DIES = """
nodes.gather(None)
if rank == 0:
    nodes.fail("the disk is full")
    tell()
    os._exit(3)
try:
    with nodes:
        nodes.all_reduce(torch.ones(4))
except RunError as error:
    said["error"] = str(error)
end = time.monotonic() + 60
while nodes.poll_failure() is None and time.monotonic() < end:
    time.sleep(0.01)
said["news"] = nodes.poll_failure()
# Not a failure of its own: the run is ending anyway.
nodes.fail("this goes nowhere")
tell()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(script: str, count: int) -> list[dict[str, Any]]:
    """What each of `count` processes said, by rank; rank 0 serves the store."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [
        Forked(_START + script, env=environment(RANK=rank, WORLD_SIZE=count, **address))
        for rank in range(count)
    ]
    said = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert out, err
            said.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
    return said


# Between processes


@pytest.fixture(scope="module")
def three_machines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What three machines of two drafters, started by torchrun, said."""
    script = tmp_path_factory.mktemp("nodes") / "machine.py"
    script.write_text(_START + _REDUCE + _CALLS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "3", str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = sorted(map(json.loads, done.stdout.splitlines()), key=lambda s: s["rank"])
    assert [s["rank"] for s in said] == [0, 1, 2], done.stderr
    return said


def test_three_machines_sum_copy_and_agree(three_machines: list[dict[str, Any]]) -> None:
    assert [s["first"] for s in three_machines] == [True, False, False]
    for s in three_machines:
        assert s["count"] == 3
        assert s["sum"] == [0.0, 111.0, 222.0]
        assert s["broadcast"] == [0.0, 0.0]
        assert s["object"] == {"from": 0}
        assert s["gathered"] == [["r", 0], ["r", 1], ["r", 2]]
        assert s["agree"] == [False, True, True]
        assert s["threads"] == {"agree": True, "gather": [0, 1, 2], "sum": None}


def test_the_others_hear_of_the_first_failure(three_machines: list[dict[str, Any]]) -> None:
    heard = [None, "machine 1 failed: out of memory\non cuda:3"]
    assert [s["news"] for s in three_machines] == [heard, [None, None], heard]


def test_all_drafters_of_all_machines_end_with_one_sum(
    three_machines: list[dict[str, Any]],
) -> None:
    for s in three_machines:
        assert (s["errors"], s["right"], s["same"]) == ({}, [True, True], {})
        assert s["different"].keys() == {"0", "1"}
        assert s["different"]["0"].startswith("RunError: step 200: ")
        assert "same: drafter 1 of machine 1 has (" in s["different"]["0"]
        assert s["different"]["1"].startswith("BrokenBarrierError")
        assert s["different"] == three_machines[0]["different"]


def test_a_machine_that_dies_is_named_and_nobody_hangs() -> None:
    """Machine 0 serves the store, so the other loses it too."""
    _, other = run(_DIES, 2)
    assert other["error"].startswith(
        "machine 1 of 2: the sum over machines failed (deadline 60 s): "
    )
    known = ("machine 0 failed: the disk is full", "lost the store")
    assert any(text in other["error"] for text in known)
    assert "machine 1 lost the store that machine 0's side serves" in other["news"]


# The environment


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize("count", [None, "1"])
def test_one_machine_needs_no_nodes(count: str | None, clean: pytest.MonkeyPatch) -> None:
    if count is not None:
        clean.setenv("WORLD_SIZE", count)
    assert Nodes.from_environment("cpu", 1.0) is None
    assert Nodes.from_environment("cuda", 1.0) is None


@pytest.mark.parametrize(
    ("device_type", "variables", "message"),
    [
        ("cpu", {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        ("cpu", {"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR, MASTER_PORT is not set"),
        (
            "cuda",
            {
                "WORLD_SIZE": "4",
                "RANK": "0",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "LOCAL_WORLD_SIZE": "2",
            },
            r"LOCAL_WORLD_SIZE=2: draftline runs one process per machine.*--nproc-per-node 1",
        ),
    ],
)
def test_an_environment_that_cannot_be_run_is_the_callers_fault(
    device_type: Any, variables: dict[str, str], message: str, clean: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        clean.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        Nodes.from_environment(device_type, 1.0)


def test_machines_that_do_not_come_are_an_error_with_rank_and_address(
    clean: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    for variable, value in (("WORLD_SIZE", 2), ("RANK", 1), ("MASTER_PORT", port)):
        clean.setenv(variable, str(value))
    clean.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        RunError,
        match=rf"machine 1 of 2 could not join the others at 127\.0\.0\.1:{port} within 0\.2 s",
    ):
        Nodes.from_environment("cpu", 0.2)
    assert not dist.is_initialized()
