"""The file of a recording: nothing about it may reach the program."""

from __future__ import annotations

import errno
import os
import signal
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import ConfigError
from draftline.signal.recorder import lines
from draftline.signal.recorder.lines import LineFile
from tests.support.recordings import read_rows


def test_lines_are_written_by_flush_and_appended_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "signal.jsonl"
    for run in range(2):
        file = LineFile(path)
        file.add({"run": run, "text": "ü\n", "odd": Path("x")})
        assert len(read_rows(path)) == 2 * run
        file.flush()
        file.add({"run": run})
        file.close()
    assert [line["run"] for line in read_rows(path)] == [0, 0, 1, 1]
    assert read_rows(path)[0] == {"run": 0, "text": "ü\n", "odd": "x"}


@pytest.mark.parametrize("bad", ["folder", "below a file"])
def test_a_path_that_cannot_be_opened_is_the_users_fault(tmp_path: Path, bad: str) -> None:
    path = tmp_path if bad == "folder" else tmp_path / "file" / "signal.jsonl"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        LineFile(path)


class FullDisk(FileIO):
    """Takes `room` bytes and then none."""

    room = 0

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_is_counted_said_once_and_got_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(tmp_path / "signal.jsonl", "ab")
    monkeypatch.setattr(lines, "_open", lambda path: disk)
    file = LineFile(tmp_path / "signal.jsonl")
    disk.room = len('{"n":0}\n{"n":')
    for number in range(3):
        file.add({"n": number})
    file.flush()
    file.add({"n": 3})
    file.flush()
    assert file.lost == 3
    assert len(caplog.messages) == 1
    assert "No space left on device; lines are lost" in caplog.messages[0]
    disk.room = 1000
    file.add({"n": 4})
    file.close()
    assert (tmp_path / "signal.jsonl").read_text() == '{"n":0}\n{"n":\n{"n":4}\n'


def test_lines_that_nobody_writes_out_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_PENDING", 3)
    file = LineFile(tmp_path / "signal.jsonl")
    for number in range(5):
        file.add({"n": number})
    file.close()
    assert [line["n"] for line in read_rows(file.path)] == [2, 3, 4]
    assert file.lost == 2


def test_a_second_writer_gets_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = (LineFile(tmp_path / "signal.jsonl") for _ in range(2))
    assert second.path.name == f"signal-{os.getpid()}.jsonl"
    for file, text in ((first, "a"), (second, "b")):
        file.add({"text": text})
        file.close()
    assert read_rows(first.path) == [{"text": "a"}]
    assert read_rows(second.path) == [{"text": "b"}]
    again = LineFile(tmp_path / "signal.jsonl")  # free again
    assert again.path == first.path
    again.close()


def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert LineFile(tmp_path / "signal.jsonl").path == tmp_path / "signal.jsonl"


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "signal.jsonl")
    file.add({"from": "parent"})
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits for ever
        file._writing.acquire()  # as another thread of the parent may have
        file.add({"from": "child"})
        file.flush()
        file.close()
        os._exit(0 if not file.mine else 1)
    assert os.waitpid(child, 0)[1] == 0
    file.close()
    assert read_rows(file.path) == [{"from": "parent"}]
