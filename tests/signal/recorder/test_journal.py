"""What a program's own verdict is made of: the latest part of its recording, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftline.signal.readers import rows
from draftline.signal.readers.read import read_trace
from draftline.signal.recorder.clock import now_s
from draftline.signal.recorder.journal import Journal
from draftline.signal.recorder.nvml import Reading
from draftline.signal.trace import Event


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "signal.jsonl")
    yield made
    made.file.close()


def test_columns_that_nobody_knew_are_absent_and_gaps_are_nan(journal: Journal) -> None:
    journal.step("0", 0, None, {"frames": 2})
    journal.step("0", 1, 0.005, {"tokens": 9})
    (steps,) = journal.trace().steps
    assert set(steps.values) == {"frames", "tokens"}
    np.testing.assert_array_equal(steps.values["frames"], [2, np.nan])
    assert steps.wall_ms[1] == 5


def test_a_process_missing_from_a_told_list_holds_nothing(journal: Journal) -> None:
    for number, processes in enumerate(({7: 100, 8: None}, {}, {7: 50})):
        journal.sample(Reading("0", 1.7e9 + number, 5 + number, 10, None, processes))
    (samples,) = journal.trace().samples
    np.testing.assert_array_equal(samples.by_process[7], [100, 0, 50])
    np.testing.assert_array_equal(samples.by_process[8], [np.nan, 0, 0])
    assert samples.total_bytes == 10
    assert np.isnan(samples.util_pct).all()


def test_memory_is_bounded_for_each_device(journal: Journal) -> None:
    for number in range(2 * rows.LATEST_STEPS + 5):
        journal.step("0", number, 0.1, {})
    journal.step("1", 0, 0.1, {})
    trace = journal.trace()
    first, second = trace.steps
    assert rows.LATEST_STEPS <= len(first.number) < 2 * rows.LATEST_STEPS
    assert first.number[-1] == 2 * rows.LATEST_STEPS + 4
    assert len(second.number) == 1


def test_what_becomes_known_later_is_added_to_the_program(journal: Journal) -> None:
    journal.start("p", ["compiled"], {}, {"stance": None, "cpus": 2}, pid=3)
    journal.facts({}, {"stance": "force_eager"})
    program = journal.trace().program
    assert program is not None
    assert (program.name, program.pid, program.expects) == ("p", 3, {"compiled"})
    assert program.facts == {"stance": "force_eager", "cpus": 2}


def test_a_storm_of_compiles_does_not_push_out_what_still_holds(journal: Journal) -> None:
    at_s = now_s()
    kinds = ("eager_flex", "recompile_limit")
    journal.phase("run")
    for kind in kinds:
        journal.event(Event(at_s, kind))
    for _ in range(5 * rows.LATEST_EVENTS):
        journal.event(Event(at_s + 10, "compile"))
    events = journal.trace().events
    assert {event.kind for event in events} == {"phase", "compile", *kinds}
    assert len(events) <= 2 * rows.LATEST_EVENTS
    for _ in range(5 * rows.LATEST_EVENTS):
        journal.phase("run")
    assert len(journal.trace().events) <= 2 * rows.LATEST_EVENTS


def test_the_latest_part_is_what_a_reader_of_the_file_has(journal: Journal) -> None:
    journal.start("p", [], {"cuda:0": {"index": 3, "uuid": "GPU-a"}}, {}, pid=3)
    journal.phase("run")
    for number in range(20):
        journal.step("3", number, 0.1, {"frames": 2, "reserved_bytes": 1e9})
        journal.sample(Reading("3", now_s(), 5, 10, 1.0, {3: number}))
    live, (path) = journal.trace(), journal.file.path
    journal.file.flush()
    read = read_trace([path])
    np.testing.assert_array_equal(live.steps[0].time_s, read.steps[0].time_s)
    np.testing.assert_array_equal(live.samples[0].by_process[3], read.samples[0].by_process[3])
    assert (live.events, live.program, live.devices) == (read.events, read.program, read.devices)
