"""The run directory: nothing half written, and a full disk that stops no training."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.runlog import RunLog, write_atomic
from tests.support.recordings import read_rows


class FullDisk:
    """A file that takes `room` lines and then fails as a full disk does."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.written: list[bytes] = []
        self.closed = False

    def write(self, line: memoryview) -> int:
        if len(self.written) >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written.append(bytes(line))
        return len(line)

    def close(self) -> None:
        self.closed = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# write_atomic


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    write_atomic(path, "nëw\n")
    assert path.read_bytes() == "nëw\n".encode()
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    seen: list[tuple[str, list[str]]] = []

    def sync(descriptor: int) -> None:
        written = [p.read_text() for p in tmp_path.iterdir() if p != path]
        seen.append((path.read_text(), written))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomic(path, "new")
    assert seen == [("old", ["new"])]
    assert path.read_text() == "new"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.yaml"]


# RunLog


def test_every_line_is_on_the_disk_when_the_call_returns(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "run"
    with RunLog(directory) as log:
        log.event("start", {"hash": "x", "path": Path("p")})
        [event] = read_rows(directory / "events.jsonl")
        log.metrics({"step": 1, "loss": 2.5})
        [metric] = read_rows(directory / "metrics.jsonl")
        log.write("config.yaml", "a: 1\n")
    assert (event["event"], event["hash"], event["path"]) == ("start", "x", "p")
    assert (metric["step"], metric["loss"]) == (1, 2.5)
    assert isinstance(event["time_s"], float)
    assert isinstance(metric["time_s"], float)
    assert (directory / "config.yaml").read_text() == "a: 1\n"
    assert log.lost_lines == 0


def test_a_second_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with RunLog(tmp_path) as log:
            log.metrics({"step": step})
    assert [line["step"] for line in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_full_disk_is_said_once_counted_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path)
    log._metrics.close()
    disk = FullDisk(room=1)
    log._metrics = disk  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            log.metrics({"step": step})
        log.event("still", {})
        log.close()
    assert log.lost_lines == 4  # three lines, and the close
    assert [json.loads(line)["step"] for line in disk.written] == [0]
    assert disk.closed
    assert [line["event"] for line in read_rows(tmp_path / "events.jsonl")] == ["still"]
    [warning] = caplog.records
    assert "No space left" in warning.getMessage()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_disk_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with RunLog(tmp_path) as log:
        for step in range(3):
            log.metrics({"step": step, "filler": "x" * 10_000})
        log.event("end", {})
    assert log.lost_lines >= 3
    assert len(read_rows(tmp_path / "events.jsonl")) == 1
    assert len(caplog.records) == 1


class Narrow:
    """A file on a disk with `room` bytes, of which more can be freed."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def write(self, line: memoryview) -> int:
        taken = bytes(line[: self.room])
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.data += taken
        self.room -= len(taken)
        return len(taken)

    def close(self) -> None:
        pass


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log._metrics.close()
    disk = Narrow(room=60)
    log._metrics = disk  # type: ignore[assignment]
    for step in range(6):
        if step == 4:
            disk.room = 1000
        log.metrics({"step": step})
    log.close()
    first, *others = disk.data.decode().splitlines()
    assert json.loads(first)["step"] == 0
    whole = [json.loads(line)["step"] for line in others if line.endswith("}")]
    assert whole == [4, 5]
    assert len(others) == 3, "one of them is the part of a line"
    assert log.lost_lines == 3


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:

        def write(number: int) -> None:
            for step in range(50):
                log.metrics({"worker": number, "step": step, "filler": "x" * 5000})

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seen = [(line["worker"], line["step"]) for line in read_rows(tmp_path / "metrics.jsonl")]
    assert sorted(seen) == [(n, step) for n in range(4) for step in range(50)]


def test_closing_hides_no_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the run failed"), RunLog(tmp_path) as log:
        raise RuntimeError("the run failed")
    assert log._events.closed
    assert log._metrics.closed


@pytest.mark.parametrize("inside", ["", "deeper/run"])
def test_a_directory_that_cannot_be_made_names_the_key(inside: str, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    directory = in_the_way / inside if inside else in_the_way
    with pytest.raises(ConfigError) as caught:
        RunLog(directory)
    message = str(caught.value)
    assert f"run directory {directory} cannot be written" in message
    assert "run.dir=" in message
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_opened_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory.*run.dir="):
        RunLog(tmp_path)
