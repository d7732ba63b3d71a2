"""A recording as a program makes one, and that it never becomes the program's trouble."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline import signal
from draftline.errors import ConfigError
from draftline.signal.recorder import counters, lines, nvml, record, sample
from draftline.signal.recorder.nvml import Reading
from draftline.signal.recorder.record import Recorder, command_line
from draftline.signal.recorder.session import SESSION
from draftline.signal.trace import TOTALS, Event
from tests.support.fake_cuda import FakeCuda, idle, stats
from tests.support.fake_nvml import GIB, FakeNvml, gpu
from tests.support.recordings import read_rows


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, and no torch unless a test puts one in."""
    monkeypatch.setattr(record, "environment", lambda: {"python": "3"})
    monkeypatch.setattr(record, "driver_facts", dict)
    for name in list(sys.modules):
        if name == "torch" or name.startswith("torch."):
            monkeypatch.delitem(sys.modules, name)


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_rows(path) if line["kind"] == kind]


def test_a_program_without_a_gpu(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl", expects=["compiled"], program="mine") as recorder:
        recorder.phase("run")
        with recorder.step(tokens=8):
            pass
        recorder.mark_step(tokens=9)
        recorder.mark_step(7)
        recorder.mark_step()
        recorder.event("capture", "one graph", seconds=0.5)
    start, phase, *steps, event = read_rows(tmp_path / "signal.jsonl")
    assert (start["kind"], start["format"], start["program"]) == ("start", 1, "mine")
    assert (start["pid"], start["expects"], start["devices"]) == (os.getpid(), ["compiled"], {})
    assert start["facts"] == {"python": "3", "stance": None, "dynamo_disabled": None}
    assert (phase["kind"], phase["phase"]) == ("phase", "run")
    assert [(s["step"], s["device"], s.get("tokens")) for s in steps] == [
        (0, "cpu", 8),
        (1, "cpu", 9),
        (7, "cpu", None),
        (8, "cpu", None),
    ]
    assert not set(TOTALS) & set(steps[0])  # no torch: nothing is known, and nothing is zero
    assert all(s["wall_ms"] >= 0 for s in steps)
    assert (event["event"], event["text"], event["seconds"]) == ("capture", "one graph", 0.5)
    assert event["device"] is None


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/home/me/train.py", "--lr", "1"], "train.py --lr 1"),
        (["t.py", "--hf-token", "hf_x", "--max-tokens", "3"], "t.py --hf-token ... --max-tokens 3"),
        (
            ["t.py", "--api_key=x", "run.password=y", "data=z"],
            "t.py --api_key=... run.password=... data=z",
        ),
        ([""], ""),
        ([], ""),
    ],
)
def test_the_command_line_is_kept_without_paths_and_secrets(argv: list[str], line: str) -> None:
    assert command_line(argv) == line


def test_the_first_mark_has_no_step_before_it(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.mark_step()
    assert of_kind(tmp_path / "signal.jsonl", "step")[0]["wall_ms"] is None


def test_a_decorated_function_steps_at_each_call_and_keeps_its_result(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:

        @recorder.step(tokens=4)
        def double(x: int) -> int:
            """Twice."""
            return 2 * x

        assert [double(2), double(x=3)] == [4, 6]
        assert (double.__name__, double.__doc__) == ("double", "Twice.")
    steps = of_kind(tmp_path / "signal.jsonl", "step")
    assert [(s["step"], s["tokens"]) for s in steps] == [(0, 4), (1, 4)]


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "steps"),
    [
        (OutOfMemoryError("tried 2 GiB"), "oom", 1),
        (ValueError("bad"), "error", 1),
        (KeyboardInterrupt(), None, 1),
        (StopIteration(), None, 0),
    ],
)
def test_an_error_in_a_step_is_recorded_and_goes_on(
    tmp_path: Path, error: BaseException, kind: str | None, steps: int
) -> None:
    with (
        Recorder(tmp_path / "signal.jsonl") as recorder,
        pytest.raises(type(error)),
        recorder.step(),
    ):
        raise error
    events = of_kind(tmp_path / "signal.jsonl", "event")
    assert [e["event"] for e in events] == ([kind] if kind else [])
    assert len(of_kind(tmp_path / "signal.jsonl", "step")) == steps


