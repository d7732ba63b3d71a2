"""How often the verdict names the cause of a recording of the corpus, as Markdown tables.

    python bench/confusion.py [--set test|tuning|all] [--json]
        [--without-marks] [--without-declaration] [--without-processes]

Judges every recording three times: its counters with the driver's memory, its counters alone, and what
nvidia-smi alone shows. The first table has all of the harder variants too; the options choose the one
that the matrices, or the JSON lines, are of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fault_corpus import unpack

from draftline.environment import provenance
from draftline.signal.judge.shape import SHAPES
from draftline.signal.judge.verdict import judge
from draftline.signal.readers.read import read_trace
from draftline.signal.trace import Trace
from draftline.signal.words import CAUSES, FAULTS

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "faults"
SIDES = ("test", "tuning")
ALL, COUNTERS, SMI = VIEWS = ("counters + nvidia-smi", "counters alone", "nvidia-smi alone")
OUTCOMES = ("right", "unknown", "wrong cause", "missed", "false alarm")


@dataclass(frozen=True, slots=True)
class Judged:
    """One recording in one view: its label, and the verdict's causes, the first of which counts."""

    name: str
    side: str
    view: str
    label: str
    causes: tuple[str, ...]
    shape: str
    verdict: str

    @property
    def outcome(self) -> str:
        """One of OUTCOMES. "missed" is a fault called healthy, "false alarm" a fault named on a
        healthy recording; `pause` for `healthy` is a wrong cause."""
        found = self.causes[0]
        if found == self.label:
            return "right"
        if found == "unknown":
            return "unknown"
        if (found in FAULTS) == (self.label in FAULTS):
            return "wrong cause"
        return "missed" if self.label in FAULTS else "false alarm"

    @property
    def restless(self) -> bool:
        """No fault is named on a healthy recording, but its memory is said not to be flat."""
        return self.label not in FAULTS and self.verdict == "not_flat"


def views(folder: Path) -> dict[str, Trace]:
    """A recording as each of VIEWS shows it."""
    sampled = folder / "nvidia-smi.csv"
    both = read_trace([folder / "signal.jsonl", sampled])
    return {ALL: both, COUNTERS: replace(both, samples=()), SMI: read_trace([sampled])}


def without_marks(trace: Trace) -> Trace:
    """Without phases, as a foreign program's recording is."""
    return replace(trace, events=tuple(e for e in trace.events if e.kind != "phase"))


def without_declaration(trace: Trace) -> Trace:
    """Without what the program expects of its steps and what it knew of its environment."""
    program = trace.program and replace(trace.program, expects=frozenset(), facts={})
    return replace(trace, program=program)


def without_processes(trace: Trace) -> Trace:
    """Without the driver's list of processes, which containers hide."""
    return replace(trace, samples=tuple(replace(s, by_process={}) for s in trace.samples))


