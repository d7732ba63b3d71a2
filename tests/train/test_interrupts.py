"""Signals that ask a run to save and end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from draftline.train.interrupts import ending, interrupts

SAVING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SAVING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SAVING)
def test_the_first_asks_and_the_second_ends(number: signal.Signals) -> None:
    with interrupts() as asked:
        assert not asked.is_set()
        signal.raise_signal(number)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_two_different_ones_are_two() -> None:
    with interrupts() as asked:
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()


def test_under_nohup_a_hangup_is_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert not asked.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_afterwards_everything_is_as_before() -> None:
    mine = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with interrupts():
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    signal.signal(signal.SIGHUP, mine)


@pytest.mark.parametrize("number", SAVING)
def test_before_there_is_anything_to_save_each_ends_at_once(number: signal.Signals) -> None:
    with ending():
        with interrupts() as asked:
            signal.raise_signal(number)
            assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
