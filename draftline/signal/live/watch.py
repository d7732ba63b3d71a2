"""The live view of a run, of a process, or of a command that it starts."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from draftline.errors import ConfigError
from draftline.signal.live.foreign import Command, Outlets, new_directory, prepare
from draftline.signal.live.observe import Observer, ObserverFeed
from draftline.signal.live.processes import environ_of, identify, raw_command
from draftline.signal.live.run_feed import RunFeed
from draftline.signal.live.terminal import Screen, pick_screen, row_width
from draftline.signal.live.watcher import Feed, Watch
from draftline.signal.recorder import sample
from draftline.signal.recorder.record import command_line
from draftline.signal.trace import one_line
from draftline.signal.words import duration

_TICK_S = 0.5
_SNAPSHOT_S = 2.0  # a running process is sampled for so long before a single snapshot


def watch_run(directory: Path, *, once: bool = False, out: TextIO | None = None) -> int:
    """Shows a run directory or a recording until the run ends, or one snapshot with `once`. Returns 0,
    or 3 where the last verdict is a fault or memory that is not flat. Ctrl-C ends the view, not the
    run. Raises ConfigError where there is no recording.
    """
    return follow(RunFeed(directory), out or sys.stdout, 0.0 if once else None)


def watch_pid(
    pid: int,
    *,
    directory: Path | None = None,
    once: bool = False,
    out: TextIO | None = None,
) -> int:
    """Shows a running process and what it started until it ends, or one snapshot with `once`, and
    records it into `directory` (./signal-<time> if None). Returns what `watch_run` does. Raises
    ConfigError where no such process can be seen."""
    who, stream = identify(pid), out or sys.stdout
    environ, title = environ_of(pid), _title(raw_command(pid)) or f"process {pid}"
    with (
        _sampler_in_view(),
        Observer(who, directory or new_directory(), attached=True) as observer,
    ):
        observer.start(title, environ)
        feed = ObserverFeed(observer, title)
        if environ is None:
            feed.more_notes.append(
                f"process {pid} belongs to another user: only its device memory can be seen"
            )
        code = follow(feed, stream, _SNAPSHOT_S if once else None)
    _say(stream, *_left(observer, f"compiles, {_UNSEEN}"))
    return code


def follow(
    feed: Feed,
    out: TextIO,
    snapshot_after_s: float | None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Shows `feed` on `out` until it ends or Ctrl-C, or says once what is known after so many seconds
    and when everything written so far was read; the summary comes last. Returns 0 or 3."""
    watch = Watch(feed, time.time())
    if snapshot_after_s is not None:
        until_s = time.time() + snapshot_after_s
        watch.take(feed.poll(time.time()))
        while (more := feed.behind) or time.time() < until_s:
            if not more:
                pause(_TICK_S)
            watch.take(feed.poll(time.time()))
        ended = feed.ended(time.time()) or "a snapshot"
    else:
        with pick_screen(out) as screen:
            ended = _until_ended(watch, screen, pause)
    watch.judge(time.time())
    _say(out, *watch.summary(time.time(), ended, row_width(out)))
    return watch.exit_code


def _until_ended(watch: Watch, screen: Screen, pause: Callable[[float], None]) -> str:
    try:
        while True:
            _tick(watch, screen)
            if (ended := watch.feed.ended(time.time())) is not None:
                return ended
            if not watch.feed.behind:
                pause(_TICK_S)
    except KeyboardInterrupt:
        return "no longer watched"


def _tick(watch: Watch, screen: Screen) -> None:
    now_s = time.time()
    for line in watch.poll(now_s):
        screen.say(line)
    screen.show(watch.view(now_s))


