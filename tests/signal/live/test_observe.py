import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from draftline.signal.live.foreign import Outlets
from draftline.signal.live.observe import Observer
from draftline.signal.live.processes import Identity
from draftline.signal.recorder.nvml import Device, Reading
from draftline.signal.recorder.record import Recorder
from tests.support.timing import until

ME, STRANGER = 100, 500
MIB = 2**20


class FakeSource:
    """A driver with two devices: the program and a stranger on the first, nobody on the second."""

    hz_limit = 1000.0

    def devices(self) -> list[Device]:
        return []

    def read(self, _wanted: Collection[str] | None) -> list[Reading]:
        both = {ME: 700 * MIB, STRANGER: 90 * MIB}
        return [
            Reading("0", time.time(), 800 * MIB, 1000 * MIB, 50.0, both),
            Reading("1", time.time(), 5 * MIB, 1000 * MIB, 0.0, {}),
        ]

    def close(self) -> None:
        return


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    for pid in (ME, STRANGER):
        (folder / str(pid) / "fd").mkdir(parents=True)
        zeros = " ".join(["0"] * 17)
        (folder / str(pid) / "stat").write_text(f"{pid} (python) S 1 {zeros} 100 0\n")
        (folder / str(pid) / "cmdline").write_bytes(b"/usr/bin/py\x1b[2Jthon\0other.py\0")
    return folder


def outlets(folder: Path) -> Outlets:
    return Outlets(folder / "torch.log", None, True, False, {})


def observer(tmp_path: Path, proc: Path, told: Outlets | None = None) -> Observer:
    return Observer(
        Identity(ME, 100), tmp_path / "out", outlets=told, hz=100.0, source=FakeSource, proc=proc
    )


def rows(path: Path) -> Iterator[dict[str, object]]:
    yield from map(json.loads, path.read_text().splitlines())


def test_the_programs_devices_are_recorded_and_strangers_told_once(
    tmp_path: Path, proc: Path
) -> None:
    with observer(tmp_path, proc) as watched:
        watched.start("python train.py", {"TORCH_LOGS": "x", "HOME": "/h", "SECRET": "s"})
        until(lambda: bool(watched.trace().samples))
        [told] = watched.poll(1000.0)
        assert watched.poll(2000.0) == []
        assert watched.alive
        [seen] = watched.trace().samples

    assert (told.kind, told.device) == ("other_process", "0")
    assert told.text == "process 500 (py [2Jthon) holds 0.09 GiB there"
    assert seen.device == "0"
    assert {pid: column[0] for pid, column in seen.by_process.items()} == {
        ME: 700 * MIB,
        STRANGER: 90 * MIB,
    }
    first, *rest = rows(tmp_path / "out" / "signal.jsonl")
    assert (first["kind"], first["pid"], first["program"]) == ("start", ME, "python train.py")
    assert first["facts"]["variables"] == {"TORCH_LOGS": "x"}  # type: ignore[index]
    assert {row["device"] for row in rest} == {"0"}


def test_compile_events_are_told_and_recorded(tmp_path: Path, proc: Path) -> None:
    skip = (
        "W1129 20:41:17.649000 1 torch/_inductor/cudagraph_utils.py:380] [0/0] [__cudagraphs] "
        "skipping cudagraphs due to cpu device\n"
    )
    with observer(tmp_path, proc, outlets(tmp_path)) as watched:
        watched.start("train", None)
        (tmp_path / "torch.log").write_text(skip)
        told = [e for e in watched.finish(time.time()) if e.kind != "other_process"]

    assert [e.kind for e in told] == ["capture_skip"]
    kinds = [row.get("event") for row in rows(tmp_path / "out" / "signal.jsonl")]
    assert kinds.count("capture_skip") == 1


def test_a_recording_that_the_program_writes_itself_is_read_along(
    tmp_path: Path, proc: Path
) -> None:
    own = tmp_path / "signal-100.jsonl"
    with Recorder(own) as recorder:
        os.symlink(own, proc / str(ME) / "fd" / "5")
        recorder.mark_step(tokens=64)
        recorder.mark_step(tokens=64)
        recorder.event("eager_flex", "flex_attention called without torch.compile")
    with observer(tmp_path, proc) as watched:
        watched.start("train", None)
        until(lambda: bool(watched.trace().samples))
        told = watched.poll(1000.0)
        trace = watched.trace()

    assert watched.recordings == [own]
    assert "eager_flex" in [event.kind for event in told]
    assert [len(steps.number) for steps in trace.steps] == [2]
    assert [samples.device for samples in trace.samples] == ["0"]
    assert trace.program is not None
    assert trace.program.pid == os.getpid()


def test_without_a_driver_it_says_why_and_goes_on(tmp_path: Path, proc: Path) -> None:
    def broken() -> FakeSource:
        raise RuntimeError("no driver here")

    with Observer(
        Identity(ME, 100), tmp_path / "out", hz=100.0, source=broken, proc=proc
    ) as watched:
        watched.start("train", None)
        until(lambda: watched.unsampled is not None)
        assert watched.poll(1000.0) == []
        assert watched.trace().samples == ()

    assert watched.unsampled == "no driver here"
    (proc / str(ME) / "stat").unlink()
    assert not watched.alive
