"""The one recorder of a program that says `signal.step()` and no more."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

from draftline.errors import ConfigError
from draftline.signal.recorder.record import Recorder


class Session:
    """Holds the recorder that the functions of `draftline.signal` use, and makes it when needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None

    def start(
        self, path: Path | str | None, expects: Collection[str], hz: float, own_peak: bool
    ) -> Recorder:
        """A new recorder, started; raises ConfigError while another one records."""
        with self._lock:
            if self._recorder is not None and self._recorder.live:
                raise ConfigError(
                    f"signal.start: {self._recorder.path} is being recorded; signal.stop() ends it"
                )
            return self._started(path, expects, hz, own_peak)

    def _started(
        self, path: Path | str | None, expects: Collection[str], hz: float, own_peak: bool
    ) -> Recorder:
        target = Path(path) if path is not None else Path(f"signal-{os.getpid()}.jsonl")
        self._recorder = Recorder(target, expects=expects, hz=hz, own_peak=own_peak).start()
        return self._recorder

    def recorder(self) -> Recorder:
        """The recorder, started where there is none, by the first of several threads that ask. A
        forked child keeps its parent's, which records nothing there."""
        if (found := self._recorder) is not None:
            return found
        with self._lock:
            return self._recorder or self._started(None, (), 5.0, own_peak=False)

    def stop(self) -> None:
        with self._lock:
            recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


SESSION = Session()
