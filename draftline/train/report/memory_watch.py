"""The live judgement of a run's memory: a launch that is not flat stops, later movement is said."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from draftline.choices import Choices
from draftline.config.running import SignalSection
from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.signal.judge.verdict import DeviceVerdict, Verdict
from draftline.signal.monitor import Monitor
from draftline.signal.recorder.record import Recorder
from draftline.signal.trace import device_name

log = logging.getLogger(__name__)

# A person is watching: by then the log says how the launch went, however few steps there were.
_LAUNCH_S = 45.0
_LAUNCH_LOOK_S = 2.0
_LATER_LOOK_S = 60.0
# A finding stops a run when it is still there after so long: a library's late workspace is no fault.
_SURE_S = 10.0
_FEWEST_STEPS = 13
_NOTIFY_S = 30.0


class MemoryWatch:
    """Owns the recording `signal.jsonl` of a run and judges it while the run goes on.

    A context manager; `look` raises RunError for a broken launch. A later stop goes through `may_stop`'s
    callable, so that the run ends with a checkpoint, and leaves its error in `stopped`. `kind` is the
    type of the run's devices: for cpu steps are recorded and nothing is judged, since there is no
    device memory.
    """

    def __init__(self, section: SignalSection, runlog: RunLog, kind: str, choices: Choices) -> None:
        self._section, self._runlog, self._choices = section, runlog, choices
        self._cuda = kind == "cuda"
        self._recorder = Recorder(
            runlog.directory / "signal.jsonl",
            expects=("compiled", "captured") if self._cuda else (),
            hz=section.hz,
            program="draftline train",
        )
        self._monitor = Monitor(self._recorder.trace)
        self.stopped: RunError | None = None
        self._stop: Callable[[], None] = lambda: None
        self._launched: str | None = None
        self._replays: Callable[[], int] = lambda: 0
        self._replayed = 0
        self._sealed_s = 0.0
        self._steps = 0
        self._said_launch = self._launch_over = False
        self._suspect: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> MemoryWatch:
        self._recorder.start()
        self.phase("load")
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self._recorder.event("error", f"{type(error).__name__}: {error}")
        self.phase("end")
        self._recorder.stop()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Marks a phase of the recording; in `with`, the one before goes on afterwards."""
        return self._recorder.phase(name)

    def may_stop(self, stop: Callable[[], None]) -> None:
        """`stop()` ends the run at its next step boundary, with a checkpoint."""
        self._stop = stop

    def sealed(self, launched: str, *, replays: Callable[[], int]) -> None:
        """Everything is warm: memory must stand still from here on. `launched` says how it was made;
        `replays()` counts the graphs that the lead drafter replayed."""
        self._launched, self._replays = launched, replays
        self._replayed = replays()
        self._sealed_s = time.monotonic()
        if self._cuda and (reason := self._recorder.unsampled) is not None:
            self._choices.record(
                "signal.samples",
                wanted="the driver's readings",
                got="the allocator's counters alone",
                reason=reason,
            )
        self.phase("run")

    def step(self, number: int, tokens: int) -> None:
        """Step `number` (1-based) is queued; from the lead drafter's thread."""
        if self._cuda:
            before, self._replayed = self._replayed, self._replays()
            self._recorder.count("graph_replays", self._replayed - before)
        self._recorder.mark_step(number, tokens)
        self._steps += 1

    def look(self) -> None:
        """Judges the launch every other second, and from then on the run once a minute."""
        now = time.monotonic()
        late = now - self._sealed_s > _LAUNCH_S
        if self._launched is None or self._steps < (1 if late else _FEWEST_STEPS):
            return
        every = _LATER_LOOK_S if self._said_launch and self._launch_over else _LAUNCH_LOOK_S
        if self._monitor.due(now, every):
            self._look(enough=late or not self._cuda)

    def close(self) -> None:
        """The last judgement, when the steps are over: says the launch line of a short run too. There is
        nothing left to stop."""
        if self._launched is not None and self._steps:
            self._look(enough=True, ended=True)

    def _look(self, *, enough: bool, ended: bool = False) -> None:
        # The first look after the launch steps still counts as the launch: it is what judges them all.
        through = self._steps > self._section.launch_steps
        say = (enough or through) and not self._said_launch
        self._said_launch |= say
        if not self._cuda:
            if say:
                self._say_launch("there is no device memory to watch")
            return
        verdict = self._monitor.look(time.monotonic())
        if verdict is None:
            return
        if say:
            self._say_launch(f"memory is {_words(verdict)}")
            self._runlog.event("verdict", {"step": self._steps, **_short(verdict)})
        found = own_fault(verdict) or movement(verdict)
        if found is not None and not ended and self._is_sure(found):
            decision = self._section.on_volatile or ("warn" if self._launch_over else "stop")
            if decision == "stop":
                self._end_run(verdict, found, launching=not self._launch_over)
                return
        words = found or (verdict.line if verdict.verdict == "fault" else None)
        if words is not None:
            self._warn(verdict, words)
        self._launch_over |= through

    def _is_sure(self, found: str) -> bool:
        """Whether the same cause was found on the same device some time ago, and ever since."""
        key = ":".join(found.split(":")[:2])
        now = time.monotonic()
        if self._suspect[0] != key:
            self._suspect = (key, now)
        return now - self._suspect[1] >= _SURE_S

    def _end_run(self, verdict: Verdict, found: str, *, launching: bool) -> None:
        if self.stopped is not None:
            return
        self._runlog.event("verdict", {"step": self._steps, **_short(verdict)})
        self._notify(found)
        self.stopped = RunError(
            f"this {'launch' if launching else 'run'} is broken: {found} Seen after {self._steps} steps; "
            "the recording is signal.jsonl (draftline diagnose). signal.on_volatile=warn goes on all the "
            "same: with --resume where a checkpoint was written"
        )
        if launching:
            raise self.stopped
        self._stop()

    def _say_launch(self, memory: str) -> None:
        log.info("launch: %s; after %d steps %s", self._launched, self._steps, memory)

    def _warn(self, verdict: Verdict, words: str) -> None:
        """Says a finding once, in the log, the run log and to whoever is notified."""
        if not self._monitor.is_news():
            return
        log.warning("memory: %s", words)
        self._runlog.event("verdict", {"step": self._steps, **_short(verdict)})
        self._notify(words)

    def _notify(self, words: str) -> None:
        command = self._section.notify
        if command is None:
            return

        def send() -> None:
            text = f"draftline, {self._runlog.directory.name}: {words}"
            try:
                done = subprocess.run(
                    command, input=text, text=True, timeout=_NOTIFY_S, capture_output=True
                )
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("signal.notify: %s", error)
                return
            if done.returncode:
                log.warning(
                    "signal.notify: exit %d, %s", done.returncode, done.stderr.strip()[:200]
                )

        threading.Thread(target=send, name="signal-notify").start()


