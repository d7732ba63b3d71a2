"""The live judgement of a run's memory: a launch that is not flat stops, later movement is said."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType

from draftline.config_sections import SignalSection
from draftline.errors import RunError
from draftline.runlog import RunLog
from draftline.signal.judge.phases import SETTLING_STEPS
from draftline.signal.judge.verdict import Verdict, judge
from draftline.signal.recorder.record import Recorder

log = logging.getLogger(__name__)

# The launch is judged by then, however few steps there were: a person is watching.
_LAUNCH_S = 45.0
_LAUNCH_LOOK_S = 2.0
_LATER_LOOK_S = 60.0
_FEWEST_STEPS = 10 + SETTLING_STEPS
_NOTIFY_S = 30.0


class MemoryWatch:
    """Owns the recording `signal.jsonl` of a run and judges it while the run goes on.

    A context manager; `look` raises RunError for a broken launch. `kind` is the type of the run's
    devices: for cpu steps are recorded and nothing is judged, since there is no device memory.
    """

    def __init__(self, section: SignalSection, runlog: RunLog, kind: str) -> None:
        self._section, self._runlog = section, runlog
        self._cuda = kind == "cuda"
        self._recorder = Recorder(
            runlog.directory / "signal.jsonl",
            expects=("compiled", "captured") if self._cuda else (),
            hz=section.hz,
            program="draftline train",
        )
        self._launched: str | None = None
        self._captured = False
        self._sealed_s = self._looked_s = 0.0
        self._steps = 0
        self._said_launch = self._launch_over = False
        self._said: set[str] = set()

    def __enter__(self) -> MemoryWatch:
        self._recorder.start()
        self.phase("load")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.phase("end")
        self._recorder.stop()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Marks a phase of the recording; in `with`, the one before goes on afterwards."""
        return self._recorder.phase(name)

    def sealed(self, launched: str, *, captured: bool) -> None:
        """Everything is warm: memory must stand still from here on. `launched` says how it was made."""
        self._launched, self._captured = launched, captured
        self._sealed_s = time.monotonic()
        self.phase("run")

    def step(self, number: int, tokens: int) -> None:
        """Step `number` (1-based) is queued; from the lead drafter's thread."""
        if self._captured:
            self._recorder.graph_replayed()
        self._recorder.mark_step(number, tokens)
        self._steps += 1

    def look(self) -> None:
        """Judges the launch when there is enough of it, and from then on the run once a minute."""
        if self._launched is None or self._steps < _FEWEST_STEPS:
            return
        now = time.monotonic()
        every = _LATER_LOOK_S if self._said_launch and self._launch_over else _LAUNCH_LOOK_S
        if now - self._looked_s < every:
            return
        self._looked_s = now
        self._look(enough=not self._cuda or now - self._sealed_s > _LAUNCH_S)

    def close(self) -> None:
        """The last judgement, when the steps are over: says the launch line of a short run too."""
        if self._launched is not None and self._steps:
            self._look(enough=True)

    def _look(self, *, enough: bool) -> None:
        # The first look after the launch steps still counts as the launch: it is what judges them all.
        through = self._steps > self._section.launch_steps
        say = (enough or through) and not self._said_launch
        self._said_launch |= say
        self._judge(say=say, launching=not self._launch_over)
        self._launch_over |= through

    def _judge(self, *, say: bool, launching: bool) -> None:
        if not self._cuda:
            if say:
                self._say_launch("there is no device memory to watch")
            return
        verdict = judge(self._recorder.trace())
        own = own_movement(verdict)
        if own is None:
            if say:
                self._say_launch(f"memory is {_words(verdict)}")
                self._runlog.event("verdict", {"step": self._steps, **_short(verdict)})
            if verdict.verdict == "fault":
                self._warn(verdict, verdict.line)
            return
        decision = self._section.on_volatile or ("stop" if launching else "warn")
        if decision == "warn":
            self._warn(verdict, own)
            return
        self._runlog.event("verdict", {"step": self._steps, **_short(verdict)})
        self._notify(own)
        raise RunError(
            f"this {'launch' if launching else 'run'} is broken: {own} Seen after {self._steps} steps; "
            "the recording is signal.jsonl (draftline diagnose). signal.on_volatile=warn would go on"
        )

    def _say_launch(self, memory: str) -> None:
        log.info("launch: %s; after %d steps %s", self._launched, self._steps, memory)

    def _warn(self, verdict: Verdict, words: str) -> None:
        """Says a finding once a cause, in the log, the run log and to whoever is notified."""
        key = ",".join(c.cause for d in verdict.devices for c in d.causes if c in d.faults)
        if key in self._said:
            return
        self._said.add(key)
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


def own_movement(verdict: Verdict) -> str | None:
    """What is wrong with this program's own memory or steps, in words; None where nothing is. Another
    process on the device is not."""
    for device in verdict.devices:
        own = [cause for cause in device.faults if cause.cause != "other_process"]
        if own:
            return f"GPU {device.device}: {own[0].cause}: {own[0].evidence} Next: {own[0].action}."
        if device.shape not in ("flat", "unknown") and not device.faults:
            return f"GPU {device.device}: memory is {device.shape}: {device.words}."
    return None


def _words(verdict: Verdict) -> str:
    return "; ".join(
        f"{device.shape} on GPU {device.device} ({device.words})" for device in verdict.devices
    )


def _short(verdict: Verdict) -> dict[str, object]:
    """The verdict as an event of the run log."""
    return {
        "verdict": verdict.verdict,
        "line": verdict.line,
        "causes": {d.device: [c.cause for c in d.causes] for d in verdict.devices},
        "shapes": {d.device: d.shape for d in verdict.devices},
    }
