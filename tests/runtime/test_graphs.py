"""On a CPU a replayed function is just called."""

from __future__ import annotations

import pytest
import torch

from draftline.runtime.graphs import Replayed


def test_on_a_cpu_warming_runs_nothing_and_every_call_runs_the_function() -> None:
    calls: list[int] = []
    replayed = Replayed(lambda: calls.append(1), torch.device("cpu"))
    replayed.warm()
    assert (calls, replayed.captured) == ([], False)
    replayed()
    replayed()
    assert calls == [1, 1]


def test_an_error_of_the_function_comes_through() -> None:
    def fails() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        Replayed(fails, torch.device("cpu"))()