def own_fault(verdict: Verdict) -> str | None:
    """A fault of this program's own, in words; None where there is none that could stop a run.

    Another process on the device is none. Nor is a leak while the allocator holds the same: what
    tensors occupy is read while targets may be in the middle of a forward.
    """
    for device in verdict.devices:
        for cause in device.faults:
            if cause.cause == "other_process" or (cause.cause == "leak" and not _own(device)):
                continue
            name = device_name(device.device)
            return f"{name}: {cause.cause}: {cause.evidence} Next: {cause.action}."
    return None


def movement(verdict: Verdict) -> str | None:
    """Memory of this program's own that moves for no reason that its counters name, in words."""
    for device in verdict.devices:
        if _own(device) and not device.faults:
            return f"{device_name(device.device)}: memory is {device.memory}: {device.words}."
    return None


def _own(device: DeviceVerdict) -> bool:
    return device.allocator not in ("flat", "unknown")


def _words(verdict: Verdict) -> str:
    return "; ".join(
        f"{device.memory} on {device_name(device.device)} ({device.words})"
        for device in verdict.devices
    )


def _short(verdict: Verdict) -> dict[str, object]:
    """The verdict as an event of the run log."""
    return {
        "verdict": verdict.verdict,
        "line": verdict.line,
        "causes": {d.device: [c.cause for c in d.causes] for d in verdict.devices},
        "shapes": {d.device: d.shape for d in verdict.devices},
    }
