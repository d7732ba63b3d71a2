"""One writer for each place, whatever happens to the last one."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.locks import hold, is_free, keep

WHAT, INSTEAD = "run directory r", "choose another"
HOLDER = """
import sys
from pathlib import Path
from draftline.locks import hold
with hold(Path(sys.argv[1]), "it", "wait"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds `path` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    path = tmp_path / "deep" / ".lock"
    with holder(path) as process:
        with pytest.raises(ConfigError) as caught, hold(path, WHAT, INSTEAD):
            pass
        said = str(caught.value)
        assert said.startswith(f"{WHAT} is being written by process {process.pid} on ")
        assert f"{socket.gethostname()} since 20" in said
        assert said.endswith(f"or {INSTEAD}")
        process.communicate("")
    assert not path.exists()
    with hold(path, WHAT, INSTEAD):
        pass


def test_a_module_that_runs_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/draftline/__main__.py", "train", "my.yaml"])
    path = tmp_path / ".lock"
    with hold(path, WHAT, INSTEAD):
        assert '"command": "draftline train my.yaml"' in path.read_text(encoding="utf-8")


def test_a_kill_frees_it(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with holder(path) as process:
        process.kill()
        process.wait()
    assert path.exists(), "nobody was there to remove it"
    with hold(path, WHAT, INSTEAD):
        assert str(os.getpid()) in path.read_text()


def test_another_thread_of_the_process_is_somebody_else(tmp_path: Path) -> None:
    said: list[str] = []

    def second() -> None:
        try:
            with hold(tmp_path / ".lock", WHAT, INSTEAD):
                said.append("held by both")
        except ConfigError as error:
            said.append(str(error))

    with hold(tmp_path / ".lock", WHAT, INSTEAD):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    [text] = said
    assert f"process {os.getpid()} on" in text


def test_who_waited_for_a_removed_file_holds_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder removes the file between our opening it and our lock on it."""
    path = tmp_path / ".lock"
    plain, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        plain(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold(path, WHAT, INSTEAD):
        assert path.exists()
        with pytest.raises(ConfigError, match="is being written"), hold(path, WHAT, INSTEAD):
            pass


def test_it_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), hold(tmp_path / ".lock", WHAT, INSTEAD):
        raise ValueError("inside")
    with hold(tmp_path / ".lock", WHAT, INSTEAD):
        pass


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    with caplog.at_level(logging.WARNING), hold(tmp_path / ".lock", WHAT, INSTEAD):
        pass
    assert "no locks (No locks available)" in caplog.text


def test_a_place_that_cannot_be_written_ends_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock, said = tmp_path / "file" / ".lock", rf"{WHAT} cannot be written: .*; {INSTEAD}"
    with pytest.raises(ConfigError, match=said), hold(lock, WHAT, INSTEAD):
        pass


def test_a_file_in_use_is_not_free(tmp_path: Path) -> None:
    path = tmp_path / "part"
    assert is_free(path)
    with path.open("wb") as file:
        keep(file.fileno())
        assert not is_free(path)
    assert is_free(path)
