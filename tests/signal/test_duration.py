import pytest

from draftline.signal.duration import duration


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