VARIANTS: Mapping[str, Callable[[Trace], Trace]] = {
    "marks": without_marks,
    "declaration": without_declaration,
    "processes": without_processes,
}
# What each view holds that a variant can take away.
_HELD = {ALL: tuple(VARIANTS), COUNTERS: ("marks", "declaration"), SMI: ()}


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording of the corpus, read."""

    name: str
    side: str
    label: str
    views: Mapping[str, Trace]

    def judged(self, without: Iterable[str] = ()) -> list[Judged]:
        """The verdict on each view, after the variants have taken away what they are named for."""
        found = []
        for view, trace in self.views.items():
            for name in without:
                trace = VARIANTS[name](trace)
            verdict = judge(trace)
            (device,) = verdict.devices
            causes = tuple(cause.cause for cause in device.causes)
            found.append(
                Judged(
                    self.name, self.side, view, self.label, causes, device.shape, verdict.verdict
                )
            )
        return found


def read_corpus(corpus: Path, folder: Path) -> list[Recording]:
    """The recordings of `corpus`, unpacked into `folder`."""
    sides = json.loads((corpus / "split.json").read_text())
    labels = unpack(corpus / "corpus.tar.xz", folder)
    return [
        Recording(name, side, labels[name]["cause"], views(folder / name))
        for side in SIDES
        for name in sides[side]
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; zeros are left empty."""
    lines = [head, ["---"] * len(head)]
    lines += [["" if cell == 0 else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def crossed(judged: Sequence[Judged], of: Callable[[Judged], str], order: Sequence[str]) -> str:
    """Labels down, `of` across, how many; of both only those that occur."""
    count = Counter((one.label, of(one)) for one in judged)
    labels = [c for c in CAUSES if any(one.label == c for one in judged)]
    across = [c for c in order if any(of(one) == c for one in judged)]
    rows = [[f"`{label}`", *(count[label, c] for c in across)] for label in labels]
    return table(["label", *(f"`{c}`" for c in across)], rows)


def summary(recordings: Sequence[Recording]) -> str:
    """Outcomes by set, view and variant."""
    rows: list[list[object]] = []
    for side in SIDES:
        part = [recording for recording in recordings if recording.side == side]
        for variant in (None, *VARIANTS) if part else ():
            judged = [one for r in part for one in r.judged([variant] if variant else [])]
            for view in VIEWS:
                if variant is None or variant in _HELD[view]:
                    seen = [one for one in judged if one.view == view]
                    shown = view + (f", without {variant}" if variant else "")
                    counts = Counter(one.outcome for one in seen)
                    counts["restless"] = sum(one.restless for one in seen)
                    rows.append([side, shown, len(seen), *(counts[o] for o in OUTCOMES)])
                    rows[-1].append(counts["restless"])
    return table(["set", "seen", "recordings", *OUTCOMES, "healthy, called not flat"], rows)


def report(judged: Sequence[Judged], without: Sequence[str]) -> str:
    """Matrices of causes and shapes for each view, and what was not right or more than one cause."""
    parts = []
    for view in VIEWS:
        seen = [one for one in judged if one.view == view]
        taken = [name for name in without if name in _HELD[view]]
        title = view + (f", without {' and '.join(taken)}" if taken else "")
        parts.append(f"### {title}: first cause found\n")
        parts.append(crossed(seen, lambda one: one.causes[0], CAUSES))
        odd = [one for one in seen if one.outcome not in ("right", "unknown") or one.restless]
        parts += [f"- `{o.name}` ({o.side}): {_told(o)}" for o in odd]
        more = [one for one in seen if len(one.causes) > 1]
        parts += [f"- `{o.name}` ({o.side}): after `{o.causes[0]}` also {_rest(o)}" for o in more]
        parts.append(f"\n### {title}: shape\n")
        parts.append(crossed(seen, lambda one: one.shape, SHAPES))
    return "\n".join(parts)


def _told(one: Judged) -> str:
    if one.restless:
        return f"`{one.label}`, no fault named, memory called {one.shape}"
    return f"{one.outcome}, `{one.label}` called `{one.causes[0]}`"


def _rest(one: Judged) -> str:
    return ", ".join(f"`{cause}`" for cause in one.causes[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=[*SIDES, "all"], default="all")
    for name in VARIANTS:
        parser.add_argument(f"--without-{name}", action="store_true")
    parser.add_argument("--json", action="store_true", help="one object per recording and view")
    options = parser.parse_args(arguments)
    chosen: dict[str, Any] = vars(options)
    without = [name for name in VARIANTS if chosen[f"without_{name}"]]
    with tempfile.TemporaryDirectory() as folder:
        recordings = read_corpus(CORPUS, Path(folder))
    recordings = [r for r in recordings if options.set in (r.side, "all")]
    judged = [one for recording in recordings for one in recording.judged(without)]
    if options.json:
        for one in judged:
            print(json.dumps(asdict(one) | {"outcome": one.outcome}))
        return
    commit = os.environ.get("DRAFTLINE_COMMIT") or provenance()["commit"]
    print(f"`python bench/confusion.py {' '.join(arguments or sys.argv[1:])}` at commit {commit}\n")
    print(summary(recordings))
    print(report(judged, without))


if __name__ == "__main__":
    main()
