"""A thread that samples devices' memory a few times a second and never disturbs the program."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from draftline.errors import ConfigError
from draftline.signal.recorder.nvml import Device, Reading, Source, open_source

log = logging.getLogger(__name__)

_RETRY_S = 30.0  # a driver that failed is asked again after this long
_HZ_MOST = 100.0
PATIENCE_S = 5.0  # for the thread's last round at the end


def next_tick(due_s: float, now_s: float, period_s: float) -> float:
    """When the tick after the one due at `due_s` is due: on the same grid, those missed left out."""
    missed = max(0, int((now_s - due_s) / period_s))
    return due_s + (missed + 1) * period_s


def check_hz(hz: float) -> float:
    """`hz` itself; raises ConfigError unless it is above 0 and at most 100."""
    if not 0 < hz <= _HZ_MOST:
        raise ConfigError(
            f"hz={hz}: samples per second, above 0 and at most {_HZ_MOST:.0f}; 5 is usual"
        )
    return hz


class DeviceSampler:
    """Calls `on_sample` with each Reading, `hz` times a second, from its own thread. `wanted` gives the
    names of the devices to read, None for every one; while it gives none, the driver is not even
    asked. `on_tick` runs after each round.

    A context manager. Nothing raises out of the thread, which ends with the program: a source that
    fails is counted in `failures`, said once in the log, kept in `reason` and tried again every 30 s.
    Ticks lie on a fixed grid; one that comes too late is left out.
    """

    def __init__(
        self,
        hz: float = 5.0,
        on_sample: Callable[[Reading], None] | None = None,
        *,
        on_tick: Callable[[], None] | None = None,
        wanted: Callable[[], Collection[str] | None] | None = None,
        source: Callable[[], Source] = open_source,
    ) -> None:
        self.hz = check_hz(hz)
        self.failures = 0
        self.reason: str | None = None
        self._on_sample = on_sample
        self._on_tick = on_tick
        self._wanted = wanted
        self._open = source
        self._source: Source | None = None
        self._opening = threading.Lock()
        self._retry_at_s = self._due_s = -1.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def devices(self) -> list[Device]:
        """The driver's devices, empty while it cannot be asked."""
        source = self._ready(time.monotonic())
        return [] if source is None else source.devices()

    def tick(self, now_s: float) -> None:
        """One round at `now_s` (monotonic): what the thread does."""
        names = None if self._wanted is None else self._wanted()
        if (names is None or names) and now_s >= self._due_s:
            self._sample(names, now_s)
        if self._on_tick is not None:
            self._on_tick()

    def _sample(self, names: Collection[str] | None, now_s: float) -> None:
        source = self._ready(now_s)
        if source is None:
            return
        self._due_s = now_s + 1.0 / source.hz_limit
        try:
            readings = source.read(names)
        except Exception as error:  # the thread's own border: see the class
            self._failed(error, now_s)
            return
        for reading in readings:
            if self._on_sample is not None:
                self._on_sample(reading)

    def _ready(self, now_s: float) -> Source | None:
        with self._opening:
            if self._source is None and now_s >= self._retry_at_s:
                try:
                    self._source, self.reason = self._open(), None
                except Exception as error:  # the thread's own border: see the class
                    self._failed(error, now_s)
            return self._source

    def _failed(self, error: Exception, now_s: float) -> None:
        self.failures += 1
        self.reason = str(error) or type(error).__name__
        if self.failures == 1:
            log.warning("device memory is not sampled: %s", self.reason)
        self._retry_at_s = now_s + _RETRY_S
        self._close()

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _run(self) -> None:
        period_s = 1.0 / self.hz
        due_s = time.monotonic()
        said = False
        while not self._stop.is_set():
            try:
                self.tick(time.monotonic())
            except Exception:  # the thread's own border: see the class
                self.failures += 1
                if not said:
                    said = True
                    log.warning("the sampler could not hand on what it read", exc_info=True)
            due_s = next_tick(due_s, time.monotonic(), period_s)
            self._stop.wait(max(0.0, due_s - time.monotonic()))

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="signal-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Whether the thread ended within five seconds; one that hangs, in the driver
        or on the disk, is left behind."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                log.warning("the sampler hangs: it did not end within %.0f s", PATIENCE_S)
                return False
        self._close()
        return True

    def __enter__(self) -> DeviceSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
