"""Starts another program so that PyTorch tells what it compiles, and leaves the program as it is.

The program inherits standard input, output and error, the working directory and the process group, so
that the terminal reaches it as if nobody watched. Only environment variables that PyTorch documents are
set, and none that the user has set to something else. TORCH_LOGS is not among them: its lines would
also appear on the program's standard error, and a call of torch._logging.set_logs() in the program
would be ignored. TORCH_TRACE does neither.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.errors import ConfigError

_TAKEN = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TSTP", "CONT", "WINCH")
    if hasattr(signal, f"SIG{name}")
)
_FROM_KERNEL = 0x80  # Linux's si_code of a signal that the terminal sent to the whole group
# timeout(1) and its like send these to us and to our group: the program has had it then.
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where PyTorch writes: the log file and the trace directory (None where it writes none), whether
    they are ours to keep short, and the variables that were set for it."""

    log: Path | None
    trace: Path | None
    own_log: bool
    own_trace: bool
    changed: Mapping[str, str]


def prepare(environment: Mapping[str, str], directory: Path) -> tuple[dict[str, str], Outlets]:
    """The environment for the program and where its compiles will be told.

    TORCH_LOGS_OUT (PyTorch's warnings go there without further effect) and TORCH_TRACE are set where
    the user has not set them; what the user has set stays, and is read where it points.
    """
    own = {"TORCH_LOGS_OUT": "torch.log", "TORCH_TRACE": "torch_trace"}
    changed = {
        name: str((directory / file).absolute())
        for name, file in own.items()
        if name not in environment
    }
    after = {**environment, **changed}
    log, traced = after.get("TORCH_LOGS_OUT"), after.get("TORCH_TRACE")
    outlets = Outlets(
        Path(log) if log else None,
        Path(traced) if traced else None,
        "TORCH_LOGS_OUT" in changed,
        "TORCH_TRACE" in changed,
        changed,
    )
    return after, outlets


def new_directory(now_s: float | None = None) -> Path:
    """A directory name in the working directory that nobody uses yet: signal-<date>-<time>."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    first = Path(f"signal-{stamp}")
    names = [first, *(first.with_name(f"{first.name}-{n}") for n in range(2, 1000))]
    return next(name for name in names if not name.exists())


def exit_code(returned: int) -> int:
    """What a shell would report: the program's exit code, 128 + n for one that signal n ended."""
    return 128 - returned if returned < 0 else returned


class Command:
    """Owns a program that was started with `argv`, and the signals that reach its starter meanwhile.

    The program is in the same process group, so that what the terminal sends (Ctrl-C) and what is sent
    to the group (kill -INT -PGID) reaches it by itself. SIGINT is therefore never passed on, or a
    program would get it twice and take the second for "stop at once"; to this process alone it does
    nothing. The other signals (TERM, HUP, QUIT, USR1, USR2, ...) that somebody sends to this process are
    passed on. `stop_asked` says that the terminal was asked to stop (Ctrl-Z). Only for the main thread.
    Raises ConfigError where the program cannot be started.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        if not argv:
            raise ConfigError("no command given; write: draftline watch -- python train.py ...")
        self.stop_asked = False
        self._early: list[int] = []
        self._passed: dict[int, float] = {}
        # A signal that our own starter ignores (nohup) stays ignored, for us and for the program.
        self._signals = [s for s in _TAKEN if signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {s: signal.signal(s, self._note) for s in self._signals}
        try:
            self._process = subprocess.Popen(list(argv), env=dict(environment))
        except OSError as error:
            self._restore()
            raise ConfigError(
                f"cannot start {shlex.join(argv)}: {error.strerror or error}; the command comes after "
                "--, as you would type it"
            ) from None
        # Blocked only now, or the program would inherit it.
        self._watched = {*self._signals, signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        for number in self._early:
            self._pass_on(number)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """The exit code once the program has ended, None after `timeout_s` or a signal."""
        ended = self._process.poll()
        if ended is None:
            if (told := signal.sigtimedwait(self._watched, max(0.0, timeout_s))) is not None:
                self._handle(told.si_signo, told.si_code)
            ended = self._process.poll()
        return None if ended is None else exit_code(ended)

    def _note(self, number: int, _frame: object) -> None:
        self._early.append(number)

    def _handle(self, number: int, code: int) -> None:
        if number == signal.SIGCHLD or code == _FROM_KERNEL:
            self.stop_asked |= number == signal.SIGTSTP
            return
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGINT:
            return
        now_s = time.monotonic()
        if number in _ENDING and now_s - self._passed.get(number, -_AGAIN_S) < _AGAIN_S:
            return
        self._passed[number] = now_s
        self._process.send_signal(number)

    def stop_here(self) -> None:
        """Stops this process as the terminal has stopped the program (Ctrl-Z); returns when both are
        continued."""
        self.stop_asked = False
        os.kill(os.getpid(), signal.SIGSTOP)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def close(self) -> None:
        """Gives the signals back. A program that still runs is left running."""
        # What came in while nobody waited was meant for the program.
        while signal.sigtimedwait(self._watched, 0) is not None:
            continue
        self._restore()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
