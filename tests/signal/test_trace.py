"""Traces side by side: what `join` keeps and the order of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftline.signal.trace import join
from tests.support.traces import START_S, Event, Program, Trace, renamed, run, sampled, shot


def test_nothing_joined_is_an_empty_trace() -> None:
    assert join([]) == Trace()
    assert join([Trace(), Trace()]) == Trace()
    assert Trace().devices == []


def test_parts_keep_everything_and_events_come_in_order() -> None:
    late = replace(
        run(counted=False), events=(Event(START_S + 9, "compile", "late"),), notes=("cut",)
    )
    early = replace(
        run(sampled=False), events=(Event(START_S + 1, "phase", "run"),), notes=("no header",)
    )
    both = join([late, early])
    assert both.samples == late.samples
    assert both.steps == early.steps
    assert [event.text for event in both.events] == ["run", "late"]
    assert both.notes == ("cut", "no header")
    assert both.sources == ("made-up", "made-up")
    assert both.program == early.program


def test_events_of_one_moment_keep_their_order() -> None:
    at = [Event(START_S, "recompile", str(n)) for n in range(5)]
    both = join([replace(Trace(), events=tuple(at[:2])), replace(Trace(), events=tuple(at[2:]))])
    assert [event.text for event in both.events] == list("01234")


def test_the_first_program_that_is_known_speaks() -> None:
    first, second = Program("a", 1), Program("b", 2)
    parts = [Trace(), replace(Trace(), program=first), replace(Trace(), program=second)]
    assert join(parts).program == first


def test_devices_are_in_the_order_of_their_numbers() -> None:
    parts = [renamed(sampled([1.0] * 9), name) for name in ("10", "GPU-6f", "2", "cuda:0")]
    parts += [
        renamed(run(sampled=False), "1"),
        replace(Trace(), snapshots=(shot([1], device="0"),)),
    ]
    assert join(parts).devices == ["0", "1", "2", "10", "GPU-6f", "cuda:0"]
    assert join(reversed(parts)).devices == join(parts).devices


def test_a_device_is_named_once() -> None:
    assert run().devices == ["0"]
    assert join([run(), run()]).devices == ["0"]


@pytest.mark.parametrize(
    "name",
    ["", "٣", "²", "0" * 5000],
)
def test_no_name_of_a_device_crashes_it(name: str) -> None:
    assert join([renamed(run(), name), run()]).devices.count(name) == 1


def test_compile_events_alone_are_of_a_program_without_a_device() -> None:
    said = Trace(events=(Event(START_S, "recompile", "x changed"),))
    assert said.devices == ["cpu"]
    assert Trace(events=(Event(START_S, "phase", "run"),)).devices == []
