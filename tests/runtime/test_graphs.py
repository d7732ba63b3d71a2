"""On a CPU a replayed function is just called; what it reads comes in through fixed buffers only."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from draftline.errors import RunError
from draftline.runtime.graphs import FixedInputs, GraphPool, Replayed

CPU = torch.device("cpu")


@pytest.mark.parametrize("pool", [None, GraphPool(CPU)])
def test_on_a_cpu_warming_runs_nothing_and_every_call_runs_the_function(
    pool: GraphPool | None,
) -> None:
    calls: list[int] = []
    replayed = Replayed(lambda: calls.append(1), CPU, pool=pool)
    replayed.warm()
    assert (calls, replayed.captured) == ([], False)
    replayed()
    replayed()
    assert calls == [1, 1]


def test_a_pool_of_a_cpu_holds_nothing() -> None:
    pool = GraphPool(CPU)
    assert (pool.device, pool.stream, pool.handle) == (CPU, None, None)


def test_an_error_of_the_function_comes_through() -> None:
    def fails() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        Replayed(fails, CPU)()


def buffers() -> dict[str, Tensor]:
    return {"ids": torch.zeros(4, dtype=torch.int32), "features": torch.zeros(4, 6)}


def values() -> dict[str, Tensor]:
    return {"features": torch.rand(4, 6), "ids": torch.arange(4, dtype=torch.int32)}


def test_a_function_reads_what_was_copied_last() -> None:
    fixed = FixedInputs(buffers())
    seen: list[float] = []
    replayed = Replayed(lambda: seen.append(float(fixed.buffers["features"].sum())), CPU)
    places = {name: tensor.data_ptr() for name, tensor in fixed.buffers.items()}
    wanted = []
    for _ in range(2):
        given = values()
        fixed.copy(given)
        wanted.append(float(given["features"].sum()))
        given["features"].zero_()  # the buffers hold a copy
        replayed()
    assert seen == wanted
    assert wanted[0] != wanted[1]
    assert fixed.buffers["ids"].tolist() == [0, 1, 2, 3]
    assert {name: tensor.data_ptr() for name, tensor in fixed.buffers.items()} == places


@pytest.mark.parametrize(
    ("name", "value", "index", "signatures"),
    [
        ("ids", torch.zeros(5, dtype=torch.int32), 0, ("[4] int32", "[5] int32")),
        ("ids", torch.zeros(4, dtype=torch.int64), 0, ("[4] int32", "[4] int64")),
        ("ids", torch.zeros(1, dtype=torch.int32), 0, ("[4] int32", "[1] int32")),
        ("features", torch.zeros(1, 4, 2, 3), 1, ("[4, 6] float32", "[1, 4, 2, 3] float32")),
        ("features", torch.zeros(1, 4, 6), 1, ("[4, 6] float32", "[1, 4, 6] float32")),
        ("features", torch.zeros(4, 6).bfloat16(), 1, ("[4, 6] float32", "[4, 6] bfloat16")),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_index_and_name(
    name: str, value: Tensor, index: int, signatures: tuple[str, str]
) -> None:
    """Even one that would broadcast: a graph reads every place of its buffers."""
    expected, seen = map(re.escape, signatures)
    fixed = FixedInputs(buffers())
    with pytest.raises(RunError, match=rf"input {index} \({name}\).*{expected}, seen {seen};"):
        fixed.copy(values() | {name: value})
