"""Phases as bands, events as marks."""

from __future__ import annotations

from draftline.signal.judge.phases import Phase
from draftline.signal.report.curves import Clock
from draftline.signal.report.memory import bands, event_marks
from draftline.signal.trace import Event
from draftline.signal.words import RECORDED

CLOCK = Clock(100.0, 60.0, "min", True)


def test_every_kind_of_event_has_a_mark_of_its_own() -> None:
    marks = event_marks([Event(100.0, kind) for kind in ("phase", *RECORDED)], CLOCK).values()
    assert len({mark["marker"]["symbol"] for mark in marks}) == len(RECORDED)


def test_marks_say_how_many_events_there_were() -> None:
    events = [Event(100.0 + i, "recompile", f"<b>{i}", None, None) for i in range(900)]
    events.append(Event(100.0, "oom"))
    many, one = event_marks(events, CLOCK).values()
    assert many["name"] == "recompile (900)"
    assert len(many["x"]) == 300
    assert many["text"][1] == "&lt;b&gt;3"
    assert one["name"] == "out of memory"
    assert one["text"] == ["out of memory"]
    assert many["marker"]["symbol"] != one["marker"]["symbol"]


def test_bands_are_limited_and_named_where_there_is_room() -> None:
    phases = [Phase("run", 100.0 + 10 * i, 109.0 + 10 * i, True) for i in range(200)]
    phases.append(Phase("<i>warm", 2100.0, 2600.0, True))
    shapes = bands(phases, CLOCK, 42.0)
    assert len(shapes) == 120
    assert [shape["label"]["text"] for shape in shapes if "label" in shape] == ["&lt;i&gt;warm"]
    # The legend names each phase once.
    assert [shape["name"] for shape in shapes if shape["showlegend"]] == ["run", "&lt;i&gt;warm"]
