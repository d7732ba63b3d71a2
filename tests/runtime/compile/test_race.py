"""Threads that compile and step, without the gate and with it: tests/runtime/compile/race.py in processes
of its own, because what the first two do to a process cannot be undone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.runs import environment

RACE = Path(__file__).with_name("race.py")
FLAG = "RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized"
PATCH = "NameError: module is not installed as a submodule"


@cache
def raced(mode: str) -> dict[str, Any]:
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(RACE.parent)!r})\n"
        f"runpy.run_path({str(RACE)!r}, run_name='__main__')"
    )
    done = Forked(script, mode, env=environment())
    try:
        out, err = done.communicate(timeout=180)
    finally:
        done.kill()
    assert done.returncode == 0, err[-4000:]
    report: dict[str, Any] = json.loads(out)
    return report


# Without the gate


def test_without_it_stepping_while_another_compiles_fails() -> None:
    report = raced("ungated")
    stepping = report["stepping"]
    assert stepping["errors"] == []
    assert [error.partition(": ")[2] for error in stepping["target"]] == [PATCH] * 2
    if report["flag_per_process"]:
        assert len(stepping["drafter"]) == 2
        assert all(FLAG in error for error in stepping["drafter"])
    else:
        assert stepping["drafter"] == []


def test_without_it_one_backward_is_compiled_by_every_thread_at_once() -> None:
    double = raced("ungated")["double"]
    assert double == {
        "errors": [],
        "forward_compiles": 1,
        "backward_compiles": 3,
        "most_at_once": 3,
    }


def test_a_process_damaged_by_two_traces_is_not_sealed() -> None:
    overlap = raced("poisoned")["overlap"]
    assert "nn.Module.__call__ is patched" in overlap["refused"]
    assert "Restart" in overlap["refused"]


# With it


def test_with_it_each_worker_compiles_alone_and_all_step_with_eager_values() -> None:
    report = raced("gated")["gated"]
    assert report["errors"] == []
    # 3 workers x 2 shapes, forward and backward; the gate has counted both.
    assert report["compiles"] == [6, 6, 12]
    assert report["most_at_once"] == 1
    assert report["intruders_in_warm_up"] == []
    assert sorted(row[:4] for row in report["rows"][:3]) == [
        ["drafter forward+backward", f"cpu:{index}", "compiled", 4] for index in range(3)
    ]
    assert report["table"][-1].startswith("3 of 3 warmed in ")


def test_with_it_a_shape_that_was_not_warmed_is_refused_by_name() -> None:
    report = raced("gated")["gated"]
    for needed in ("drafter on cpu:1", "tensor 'x' size mismatch at index 0", "actual 11"):
        assert needed in report["unwarmed"]
    assert report["compiles_after_refusal"] == [6, 6]


def test_a_late_warm_up_stops_every_worker_and_lets_them_go_on() -> None:
    report = raced("gated")["gated"]
    assert report["intruders_in_late"] == []
    assert report["compiles_after_late"] == [7, 7, 14]
    assert report["rows"][3:] == [["drafter late", "cpu:1", "compiled", 2, True]]
    assert report["errors"] == []
