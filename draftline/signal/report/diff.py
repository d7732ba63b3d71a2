"""Two runs side by side: "it used to be flat"."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from draftline.signal.report.diff_facts import ABSENT, causes_of, device_labels, outcome_of
from draftline.signal.report.diff_rules import LEFT_OUT, LIKELY, POSSIBLE, rule_for
from draftline.signal.report.run_facts import RunFacts, read_run
from draftline.signal.trace import one_line

# Times of a start differ with everything else on a machine; what is a count must be equal.
_NOISE = {"compile.seconds": 0.5}
_SAME = 0.03  # share by which a figure of the outcome may differ and still be called the same
_SAME_PCT = 2.0  # the same for figures that are shares already
_NOT_KNOWN = "not known"
_WORDS = {LIKELY: "likely", POSSIBLE: "possible", 0: "unlikely"}


@dataclass(frozen=True, slots=True)
class Changed:
    """A figure of the outcome in both runs, as text; "not known" where a run does not tell. `where` is
    "" for the whole run, a device, or "speed"."""

    where: str
    what: str
    a: str
    b: str
    same: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference that came before the outcome. `rank` 1 explains a change in memory best;
    `explains` is likely, possible or unlikely; `why` is one sentence."""

    rank: int
    what: str
    a: str
    b: str
    explains: str
    why: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs compared; `missing` says in words what could not be, `same` counts equal facts."""

    a: str
    b: str
    verdict_a: str
    verdict_b: str
    changed: tuple[Changed, ...]
    findings: tuple[Finding, ...]
    same: int
    missing: tuple[str, ...]

    @property
    def memory_differs(self) -> bool | None:
        """Whether memory behaved in another way, None where one run does not tell."""
        told = [row for row in self.changed if row.what == "memory is"]
        if not told or any(_NOT_KNOWN in (row.a, row.b) for row in told):
            return None
        moved = ("memory is", "reserved GiB, highest", "device GiB, highest")
        return not all(row.same for row in self.changed if row.what in moved)

    def to_dict(self) -> dict[str, Any]:
        """What `draftline diff --json` prints."""
        return asdict(self) | {"memory_differs": self.memory_differs}

    def lines(self, width: int = 100) -> list[str]:
        """The comparison for a person, in lines of at most about `width` characters."""
        lines = []
        for side, name, said in (("A", self.a, self.verdict_a), ("B", self.b, self.verdict_b)):
            lines += [f"{side}  {name}", *textwrap.wrap(said, width, **_indents(3))]
        lines += ["", *_table(self.changed, width), ""]
        differs = self.memory_differs
        if not self.findings:
            lines.append("no other difference was recorded in both")
        elif differs:
            lines.append("what may explain it, the most telling first:")
        elif differs is None:
            lines.append("whether memory behaves alike cannot be told; these differ:")
        else:
            lines.append("memory behaves alike in both; these differ all the same:")
        for (explains, why), group in groupby(self.findings, key=lambda f: (f.explains, f.why)):
            for finding in group:
                head = f"{finding.rank:>3}. {finding.what}: {finding.a} -> {finding.b}"
                lines += textwrap.wrap(head, width, subsequent_indent=" " * 5)
            lines += textwrap.wrap(f"{explains}: {why}", width, **_indents(5))
        lines.append(f"{self.same} facts are the same in both")
        lines += [f"not compared: {text}" for text in self.missing]
        return lines


def _indents(letters: int) -> dict[str, Any]:
    return {"initial_indent": " " * letters, "subsequent_indent": " " * letters}


def compare(run_a: Path, run_b: Path) -> Difference:
    """How two runs (directories or recordings) differ, and what of it may explain their memory.

    Raises ConfigError where one of them cannot be read.
    """
    return compare_facts(read_run([run_a]), read_run([run_b]), names=(str(run_a), str(run_b)))


def compare_facts(a: RunFacts, b: RunFacts, *, names: tuple[str, str]) -> Difference:
    """`compare` of two runs that were read already."""
    missing = [f"{side} has {what}" for side, run in (("A", a), ("B", b)) for what in run.missing]
    left, right = causes_of(a), causes_of(b)
    labels = device_labels(a, b)
    differing: list[tuple[int, str, str, str, str]] = []
    same = 0
    for section, (words, prefix) in _SECTIONS.items():
        if section not in left and section not in right:
            continue
        if section not in left or section not in right:
            side = "A" if section not in left else "B"
            missing.append(f"{side} does not tell {words}")
            continue
        absent = ABSENT.get(section)
        lone: dict[str, list[str]] = {"A": [], "B": []}
        for key in left[section].keys() | right[section].keys():
            name = f"{section}.{key}"
            if LEFT_OUT.fullmatch(name):
                continue
            if absent is None and (key not in left[section] or key not in right[section]):
                lone["B" if key not in left[section] else "A"].append(key)
                continue
            one, other = (_show(side[section].get(key, absent)) for side in (left, right))
            if one == other or _noise(name, left[section].get(key), right[section].get(key)):
                same += 1
                continue
            rule = rule_for(name)
            differing.append((rule.weight, f"{prefix}{key}", one, other, rule.why))
        missing += [
            f"only {side} tells {', '.join(sorted(keys))}" for side, keys in lone.items() if keys
        ]
    differing.sort(key=lambda row: (-row[0], row[1]))
    findings = [
        Finding(rank, what, one, other, _explains(weight), why)
        for rank, (weight, what, one, other, why) in enumerate(differing, start=1)
    ]
    return Difference(
        a=names[0],
        b=names[1],
        verdict_a=a.verdict.line,
        verdict_b=b.verdict.line,
        changed=tuple(_changed(outcome_of(a, labels), outcome_of(b, labels))),
        findings=tuple(findings),
        same=same,
        missing=tuple(sorted(missing)),
    )


# What a run that lacks a section does not tell, and what stands before a name of the section.
_SECTIONS = {
    "compile": ("what was compiled", "compile: "),
    "capture": ("what was captured", "capture: "),
    "shape": ("the sizes of its steps", ""),
    "processes": ("which processes were on its devices", "processes: "),
    "environment": ("the machine it ran on", ""),
    "version": ("its versions", "version of "),
    "variable": ("its environment variables", ""),
    "config": ("its configuration", ""),
    "choice": ("its automatic choices", "choice of "),
}


def _explains(weight: int) -> str:
    return next(word for limit, word in _WORDS.items() if weight >= limit)


def _noise(name: str, a: object, b: object) -> bool:
    share = _NOISE.get(name)
    if share is None or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return False
    return abs(a - b) <= max(share * max(abs(a), abs(b)), 5.0)


def _changed(
    a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]
) -> list[Changed]:
    rows = []
    for where in dict.fromkeys((*a, *b)):
        one, other = a.get(where, {}), b.get(where, {})
        for what in dict.fromkeys((*one, *other)):
            left, right = one.get(what), other.get(what)
            same = left == right
            if isinstance(left, float) and isinstance(right, float):
                within = _SAME_PCT if what.endswith("%") else 0.05
                same = math.isclose(left, right, rel_tol=_SAME, abs_tol=within)
            a_says, b_says = (_NOT_KNOWN if v is None else _show(v) for v in (left, right))
            rows.append(Changed(where, what, a_says, b_says, same))
    # Speed comes last, whichever run has more devices.
    return sorted(rows, key=lambda row: row.where == "speed")


def _show(value: object) -> str:
    """A value as one short line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "null"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e9:
            return f"{value:,.0f}"
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        value = f"[{', '.join(_show(item) for item in value[:20])}{', ...' * (len(value) > 20)}]"
    return one_line(str(value), 160)


def _table(rows: Sequence[Changed], width: int) -> list[str]:
    names = max((len(row.what) for row in rows), default=0) + 2
    values = max((len(text) for row in rows for text in (row.a, row.b)), default=0)
    values = max(8, min(values, (width - names - 8) // 2))
    lines = [f"  {'':{names}}  {'A':{values}}  B"]
    for where, group in groupby(rows, key=lambda row: row.where):
        if where:
            lines.append(f"  {where}")
        for row in group:
            cells = [
                text if len(text) <= values else f"{text[: values - 3]}..."
                for text in (row.a, row.b)
            ]
            mark = " " if row.same else "*"
            lines.append(
                f"{mark}   {row.what:{names - 2}}  {cells[0]:{values}}  {cells[1]}".rstrip()
            )
    return [*lines, "  (* differs)"]
