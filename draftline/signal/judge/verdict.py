"""The judgement of a trace: what was found of each device, in words, as JSON and as an exit code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from draftline.signal.judge.cause import Cause
from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.findings import find_causes, shape_of, without_fault
from draftline.signal.judge.phases import Phase
from draftline.signal.trace import Trace, device_name
from draftline.signal.words import FAULTS


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """One device: `shape` is one of shape.SHAPES, `words` describes it, `causes` has at least one;
    `allocator` is the shape of what this program's allocator holds on it, `level` how much memory is
    in use ("at 8,598 MiB")."""

    device: str
    shape: str
    words: str
    phases: tuple[Phase, ...]
    causes: tuple[Cause, ...]
    allocator: str = "unknown"
    level: str = ""

    @property
    def faults(self) -> list[Cause]:
        return [cause for cause in self.causes if cause.cause in FAULTS]

    @property
    def memory(self) -> str:
        """Shape and level: "flat at 8,598 MiB"."""
        return f"{self.shape} {self.level}".rstrip()

    @property
    def flat(self) -> bool:
        return self.shape == "flat"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`verdict` is healthy, fault, not_flat (no cause can be named), flat (no counters say more), idle
    (no program used a device) or unknown."""

    devices: tuple[DeviceVerdict, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if any(device.faults for device in self.devices):
            return "fault"
        if any(device.shape not in ("flat", "idle", "unknown") for device in self.devices):
            return "not_flat"
        if not self.devices or any(
            device.shape == "unknown" and device.causes[0].cause == "unknown"
            for device in self.devices
        ):
            return "unknown"
        used = [device for device in self.devices if device.shape != "idle"]
        if not used:
            return "idle"
        return "healthy" if all(d.causes[0].cause != "unknown" for d in used) else "flat"

    @property
    def is_bad(self) -> bool:
        """Whether there is a fault, or memory that is not flat."""
        return self.verdict in ("fault", "not_flat")

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong with it; 3: not flat, or a fault; 4: it cannot be told."""
        return {"fault": 3, "not_flat": 3, "unknown": 4, "idle": 4}.get(self.verdict, 0)

    @property
    def worst(self) -> DeviceVerdict:
        """The device that the line speaks of; there must be one."""
        return max(self.devices, key=_badness)

    @property
    def line(self) -> str:
        """The judgement in one line."""
        if not self.devices:
            return "no device memory was recorded"
        worst = self.worst
        first = worst.causes[0]
        where = f"{device_name(worst.device)}: "
        if worst.faults:
            level = f" Memory: {worst.memory}." if worst.level else ""
            return f"{where}{first.cause} ({first.confidence} confidence): {first.evidence}{level}"
        if first.cause == "unknown":
            return where + first.evidence
        others = len(self.devices) - 1
        also = (
            f" (and {others} more alike)" if others and self.verdict in ("healthy", "flat") else ""
        )
        return f"{where}memory is {worst.memory}, {first.cause}{also}: {first.evidence}"

    def to_dict(self) -> dict[str, Any]:
        """What `draftline diagnose --json` prints."""
        return {
            "devices": [
                {
                    "device": device.device,
                    "shape": device.shape,
                    "level": device.level,
                    "words": device.words,
                    "phases": [asdict(phase) for phase in device.phases],
                    "causes": [asdict(cause) for cause in device.causes],
                }
                for device in self.devices
            ],
            "verdict": self.verdict,
            "line": self.line,
            "notes": list(self.notes),
        }


def judge(trace: Trace) -> Verdict:
    """The verdict on everything read of one run."""
    return Verdict(tuple(_judge(seen) for seen in gather(trace)), trace.notes)


def _judge(seen: Evidence) -> DeviceVerdict:
    shape = shape_of(seen)
    causes = find_causes(seen) or [without_fault(seen, shape)]
    words = "no device memory" if seen.device == "cpu" else shape.words
    return DeviceVerdict(
        seen.device,
        shape.kind,
        words,
        tuple(seen.phases),
        tuple(causes),
        seen.held.kind,
        "" if seen.device == "cpu" else shape.level,
    )


def _badness(device: DeviceVerdict) -> tuple[bool, bool, bool]:
    return bool(device.faults), not device.flat and device.shape != "idle", device.shape != "idle"


def report_lines(verdict: Verdict) -> list[str]:
    """The verdict for a person, as `draftline diagnose` prints it."""
    lines = []
    for device in verdict.devices:
        name = device_name(device.device)
        lines.append(f"{name}: {device.memory} - {device.words}")
        stretches = [f"{p.name} {p.seconds:.1f} s" for p in device.phases]
        if stretches:
            shown = (
                stretches
                if len(stretches) <= 9
                else [*stretches[:8], f"... {len(stretches) - 8} more"]
            )
            lines.append(f"  phases: {', '.join(shown)}")
        for cause in device.causes:
            lines.append(f"  {cause.cause} ({cause.confidence} confidence): {cause.evidence}")
            if cause.action != "nothing to do":
                lines.append(f"    next: {cause.action}")
    lines += [f"note: {note}" for note in verdict.notes]
    # With one device the line would repeat its cause.
    line = f" - {verdict.line}" if len(verdict.devices) != 1 else ""
    lines.append(f"verdict: {verdict.verdict}{line}")
    return lines
