"""What a verdict must not depend on, and that nothing in a trace crashes it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.judge.verdict import judge
from draftline.signal.trace import join
from tests.support.faulty_runs import FAULTS, HEALTHY, MARKS
from tests.support.judged import first
from tests.support.traces import Event, Trace, raised, renamed, resampled, run, shifted

ALL = {name: build for name, (_, _, build) in FAULTS.items()} | HEALTHY


def found(trace: Trace) -> list[tuple[str, str, list[tuple[str, str]]]]:
    return [
        (d.device, d.shape, [(c.cause, c.confidence) for c in d.causes])
        for d in judge(trace).devices
    ]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("marks", [MARKS, ()])
def test_neither_offset_time_nor_order_matters(name: str, marks: tuple[object, ...]) -> None:
    trace = ALL[name](marks=marks)
    if name not in ("retries", "near the limit"):
        trace = replace(trace, samples=tuple(replace(s, total_bytes=None) for s in trace.samples))
    expected = found(trace)
    assert found(raised(trace, 20_000)) == expected
    assert found(shifted(trace, 86_400 * 40)) == expected
    assert found(renamed(trace, "5"))[0][1:] == expected[0][1:]
    beside = renamed(replace(run(marks=marks), events=()), "1")
    for parts in ([trace, beside], [beside, trace]):
        both = join(parts)
        program = replace(both, program=trace.program)
        assert found(program)[0] == expected[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("period_s", [0.1, 0.3, 0.45])
def test_the_sample_rate_does_not_matter(name: str, period_s: float) -> None:
    trace = ALL[name](marks=MARKS)
    if name == "storm":  # its samples are 1 s apart
        period_s *= 4
    other = resampled(trace, period_s)
    assert found(other)[0][2] == found(trace)[0][2]


@pytest.mark.parametrize(
    ("name", "every"),
    [(name, every) for name in ALL for every in (2, 5)],
)
def test_sparse_records_are_judged_alike(name: str, every: int) -> None:
    trace = ALL[name](marks=MARKS, every=every)
    assert first(trace) == first(ALL[name](marks=MARKS))


reasons = st.text(max_size=40)
as_read = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)


@given(
    text=as_read, kind=st.sampled_from(["recompile", "graph_break", "eager_flex", "capture_skip"])
)
@settings(max_examples=30, deadline=None)
def test_a_reason_is_part_of_the_line(text: str, kind: str) -> None:
    trace = run(marks=MARKS, compiles=[0, 50, 90], events=[(50, kind, text), (90, kind, text)])
    verdict = judge(trace)
    assert verdict.exit_code == 3
    assert text.strip().rstrip(".") in verdict.line or kind != "recompile"


@pytest.mark.parametrize(
    "text", ["x == 3\nuser stack:\n  a.py", "a\r\nb", "a\x1eb", "a\u2028b", "\x1b[2J"]
)
def test_no_reason_breaks_the_line(text: str) -> None:
    line = judge(run(marks=MARKS, compiles=[0, 50, 90], events=[(90, "recompile", text)])).line
    assert len(line.splitlines()) == 1
    assert line.isprintable()


anything = st.one_of(st.just(np.nan), st.floats(0, 1e13))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_numbers_crash_it(data: st.DataObject) -> None:
    trace = run(40, marks=MARKS if data.draw(st.booleans()) else ())
    steps, samples = trace.steps[0], trace.samples[0]
    values = dict(steps.values)
    for name in data.draw(st.sets(st.sampled_from(sorted(values)), max_size=5)):
        values[name] = np.array(data.draw(st.lists(anything, min_size=40, max_size=40)))
    size = len(samples.time_s)
    used = np.array(data.draw(st.lists(anything, min_size=size, max_size=size)))
    events = [
        Event(float(steps.time_s[data.draw(st.integers(0, 39))]), kind, data.draw(reasons))
        for kind in data.draw(
            st.lists(st.sampled_from(["compile", "oom", "recompile"]), max_size=3)
        )
    ]
    made = replace(
        trace,
        steps=(replace(steps, values=values),),
        samples=(replace(samples, used_bytes=used, total_bytes=data.draw(anything)),),
        events=tuple(sorted([*trace.events, *events], key=lambda event: event.time_s)),
    )
    with np.errstate(all="ignore"):
        found = judge(made)
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.line
    assert found.exit_code in (0, 3, 4)
