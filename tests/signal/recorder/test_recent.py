"""The latest part of a recording as a Trace."""

from __future__ import annotations

import numpy as np

from draftline.signal import latest
from draftline.signal.recorder.nvml import Reading
from draftline.signal.recorder.recent import Recent
from draftline.signal.trace import Event


def step(number: int, device: str = "0", **values: float) -> dict[str, object]:
    head = {"kind": "step", "time_s": 10.0 + number, "wall_ms": None if number == 0 else 5.0}
    return {**head, "step": number, "device": device, **values}


def test_columns_that_nobody_knew_are_absent_and_gaps_are_nan() -> None:
    kept = Recent()
    kept.step(step(0, frames=2))
    kept.step(step(1, tokens=9))
    (steps,) = kept.trace("x").steps
    assert set(steps.values) == {"frames", "tokens"}
    np.testing.assert_array_equal(steps.values["frames"], [2, np.nan])
    np.testing.assert_array_equal(steps.wall_ms, [np.nan, 5])
    np.testing.assert_array_equal(steps.time_s, [10, 11])


def test_a_process_missing_from_a_told_list_holds_nothing_and_from_an_untold_one_is_unknown() -> (
    None
):
    kept = Recent()
    for time_s, processes in enumerate(({7: 100, 8: None}, {}, None)):
        kept.sample(Reading("0", float(time_s), 5, 10, None, processes))
    (samples,) = kept.trace("x").samples
    np.testing.assert_array_equal(samples.by_process[7], [100, 0, np.nan])
    np.testing.assert_array_equal(samples.by_process[8], [np.nan, 0, np.nan])
    assert samples.total_bytes == 10
    assert np.isnan(samples.util_pct).all()


def test_memory_is_bounded_for_each_device() -> None:
    kept = Recent()
    for number in range(latest.STEPS + 5):
        kept.step(step(number, "0"))
    kept.step(step(0, "1"))
    for number in range(latest.EVENTS + 5):
        kept.event(Event(float(number), "compile"))
    trace = kept.trace("x")
    lengths = {steps.device: len(steps.number) for steps in trace.steps}
    assert lengths == {"0": latest.STEPS, "1": 1}
    assert trace.steps[0].number[0] == 5
    assert len(trace.events) == latest.EVENTS


def test_what_becomes_known_later_is_added_to_the_program() -> None:
    kept = Recent()
    start = {
        "program": "p",
        "pid": 3,
        "expects": ["compiled"],
        "facts": {"stance": None, "cpus": 2},
    }
    kept.program(start)
    kept.program({"facts": {"stance": "force_eager"}, "devices": {}})
    program = kept.trace("x").program
    assert program is not None
    assert (program.name, program.pid, program.expects) == ("p", 3, {"compiled"})
    assert program.facts == {"stance": "force_eager", "cpus": 2}


def test_a_storm_of_compiles_does_not_push_out_what_still_holds() -> None:
    kept = Recent()
    lasting = [Event(0.0, "phase", "run"), Event(1.0, "eager_flex"), Event(2.0, "recompile_limit")]
    for event in lasting:
        kept.event(event)
    for number in range(5 * latest.EVENTS):
        kept.event(Event(10.0 + number, "compile"))
    events = kept.trace("x").events
    assert list(events[:3]) == lasting
    assert len(events) == 3 + latest.EVENTS
    for number in range(5 * latest.EVENTS):
        kept.event(Event(1e5 + number, "phase", "run"))
    assert len(kept.trace("x").events) <= 1.5 * latest.EVENTS
