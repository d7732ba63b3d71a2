"""Programs in processes of their own that need not import torch again: forks of one that has.

A fork begins with fresh threads, signal handlers and environment, as a program does; only what it would
import first is there already.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["draftline.train.loop", "transformers.models.llama.modeling_llama", "tests.support.runs"]
)


def _run(
    script: str, arguments: tuple[str, ...], environment: dict[str, str], files: list[Path]
) -> None:
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *arguments]
    try:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()


class Forked:
    """`script` started as `python -c` would start it; its interface is that of `subprocess.Popen`."""

    def __init__(self, script: str, *arguments: str, env: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        for path in self._files:
            path.touch()
        self._read = 0
        self._process = _CONTEXT.Process(
            target=_run, args=(script, arguments, env, self._files), daemon=True
        )
        self._process.start()

    def line(self, wait_s: float) -> str:
        """The next line of its output, without its end."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            text = self._files[0].read_text()[self._read :]
            if "\n" in text:
                line = text.partition("\n")[0]
                self._read += len(line) + 1
                return line.strip()
            time.sleep(0.02)
        raise TimeoutError(self._files[1].read_text())

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Output and errors, once it has ended."""
        self._process.join(timeout)
        out, err = (path.read_text() for path in self._files)
        if self.returncode is None:
            raise TimeoutError(err)
        return out, err

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it where it has not ended, and forgets its files."""
        if self.returncode is None:
            self._process.kill()
        self._process.join()
        self._folder.cleanup()