def test_a_phase_in_with_goes_back_to_the_one_before(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.phase("warm")
        with recorder.phase("evaluate"), recorder.phase("checkpoint"):
            pass
        recorder.phase("end")
    with Recorder(tmp_path / "other.jsonl") as recorder, recorder.phase("evaluate"):
        pass
    phases = [p["phase"] for p in of_kind(tmp_path / "signal.jsonl", "phase")]
    assert phases == ["warm", "evaluate", "checkpoint", "evaluate", "warm", "end"]
    # Nothing was marked before it: what goes on is the loop.
    assert [p["phase"] for p in of_kind(tmp_path / "other.jsonl", "phase")] == ["evaluate", "run"]


def test_each_device_in_use_has_a_line_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2")
    cuda = FakeCuda([stats(calls=7), stats(calls=70), idle()], uuids=[None] * 3)
    cuda.install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.mark_step()
        cuda.devices[0] = stats(calls=9, allocated=50)
        recorder.mark_step()
    lines = of_kind(tmp_path / "signal.jsonl", "step")
    assert [(s["device"], s["step"], s["allocator_calls"]) for s in lines] == [
        ("3", 0, 7),
        ("1", 0, 70),
        ("3", 1, 9),
        ("1", 1, 70),
    ]
    assert (lines[2]["allocated_bytes"], lines[2]["reserved_bytes"]) == (50, 400)
    assert "peak_bytes" not in lines[0]
    assert "frames" not in lines[0]  # Dynamo was never used
    start = read_rows(tmp_path / "signal.jsonl")[0]
    assert {name: d["index"] for name, d in start["devices"].items()} == {"cuda:0": 3, "cuda:1": 1}


def test_devices_that_come_later_are_said_when_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(initialised=False, uuids=[None]).install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        cuda.initialised = True
        recorder.mark_step()
    start, facts, step = read_rows(tmp_path / "signal.jsonl")
    assert (start["devices"], facts["kind"]) == ({}, "facts")
    assert facts["devices"]["cuda:0"]["name"] == "NVIDIA H200"
    assert step["device"] == "0"


def test_the_peak_is_reset_only_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(uuids=[None]).install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl", own_peak=True) as recorder:
        recorder.mark_step()
    assert of_kind(tmp_path / "signal.jsonl", "step")[0]["peak_bytes"] == 150
    assert cuda.peaks_reset == [0]


def test_totals_go_on_where_the_program_resets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(uuids=[None]).install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for calls in (10, 30, 5):
            cuda.devices[0] = stats(calls=calls)
            recorder.mark_step()
    lines = of_kind(tmp_path / "signal.jsonl", "step")
    assert [line["allocator_calls"] for line in lines] == [10, 30, 35]


def test_what_only_the_program_counts(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.mark_step()
        recorder.count("retries", 0)
        recorder.captured()
        for _ in range(2):
            recorder.graph_replayed()
        recorder.mark_step()
    first, second = of_kind(tmp_path / "signal.jsonl", "step")
    assert "graph_replays" not in first
    assert [second[name] for name in ("graph_replays", "captures", "retries")] == [2, 1, 0]


def reading(**changes: Any) -> Reading:
    known = {"device": "0", "time_s": 5.0, "used_bytes": 9, "total_bytes": 10, "util_pct": 1.0}
    return Reading(**{**known, "processes": {os.getpid(): 4, 99: None}, **changes})


def test_samples_of_the_device(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder._sampled(reading())
        # A list that lacks this program is of another namespace: it says nothing of its numbers.
        recorder._sampled(reading(processes={99: 3}))
        recorder._sampled(reading(util_pct=None, used_bytes=None, processes={99: 3}))
        trace = recorder.trace()
    first, second = of_kind(tmp_path / "signal.jsonl", "device")
    assert first["processes"] == {str(os.getpid()): 4, "99": None}
    assert (first["used_bytes"], first["total_bytes"], first["util_pct"]) == (9, 10, 1.0)
    assert second["processes"] is None
    np.testing.assert_array_equal(trace.samples[0].used_bytes, [9, 9])


def test_only_devices_in_use_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([idle(), stats()], uuids=[None, None]).install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        wanted = recorder._sampler._wanted
        assert wanted is not None
        assert wanted() == {"1"}
        cuda.devices[0] = stats()
        recorder._look_at_s = 0.0
        recorder._tick()
        assert wanted() == {"0", "1"}


def test_the_driver_is_asked_for_the_programs_devices_by_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [(os.getpid(), 2 * GIB), (99, GIB)]
    nvml = FakeNvml([gpu(uuid="GPU-other"), gpu(uuid="GPU-mine", compute=mine)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    FakeCuda(uuids=["MINE"]).install(monkeypatch)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.mark_step()
        recorder._sampler.tick(time.monotonic())
    lines = read_rows(tmp_path / "signal.jsonl")
    assert lines[0]["devices"]["cuda:0"]["index"] == 1
    assert lines[0]["devices"]["cuda:0"]["uuid"] == "GPU-mine"
    assert {line["device"] for line in lines if "device" in line} == {"1"}
    sample = of_kind(tmp_path / "signal.jsonl", "device")[0]
    assert (sample["used_bytes"], sample["util_pct"]) == (3 * GIB, 87.0)
    assert sample["processes"] == {str(pid): held for pid, held in mine}
    assert nvml.open == 0  # closed again at the end


def test_another_stance_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"stance": "default"}
    monkeypatch.setattr(counters, "facts", lambda: dict(now))
    monkeypatch.setattr(record, "_LOOK_S", 0.0)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        recorder.mark_step()
        now["stance"] = "force_eager"
        recorder.mark_step()
        recorder.mark_step()
        program = recorder.trace().program
    facts = of_kind(tmp_path / "signal.jsonl", "facts")
    assert [line["facts"] for line in facts] == [{"stance": "force_eager"}]
    assert program is not None
    assert program.facts["stance"] == "force_eager"


def test_settings_of_other_threads_are_not_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps Dynamo's settings for each thread: only the stepping one has the program's."""
    here = threading.get_ident()
    monkeypatch.setattr(
        counters, "facts", lambda: {"dynamo_disabled": threading.get_ident() == here}
    )
    monkeypatch.setattr(record, "_LOOK_S", 0.0)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for _ in range(3):
            recorder.mark_step()
            for work in (recorder._tick, recorder.mark_step):
                other = threading.Thread(target=work)
                other.start()
                other.join()
        program = recorder.trace().program
    assert of_kind(tmp_path / "signal.jsonl", "facts") == []
    assert program is not None
    assert program.facts["dynamo_disabled"] is True


def test_a_clock_that_is_set_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_by_s = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + set_by_s[0])
    before_s = real()
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for set_by_s[0] in (0.0, -60.0, -0.3, 3600.0):
            recorder.phase("run")
            recorder.mark_step()
            recorder.event("capture")
            recorder._journal.event(Event(time.time(), "compile"))
            recorder._sampled(reading(time_s=nvml.now_s()))
        trace = recorder.trace()
    times = [line["time_s"] for line in read_rows(tmp_path / "signal.jsonl")]
    assert times == pytest.approx(sorted(times), abs=0.002)
    assert before_s - 1 < times[0] <= times[-1] < real() + 1
    assert (np.diff(trace.steps[0].time_s) >= 0).all()
    assert (np.diff([event.time_s for event in trace.events]) > -0.002).all()


def test_text_is_recorded_as_one_printable_line(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl", program="a\x1b[2J\nb") as recorder:
        recorder.phase("ru\x1b[31mn")
        recorder.event("error", "one\n\ttwo\x07")
        trace = recorder.trace()
    assert trace.program is not None
    start, phase, event = read_rows(tmp_path / "signal.jsonl")
    assert start["program"] == trace.program.name == "a [2J b"
    assert [phase["phase"], event["text"]] == [e.text for e in trace.events]
    assert [e.text for e in trace.events] == ["ru [31mn", "one two"]


def test_the_trace_is_what_was_recorded(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl", program="p", expects=["captured"]) as recorder:
        recorder.phase("run")
        for tokens in (3, 4):
            recorder.mark_step(tokens=tokens)
        trace = recorder.trace()
    assert trace.program is not None
    assert (trace.program.name, trace.program.expects) == ("p", {"captured"})
    assert [(e.kind, e.text) for e in trace.events] == [("phase", "run")]
    np.testing.assert_array_equal(trace.steps[0].values["tokens"], [3, 4])
    assert trace.sources == (str(tmp_path / "signal.jsonl"),)


def test_a_reader_that_breaks_ends_the_recording_and_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counters, "dynamo", lambda expected: 1 / 0)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for _ in range(3):
            with recorder.step():
                pass
    assert [message.endswith("nothing more is recorded") for message in caplog.messages] == [True]
    assert of_kind(tmp_path / "signal.jsonl", "step") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"expects": ["compile"]}, "any of compiled, captured"),
        ({"expects": "compiled"}, "a list"),
        ({"hz": 0}, "samples per second"),
        ({"hz": 1000}, "samples per second"),
    ],
)
def test_wrong_options_are_the_users_fault(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Recorder(tmp_path / "signal.jsonl", **options)
    assert list(tmp_path.iterdir()) == []


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for kind in ("recompiles", "phase"):
            with pytest.raises(ConfigError, match="known are"):
                recorder.event(kind)
        with pytest.raises(ConfigError, match="known are"):
            recorder.count("replays")
        with pytest.raises(ConfigError, match="parentheses"):
            recorder.step(len)  # type: ignore[arg-type]


def test_it_begins_at_the_first_call_and_ends_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "signal.jsonl")
    assert not recorder.live
    recorder.mark_step()
    assert recorder.live
    recorder.stop()
    recorder.stop()
    recorder.mark_step()
    recorder.phase("run")
    recorder.event("oom")
    assert [line["kind"] for line in read_rows(recorder.path)] == ["start", "step"]
    assert "signal-sampler" not in {thread.name for thread in threading.enumerate()}


def test_several_threads_number_their_steps_one_by_one(tmp_path: Path) -> None:
    with Recorder(tmp_path / "signal.jsonl") as recorder:

        def work() -> None:
            for _ in range(50):
                with recorder.step():
                    recorder.count("graph_replays")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = of_kind(tmp_path / "signal.jsonl", "step")
    assert [step["step"] for step in steps] == list(range(200))
    assert steps[-1]["graph_replays"] == 200


def test_a_storm_of_events_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("draftline.signal.recorder.journal._MOST_EVENTS", 3)
    with Recorder(tmp_path / "signal.jsonl") as recorder:
        for _ in range(5):
            recorder.event("recompile")
        recorder.event("capture")
        assert len(recorder.trace().events) == 6
    kinds = [event["event"] for event in of_kind(recorder.path, "event")]
    assert kinds == ["recompile"] * 3 + ["capture"]
    assert caplog.text.count("3 events of kind recompile are enough") == 1


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_a_forked_child_records_nothing_and_the_parent_goes_on(tmp_path: Path) -> None:
    code = """
import os
from draftline.signal.recorder.record import Recorder, command_line
recorder, late = Recorder("signal.jsonl").start(), Recorder("late.jsonl")
recorder.mark_step()
child = os.fork()
recorder.mark_step()
recorder.phase("run")
recorder.count("captures")
if child:
    assert os.waitpid(child, 0)[1] == 0
    recorder.mark_step()
else:
    late.mark_step()
    assert not recorder.live and not late.live
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    kinds = [line["kind"] for line in read_rows(tmp_path / "signal.jsonl")]
    assert kinds == ["start", "step", "step", "phase", "step"]


def test_a_program_that_just_ends_or_dies_leaves_its_recording(tmp_path: Path) -> None:
    code = """
from draftline import signal
for _ in range(3):
    with signal.step(tokens=2):
        pass
signal.mark_step()
with signal.phase("evaluate"):
    raise RuntimeError("the program's own")
"""
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: the program's own" in done.stderr
    assert "draftline" not in done.stderr.replace("from draftline", "")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("signal-")
    kinds = [line["kind"] for line in read_rows(path)]
    assert kinds == ["start", *["step"] * 4, "phase", "phase"]


def test_the_module_records_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:

        @signal.step(tokens=5)  # when it is decorated nothing begins yet
        def work() -> None:
            pass

        assert list(tmp_path.iterdir()) == []
        recorder = signal.start("mine.jsonl", expects=["compiled"])
        with pytest.raises(ConfigError, match=r"mine\.jsonl is being recorded; signal\.stop"):
            signal.start("other.jsonl")
        signal.phase("run")
        work()
        signal.mark_step(tokens=6)
        assert SESSION.recorder() is recorder
        signal.stop()
        signal.stop()
        signal.mark_step()  # begins a new one, under the default name
        assert SESSION.recorder().path == Path(f"signal-{os.getpid()}.jsonl")
    finally:
        signal.stop()
    tokens = [step["tokens"] for step in of_kind(tmp_path / "mine.jsonl", "step")]
    assert tokens == [5, 6]
    with pytest.raises(ConfigError, match="parentheses"):
        signal.step(len)  # type: ignore[arg-type]


def test_importing_the_signal_loads_nothing_heavy() -> None:
    heavy = ("torch", "pydantic", "rich", "transformers", "plotly", "pynvml")
    code = (
        "import sys; from draftline import signal; import draftline.signal.recorder.record, "
        "draftline.signal.transformers_callback;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_disk_that_fills_is_the_recorders_trouble_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "signal.jsonl").start()

    def full(_data: object) -> int:
        raise OSError(28, "No space left on device")

    class Full:
        closed = False
        write = staticmethod(full)

        def close(self) -> None:
            return

    monkeypatch.setattr(recorder._journal.file, "_file", Full())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.mark_step()
        recorder.stop()
    assert sum("No space left" in message for message in caplog.messages) == 1
    assert caplog.messages[-1].endswith(" lines were lost")


def test_a_mount_that_hangs_does_not_keep_the_program_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside, release = threading.Event(), threading.Event()

    class Hanging:
        closed = False

        def write(self, data: bytes) -> int:
            inside.set()
            release.wait(30)
            return len(data)

    recorder = Recorder(tmp_path / "signal.jsonl", hz=100)
    monkeypatch.setattr(recorder._journal.file, "_file", Hanging())
    monkeypatch.setattr(lines, "PATIENCE_S", 0.01)
    monkeypatch.setattr(sample, "PATIENCE_S", 0.01)
    recorder.start()
    assert inside.wait(10)
    recorder.mark_step()
    ending = threading.Thread(target=recorder.stop, daemon=True)
    ending.start()
    ending.join(5)
    ended = not ending.is_alive()
    release.set()
    assert ended
    assert "the sampler hangs" in caplog.text
    assert "a write hangs" in caplog.text
    assert caplog.messages[-1].endswith(" 1 lines were lost")


def test_threads_that_step_first_at_once_share_one_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun, errors = threading.Barrier(4), []
    start = Recorder.start

    def slow(self: Recorder) -> Recorder:
        time.sleep(0.02)  # long enough for the others to come
        return start(self)

    monkeypatch.setattr(Recorder, "start", slow)

    def work() -> None:
        begun.wait(10)
        try:
            with signal.step():
                pass
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    signal.stop()
    assert errors == []
    (path,) = tmp_path.iterdir()
    kinds = [line["kind"] for line in read_rows(path)]
    assert kinds == ["start", *["step"] * 4]
