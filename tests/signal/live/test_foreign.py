import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.live.foreign import Command, exit_code, new_directory, prepare


def test_only_what_the_user_has_not_set_is_set(tmp_path: Path) -> None:
    before = {"TORCH_TRACE": "/user/trace", "TORCH_LOGS_OUT": "/user/log", "TORCH_LOGS": "all"}

    environ, outlets = prepare(before, tmp_path)

    assert environ == before
    assert outlets.changed == {}
    assert (outlets.log, outlets.trace) == (Path("/user/log"), Path("/user/trace"))
    assert not outlets.own_log
    assert not outlets.own_trace


def test_what_is_set_leaves_standard_error_alone(tmp_path: Path) -> None:
    environ, outlets = prepare({}, tmp_path)

    assert environ == {
        "TORCH_LOGS_OUT": str(tmp_path / "torch.log"),
        "TORCH_TRACE": str(tmp_path / "torch_trace"),
    }
    assert outlets.own_log
    assert outlets.own_trace


def test_paths_hold_in_whatever_directory_the_program_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ, _ = prepare({}, Path("signal-1"))

    assert environ == {
        "TORCH_LOGS_OUT": str(tmp_path / "signal-1" / "torch.log"),
        "TORCH_TRACE": str(tmp_path / "signal-1" / "torch_trace"),
    }


def test_a_directory_that_exists_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = new_directory(1e9)
    first.mkdir()

    assert new_directory(1e9).name == f"{first.name}-2"


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(0), exit_code(7), exit_code(-15)] == [0, 7, 143]


def wait(command: Command) -> int:
    while (code := command.wait(10.0)) is None:
        continue
    return code


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_passed_on(script: str, code: int) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with Command(["sh", "-c", script], os.environ) as command:
        assert wait(command) == code

    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_command_that_cannot_start_is_refused_and_leaves_signals_alone() -> None:
    handler = signal.getsignal(signal.SIGINT)

    with pytest.raises(ConfigError, match="cannot start no-such-program"):
        Command(["no-such-program"], os.environ)
    with pytest.raises(ConfigError, match="no command given"):
        Command([], os.environ)
    assert signal.getsignal(signal.SIGINT) is handler


# What a program sees of its signals: it writes one line for each, and ends with the fourth kind.
PROGRAM = """
import signal, sys
def told(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGUSR2:
        sys.exit(5)
for name in ("INT", "TERM", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), told)
print("ready", sys.stdout.isatty(), flush=True)
while True:
    signal.pause()
"""
STARTER = """
import os, sys
from draftline.signal.live.foreign import Command
with Command([sys.executable, "-c", sys.argv[1]], os.environ) as command:
    while (code := command.wait(10.0)) is None:
        pass
    print("code", code, flush=True)
"""


class Session:
    """The starter and its program in a terminal of their own."""

    def __init__(self) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", STARTER, PROGRAM])
        self.text = ""

    def until(self, words: str) -> None:
        deadline_s = time.monotonic() + 30
        while words not in self.text:
            assert time.monotonic() < deadline_s, self.text
            self.text += os.read(self.master, 1024).decode()

    def close(self) -> None:
        os.waitpid(self.pid, 0)
        os.close(self.master)


def test_ctrl_c_reaches_the_program_once_and_signals_are_passed_on() -> None:
    session = Session()
    session.until("ready True")  # it still sees a terminal

    os.write(session.master, b"\x03")
    session.until("got SIGINT")
    os.kill(session.pid, signal.SIGUSR1)
    session.until("got SIGUSR1")
    os.kill(session.pid, signal.SIGTERM)
    session.until("got SIGTERM")
    os.kill(session.pid, signal.SIGUSR2)
    session.until("code 5")
    session.close()

    assert session.text.count("got SIGINT") == 1
    assert session.text.count("got SIGTERM") == 1


def test_an_interrupt_of_the_group_reaches_the_program_once() -> None:
    session = Session()
    session.until("ready True")

    os.kill(session.pid, signal.SIGINT)  # to the watcher alone: not passed on
    os.kill(session.pid, signal.SIGUSR1)
    session.until("got SIGUSR1")
    assert "got SIGINT" not in session.text
    os.killpg(session.pid, signal.SIGINT)  # a session's leader leads its process group too
    session.until("got SIGINT")
    os.kill(session.pid, signal.SIGUSR2)
    session.until("code 5")
    session.close()

    assert session.text.count("got SIGINT") == 1


def test_an_ignored_signal_stays_ignored_for_the_program() -> None:
    program = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    starter = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{STARTER}"

    done = subprocess.run(
        [sys.executable, "-c", starter, program], capture_output=True, text=True, timeout=60
    )

    assert done.stdout.splitlines() == ["True", "code 0"]
