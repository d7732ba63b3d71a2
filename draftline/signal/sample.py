"""A thread that samples every device's memory a few times a second and never disturbs the program."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from draftline.signal.nvml import Device, Reading, Source, open_source

log = logging.getLogger(__name__)

_RETRY_S = 30.0  # a driver that failed is asked again after this long


def next_tick(due_s: float, now_s: float, period_s: float) -> tuple[float, int]:
    """When the tick after the one due at `due_s` is due, on the same grid, and how many were missed."""
    missed = max(0, int((now_s - due_s) // period_s))
    return due_s + (missed + 1) * period_s, missed


def every_device(_name: str) -> bool:
    return True


class DeviceSampler:
    """Calls `on_sample` with each Reading, `hz` times a second, from its own thread; keeps the last
    `capacity` of them. `wanted` picks devices by name. `on_tick` runs after each round, with or
    without devices.

    Nothing raises out of the thread: a source that fails is counted in `failures`, said once in the
    log, kept in `reason`, and tried again every 30 s.
    """

    def __init__(
        self,
        hz: float = 5.0,
        on_sample: Callable[[Reading], None] | None = None,
        *,
        on_tick: Callable[[], None] | None = None,
        wanted: Callable[[str], bool] = every_device,
        source: Callable[[], Source] = open_source,
        capacity: int = 8192,
    ) -> None:
        self.hz = hz
        self.failures = 0
        self.missed = 0
        self.reason: str | None = None
        self.readings: deque[Reading] = deque(maxlen=capacity)
        self._on_sample = on_sample
        self._on_tick = on_tick
        self._wanted = wanted
        self._open = source
        self._source: Source | None = None
        self._retry_at_s = 0.0
        self._asked_at_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def devices(self) -> list[Device]:
        """The devices of the driver, empty while it cannot be asked."""
        source = self._ready(time.monotonic())
        return [] if source is None else source.devices()

    def _ready(self, now_s: float) -> Source | None:
        if self._source is None and now_s >= self._retry_at_s:
            try:
                self._source = self._open()
                self.reason = None
            except Exception as error:
                self._failed(error, now_s)
        return self._source

    def _failed(self, error: Exception, now_s: float) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("device memory is not sampled: %s", error)
        self.reason = str(error) or type(error).__name__
        self._retry_at_s = now_s + _RETRY_S
        self._close()

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def tick(self, now_s: float) -> None:
        """One round at `now_s` (monotonic): what the thread does."""
        source = self._ready(now_s)
        if source is not None and now_s - self._asked_at_s >= 0.9 / source.hz_limit:
            self._asked_at_s = now_s
            try:
                readings = source.read(self._wanted)
            except Exception as error:
                self._failed(error, now_s)
                readings = []
            for reading in readings:
                self.readings.append(reading)
                if self._on_sample is not None:
                    self._on_sample(reading)
        if self._on_tick is not None:
            self._on_tick()

    def _run(self) -> None:
        period_s = 1.0 / self.hz
        due_s = time.monotonic()
        while not self._stop.is_set():
            try:
                self.tick(time.monotonic())
            except Exception:
                self.failures += 1
                if self.failures == 1:
                    log.exception("the sampler could not hand on what it read")
            due_s, missed = next_tick(due_s, time.monotonic(), period_s)
            self.missed += missed
            self._stop.wait(max(0.0, due_s - time.monotonic()))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="signal-sampler", daemon=True)
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Whether the thread ended within `deadline_s`; one that hangs in the driver is left behind."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(deadline_s)
            if thread.is_alive():
                log.warning("the sampler did not end within %.0f s: the driver hangs", deadline_s)
                return False
        self._close()
        return True

    def __enter__(self) -> DeviceSampler:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
