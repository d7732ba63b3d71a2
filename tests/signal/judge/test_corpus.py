"""The verdict on every recording of the corpus: the right cause with counters, never a wrong one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import confusion
from confusion import ALL, COUNTERS, SMI, Recording

from draftline.signal.judge.verdict import DeviceVerdict, judge
from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Samples, Trace
from draftline.signal.words import FAULTS

GIB = 2.0**30
SIDES = json.loads((confusion.CORPUS / "split.json").read_text())
NAMES = [name for side in confusion.SIDES for name in SIDES[side]]
# One break that nobody marked is a lull, whatever happened in it.
SINGLE_BREAK = "checkpoint-0"
# Its memory moves, and nvidia-smi does not know that evaluation emptied the cache.
EMPTIED_IN_PAUSES = "evaluate_flush-1"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    read = confusion.read_corpus(confusion.CORPUS, tmp_path_factory.mktemp("corpus"))
    return {recording.name: recording for recording in read}


def causes_of(device: DeviceVerdict) -> list[str]:
    return [cause.cause for cause in device.causes]


def device_of(trace: Trace) -> DeviceVerdict:
    """The verdict on the only device."""
    (device,) = judge(trace).devices
    return device


def with_samples(trace: Trace, change: Callable[[Samples], Samples]) -> Trace:
    return replace(trace, samples=tuple(change(samples) for samples in trace.samples))


def rows_of(samples: Samples, kept: slice | npt.NDArray[np.bool_]) -> Samples:
    return replace(
        samples,
        time_s=samples.time_s[kept],
        used_bytes=samples.used_bytes[kept],
        util_pct=samples.util_pct[kept],
        by_process={pid: column[kept] for pid, column in samples.by_process.items()},
    )


def test_the_corpus_holds_what_its_split_says(corpus: dict[str, Recording]) -> None:
    assert sorted(corpus) == sorted(NAMES)
    assert (len(SIDES["tuning"]), len(SIDES["test"])) == (31, 32)
    labels = {side: {corpus[name].label for name in SIDES[side]} for side in confusion.SIDES}
    assert labels["test"] == labels["tuning"] == FAULTS | {"healthy", "pause"}


@pytest.mark.parametrize("without", [[], ["marks"], ["processes"]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_with_counters_the_first_cause_is_the_right_one(
    corpus: dict[str, Recording], name: str, without: list[str]
) -> None:
    recording = corpus[name]
    seen = {one.view: one for one in recording.judged(without)}
    unmarked = without == ["marks"] and name == SINGLE_BREAK
    assert seen[ALL].causes[0] == ("healthy" if unmarked else recording.label)
    # The counters of one process say nothing of another.
    alone = "healthy" if unmarked or recording.label == "other_process" else recording.label
    assert seen[COUNTERS].causes[0] == alone
    assert len(seen[ALL].causes) == 1


@pytest.mark.parametrize("name", NAMES)
def test_without_a_declaration_no_wrong_cause_is_named(
    corpus: dict[str, Recording], name: str
) -> None:
    recording = corpus[name]
    undeclared = recording.judged(["declaration"])[0]
    # A program that is compiled and promised no capture does what it says.
    wanted = "healthy" if name == "no_graph_capture-1" else recording.label
    assert undeclared.causes[0] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_nvidia_smi_alone_names_no_wrong_cause(corpus: dict[str, Recording], name: str) -> None:
    recording = corpus[name]
    verdict = judge(recording.views[SMI])
    (device,) = verdict.devices
    assert set(causes_of(device)) <= {"unknown", recording.label}
    if recording.label not in FAULTS:
        assert verdict.verdict == ("not_flat" if name == EMPTIED_IN_PAUSES else "flat")


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_does_not_hang_on_the_sample_rate(
    corpus: dict[str, Recording], name: str
) -> None:
    """The shape may: a cache that is emptied and filled between two samples looks still."""
    recording = corpus[name]
    for view in (ALL, SMI):
        trace = recording.views[view]
        whole = causes_of(device_of(trace))
        for first in (0, 1):
            thinned = device_of(
                with_samples(trace, lambda s, k=slice(first, None, 2): rows_of(s, k))
            )
            assert causes_of(thinned) in (whole, ["unknown"])
            if recording.label == "healthy":
                assert thinned.shape == "flat"


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_does_not_hang_on_what_else_the_device_holds(
    corpus: dict[str, Recording], name: str
) -> None:
    for view in (ALL, SMI):
        trace = corpus[name].views[view]
        fuller = with_samples(trace, lambda s: replace(s, used_bytes=s.used_bytes + 20 * GIB))
        before, after = device_of(trace), device_of(fuller)
        assert (after.shape, after.words) == (before.shape, before.words)
        assert causes_of(after) == causes_of(before)


@pytest.mark.parametrize("by_s", [-1.7e9, 3 * 86400.25])
@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_does_not_hang_on_the_date(
    corpus: dict[str, Recording], name: str, by_s: float
) -> None:
    trace = corpus[name].views[ALL]
    moved = replace(
        trace,
        samples=tuple(replace(s, time_s=s.time_s + by_s) for s in trace.samples),
        steps=tuple(replace(s, time_s=s.time_s + by_s) for s in trace.steps),
        events=tuple(replace(e, time_s=e.time_s + by_s) for e in trace.events),
    )
    before, after = device_of(trace), device_of(moved)
    assert (after.shape, causes_of(after)) == (before.shape, causes_of(before))


def beside_a_still_one(trace: Trace) -> Trace:
    """The device as number 7, after one that the program does not use and that stands still."""
    still = [
        replace(s, device="0", used_bytes=np.full_like(s.used_bytes, 5 * GIB), by_process={})
        for s in trace.samples
    ]
    return replace(
        trace,
        samples=(*(replace(s, device="7") for s in trace.samples), *still),
        steps=tuple(replace(s, device="7") for s in trace.steps),
        events=tuple(replace(e, device=e.device and "7") for e in trace.events),
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_does_not_hang_on_the_number_of_the_gpu(
    corpus: dict[str, Recording], name: str
) -> None:
    for view in (ALL, SMI):
        trace = corpus[name].views[view]
        before = device_of(trace)
        still, after = judge(beside_a_still_one(trace)).devices
        assert (still.device, still.shape, after.device) == ("0", "flat", "7")
        assert replace(after, device=before.device) == before


def test_a_gpu_that_the_program_does_not_use_is_not_blamed(corpus: dict[str, Recording]) -> None:
    blamed = [
        name
        for name, recording in corpus.items()
        if judge(beside_a_still_one(recording.views[ALL])).devices[0].faults
    ]
    assert blamed == []


def every_second_step(trace: Trace) -> Trace:
    """As a program records it that marks every other step."""
    sparse = tuple(
        replace(
            steps,
            number=steps.number[::2],
            time_s=steps.time_s[::2],
            wall_ms=steps.wall_ms[::2],
            values={name: column[::2] for name, column in steps.values.items()},
        )
        for steps in trace.steps
    )
    return replace(trace, steps=sparse)


@pytest.mark.parametrize("name", NAMES)
def test_half_of_the_steps_give_no_wrong_cause(corpus: dict[str, Recording], name: str) -> None:
    recording = corpus[name]
    found = causes_of(device_of(every_second_step(recording.views[ALL])))[0]
    allowed = {recording.label, "unknown"} | ({"healthy"} if recording.label == "pause" else set())
    assert found in allowed


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("leak-")])
def test_time_is_left_from_the_last_step_not_from_after_the_exit(
    corpus: dict[str, Recording], name: str
) -> None:
    trace = corpus[name].views[ALL]
    last_s = trace.steps[0].time_s[-1]
    still_on = with_samples(trace, lambda s: rows_of(s, s.time_s <= last_s))
    assert device_of(still_on).causes == device_of(trace).causes


@pytest.mark.parametrize("name", NAMES)
def test_nvidia_smi_s_clock_may_be_of_another_zone(
    corpus: dict[str, Recording], name: str, tmp_path: Path
) -> None:
    recording = corpus[name]
    signal, sampled = (Path(source) for source in recording.views[ALL].sources)
    head, *rows = sampled.read_text().splitlines()
    moved = [head]
    for stamp, rest in (row.split(",", 1) for row in rows):
        later = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f") + timedelta(hours=-8)
        moved.append(f"{later:%Y/%m/%d %H:%M:%S.%f}"[:-3] + f",{rest}")
    (tmp_path / "nvidia-smi.csv").write_text("\n".join(moved))
    trace = read_trace([signal, tmp_path / "nvidia-smi.csv"])
    assert any("its local times were moved by +8 h" in note for note in trace.notes)
    before, after = device_of(recording.views[ALL]), device_of(trace)
    assert (after.shape, causes_of(after)) == (before.shape, causes_of(before))


def test_the_tables_count_every_recording(capsys: pytest.CaptureFixture[str]) -> None:
    confusion.main(["--set", "test", "--without-marks", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["side"] for row in rows} == {"test"}
    assert len(rows) == 3 * 32
    confusion.main(["--set", "test"])
    shown = capsys.readouterr().out
    assert f"| test | {ALL} | 32 | 32 |" in shown
    assert "tuning" not in shown
    (whole,) = (part for part in shown.split("### ") if part.startswith(f"{ALL}: first cause"))
    cells = [cell.strip() for line in whole.splitlines() for cell in line.split("|")]
    assert sum(int(cell) for cell in cells if cell.isdigit()) == 32


@pytest.mark.parametrize(
    ("label", "found", "outcome"),
    [
        ("leak", "leak", "right"),
        ("leak", "unknown", "unknown"),
        ("leak", "fragmentation", "wrong cause"),
        ("leak", "pause", "missed"),
        ("pause", "healthy", "wrong cause"),
        ("pause", "leak", "false alarm"),
        ("healthy", "healthy", "right"),
    ],
)
def test_an_outcome_is_one_of_five(label: str, found: str, outcome: str) -> None:
    one = confusion.Judged("x-0", "test", ALL, label, (found,), "flat", "flat")
    assert one.outcome == outcome
