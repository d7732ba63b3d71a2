"""The sampling thread: its grid of ticks, its way with failures, and that it disturbs nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import ConfigError
from draftline.signal.recorder import sample
from draftline.signal.recorder.nvml import Device, Reading, Unavailable
from draftline.signal.recorder.sample import DeviceSampler, next_tick


class FakeSource:
    """Two devices; `failures` are raised one by one before anything is read."""

    def __init__(self, failures: Collection[Exception] = (), hz_limit: float = 100.0) -> None:
        self.hz_limit = hz_limit
        self.failures = list(failures)
        self.closed = False
        self.asked: list[Collection[str] | None] = []

    def devices(self) -> list[Device]:
        return [Device("0", "GPU-a", "", None), Device("1", "GPU-b", "", None)]

    def read(self, names: Collection[str] | None) -> list[Reading]:
        self.asked.append(names)
        if self.failures:
            raise self.failures.pop(0)
        return [
            Reading(name, float(len(self.asked)), 5, 10, None, None)
            for name in ("0", "1")
            if names is None or name in names
        ]

    def close(self) -> None:
        self.closed = True


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e4),
    st.floats(0.01, 10),
)
def test_ticks_stay_on_their_grid(due_s: float, late_s: float, period_s: float) -> None:
    after_s = next_tick(due_s, due_s + late_s, period_s)
    steps = (after_s - due_s) / period_s
    assert steps == pytest.approx(round(steps), abs=1e-3)
    assert steps > 0.999
    assert after_s > due_s + late_s - 1e-6 * max(1.0, due_s)


def test_a_tick_in_time_is_followed_by_the_next_and_a_late_one_by_one_to_come() -> None:
    assert next_tick(10.0, 10.01, 0.2) == 10.2
    assert next_tick(10.0, 10.45, 0.2) == pytest.approx(10.6)


def test_samples_go_to_the_listener() -> None:
    seen: list[Reading] = []
    ticks: list[int] = []
    source = FakeSource()
    sampler = DeviceSampler(
        5, seen.append, on_tick=lambda: ticks.append(len(seen)), source=lambda: source
    )
    for now_s in (0.0, 1.0):
        sampler.tick(now_s)
    assert [(r.device, r.time_s) for r in seen] == [("0", 1), ("1", 1), ("0", 2), ("1", 2)]
    assert ticks == [2, 4]
    assert [device.uuid for device in sampler.devices()] == ["GPU-a", "GPU-b"]


def test_only_wanted_devices_are_read_and_none_means_the_driver_is_left_alone() -> None:
    wanted: list[Collection[str] | None] = [(), {"1"}, None]
    source, opened = FakeSource(), []
    seen: list[Reading] = []

    def open_it() -> FakeSource:
        opened.append(len(wanted))
        return source

    sampler = DeviceSampler(5, seen.append, wanted=lambda: wanted[0], source=open_it)
    sampler.tick(0.0)
    assert opened == []
    for now_s in (1.0, 2.0):
        wanted.pop(0)
        sampler.tick(now_s)
    assert [reading.device for reading in seen] == ["1", "0", "1"]
    assert opened == [2]


def test_a_slow_source_is_asked_no_more_often_than_it_may() -> None:
    source = FakeSource(hz_limit=1.0)
    sampler = DeviceSampler(source=lambda: source)
    for tenth in range(21):
        sampler.tick(tenth / 10)
    assert len(source.asked) == 3  # at 0, 1 and 2 s


def test_a_driver_that_is_missing_is_said_once_and_asked_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[float] = []

    def missing() -> FakeSource:
        tries.append(now_s)
        raise Unavailable("no driver here")

    ticks: list[int] = []
    sampler = DeviceSampler(source=missing, on_tick=lambda: ticks.append(1))
    for now_s in (0.0, 1.0, 29.0, 30.0, 31.0, 60.5):
        sampler.tick(now_s)
    assert tries == [0.0, 30.0, 60.5]
    assert (sampler.failures, sampler.reason) == (3, "no driver here")
    assert len(ticks) == 6
    assert caplog.messages == ["device memory is not sampled: no driver here"]


def test_a_driver_that_fails_midway_is_opened_anew_later(caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeSource(), FakeSource()
    sources = [first, second]
    sampler = DeviceSampler(source=lambda: sources.pop(0))
    sampler.tick(0.0)
    first.failures = [Unavailable("GPU is lost")]
    for now_s in (1.0, 2.0, 30.5, 31.5):
        sampler.tick(now_s)
    assert first.closed
    assert (len(first.asked), len(second.asked)) == (2, 1)
    assert (sampler.failures, sampler.reason) == (1, None)
    assert caplog.messages == ["device memory is not sampled: GPU is lost"]


def test_a_source_that_breaks_in_a_new_way_is_no_different() -> None:
    source = FakeSource([ZeroDivisionError()])
    sampler = DeviceSampler(source=lambda: source)
    sampler.tick(0.0)
    assert sampler.reason == "ZeroDivisionError"


def test_the_thread_samples_until_it_is_stopped() -> None:
    seen = threading.Event()
    source = FakeSource()
    with DeviceSampler(100, lambda reading: seen.set(), source=lambda: source) as sampler:
        assert seen.wait(10)
        names = {thread.name: thread.daemon for thread in threading.enumerate()}
        assert names["signal-sampler"]  # a daemon: it keeps no program alive
    assert source.closed
    assert "signal-sampler" not in {thread.name for thread in threading.enumerate()}
    asked = len(source.asked)
    assert sampler.stop()  # again: nothing to do
    assert len(source.asked) == asked


def test_a_listener_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    twice = threading.Event()

    def bad(_reading: Reading) -> None:
        calls.append(1)
        if len(calls) > 2:
            twice.set()
        raise ValueError("bad listener")

    with DeviceSampler(100, bad, source=FakeSource) as sampler:
        assert twice.wait(10)
    assert sampler.failures >= 2
    assert caplog.messages.count("the sampler could not hand on what it read") == 1


def test_a_driver_that_hangs_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sample, "PATIENCE_S", 0.01)
    inside, release = threading.Event(), threading.Event()

    class Hanging(FakeSource):
        def read(self, names: Collection[str] | None) -> list[Reading]:
            inside.set()
            release.wait(30)
            return []

    sampler = DeviceSampler(source=Hanging)
    sampler.start()
    assert inside.wait(10)
    assert not sampler.stop()
    assert "the sampler hangs" in caplog.text
    release.set()


@pytest.mark.parametrize("hz", [0, -1, 101, float("nan")])
def test_a_rate_that_cannot_be_is_refused(hz: Any) -> None:
    with pytest.raises(ConfigError, match="samples per second"):
        DeviceSampler(hz)


def test_the_missing_driver_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource([Unavailable("x")])
    with caplog.at_level(logging.DEBUG):
        DeviceSampler(source=lambda: source).tick(0.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