def watch_command(
    argv: Sequence[str],
    *,
    directory: Path | None = None,
    out: TextIO | None = None,
) -> int:
    """Runs a command under observation and returns its exit code, 128 + n where signal n ended it.

    The command gets the environment that this process was started with, and what PyTorch needs to
    tell of its compiles. The view is drawn below the command's own output where `out` (standard error
    if None) is a terminal, and comes as lines otherwise. Only for the main thread. Raises ConfigError
    where the command cannot be started or the directory cannot be made.
    """
    directory, stream = directory or new_directory(), out or sys.stderr
    _make(directory)
    # Not os.environ: what this process has set for itself since is none of the program's business.
    environ, outlets = prepare(environ_of(os.getpid()) or os.environ, directory)
    with _sampler_in_view(), Command(argv, environ) as command:
        try:
            observer = Observer(identify(command.pid, ended_too=True), directory, outlets=outlets)
            with observer:
                return _watched(command, argv, observer, environ, outlets, stream)
        # Nothing that goes wrong in watching may reach the program: it is waited for all the same.
        except Exception as error:
            _say(stream, f"watching stopped, the program goes on: {type(error).__name__}: {error}")
        while (code := command.wait(60.0)) is None:
            continue
        return code


def _make(directory: Path) -> None:
    """The directory, before the program starts: PyTorch makes none for its log."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the recording's directory {directory} cannot be made: {error.strerror or error}; give "
            "another one"
        ) from None


def _watched(
    command: Command,
    argv: Sequence[str],
    observer: Observer,
    environ: Mapping[str, str],
    outlets: Outlets,
    stream: TextIO,
) -> int:
    title = _title(argv)
    observer.start(title, environ)
    _say(
        stream,
        f"draftline watch: recording into {observer.directory} "
        f"(set for the program: {', '.join(sorted(outlets.changed)) or 'nothing'})",
    )
    began_s = time.monotonic()
    watch = Watch(ObserverFeed(observer, title), time.time())
    with pick_screen(stream, below_program=True) as screen:
        due_s = began_s + _TICK_S
        while (code := command.wait(due_s - time.monotonic())) is None:
            if command.stop_asked:
                screen.close()
                command.stop_here()
            if time.monotonic() >= due_s:
                _tick(watch, screen)
                due_s = time.monotonic() + _TICK_S
    now_s = time.time()
    watch.take(observer.finish(now_s))
    watch.judge(now_s)
    took = duration(time.monotonic() - began_s)
    ended = f"ended with exit code {code} after {took}"
    _say(stream, *watch.summary(now_s, ended, row_width(stream)))
    _say(stream, *_left(observer, _UNSEEN))
    return code


def _title(argv: Sequence[str]) -> str:
    """What is shown and recorded of a command: without secrets, on one line."""
    return one_line(command_line(argv))


_UNSEEN = "steps, memory requests, graph replays, flex_attention run uncompiled"


def _left(observer: Observer, unseen: str) -> list[str]:
    """What is said of a recording at its end: what it lacks, and how it is read."""
    said = []
    if not observer.recordings:
        said.append(
            f"not seen from outside: {unseen}; two lines in the program add them: `from draftline "
            "import signal`, and `with signal.step():` around each step"
        )
    # A program without GPU and without compiles leaves nothing that a verdict could be about.
    worth_reading = observer.trace().devices
    said.append(
        _where(observer) if worth_reading else "nothing that could be diagnosed was recorded"
    )
    return said


def _where(observer: Observer) -> str:
    here = Path.cwd()
    files = [
        str(path.relative_to(here) if path.is_relative_to(here) else path)
        for path in (observer.directory, *observer.recordings)
    ]
    return f"recorded: draftline diagnose {shlex.join(files)}"


@contextlib.contextmanager
def _sampler_in_view() -> Iterator[None]:
    """Keeps from the log what the view shows: why nothing is sampled."""
    logger = logging.getLogger(sample.__name__)
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of the sampler says more than the view does."""
    return not record.getMessage().startswith("device memory is not sampled")


def _say(stream: TextIO, *said: str) -> None:
    try:
        for line in said:
            print(line, file=stream, flush=True)
    except (OSError, ValueError):  # a closed pipe: nobody listens any more
        return
