import pytest

from draftline.signal.judge.compiler_rules import COMPILER_RULES
from draftline.signal.live.alerts import Alerts
from draftline.signal.trace import Event
from draftline.signal.words import CAUSES, EVENTS, cause_title, duration, event_title


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (-3, "0.0 s"),
    ],
)
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_every_cause_and_event_has_a_title_of_its_own() -> None:
    for table in (CAUSES, EVENTS):
        titles = [word.title for word in table.values()]
        assert len(set(titles)) == len(titles)
        assert not {title for title in titles if "_" in title.replace("flex_attention", "")}
    assert cause_title("largest_so_far") != "largest_so_far"  # had none where the report named it
    assert (cause_title("of_later"), event_title("of_later")) == ("of_later", "of_later")


def test_compiler_rules_name_causes_of_the_table() -> None:
    assert {rule.__name__ for rule in COMPILER_RULES} <= set(CAUSES)


@pytest.mark.parametrize("kind", EVENTS)
def test_what_is_routine_is_no_alert_and_everything_else_is(kind: str) -> None:
    assert bool(Alerts().take(Event(1.0, kind, "x"))) == bool(EVENTS[kind].badness)
