"""Two runs side by side: "it used to be flat"."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.signal.diff_facts import ABSENT, causes_of, outcome_of
from draftline.signal.diff_rules import LEFT_OUT, LIKELY, POSSIBLE, rule_for
from draftline.signal.run_facts import RunFacts, read_run

# Times of a start differ with everything else on a machine; what is a count must be equal.
_NOISE = {"compile.seconds": 0.5}
_SAME = 0.02  # share by which a figure of the outcome may differ and still be called the same
_WORDS = {LIKELY: "likely", POSSIBLE: "possible", 0: "unlikely"}


@dataclass(frozen=True, slots=True)
class Changed:
    """A figure of the outcome in both runs, as text; "not known" where a run does not tell."""

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
    lines_of: tuple[str, str]
    changed: tuple[Changed, ...]
    findings: tuple[Finding, ...]
    same: int
    missing: tuple[str, ...]

    @property
    def memory_differs(self) -> bool | None:
        """Whether memory behaved in another way, None where one run does not tell."""
        rows = [c for c in self.changed if c.what.startswith(("memory is", "because"))]
        known = [row for row in rows if "not known" not in (row.a, row.b)]
        if not known:
            return None
        return not all(row.same for row in known)

    def to_dict(self) -> dict[str, Any]:
        """What `draftline diff --json` prints."""
        return {
            "a": self.a,
            "b": self.b,
            "memory_differs": self.memory_differs,
            "changed": [asdict(row) for row in self.changed],
            "findings": [asdict(finding) for finding in self.findings],
            "same": self.same,
            "missing": list(self.missing),
        }

    def lines(self, width: int = 100) -> list[str]:
        """The comparison for a person, in lines of at most about `width` characters."""
        lines = [f"A  {self.a}", f"   {self.lines_of[0]}", f"B  {self.b}", f"   {self.lines_of[1]}"]
        lines += ["", *_table(self.changed, width), ""]
        differs = self.memory_differs
        if not self.findings:
            lines.append("nothing that both runs recorded differs before the first step")
        elif differs:
            lines.append("what may explain it, the most telling first:")
        elif differs is None:
            lines.append("whether memory behaves alike cannot be told; these differ:")
        else:
            lines.append("memory behaves alike in both; these differ all the same:")
        indent = "     "
        for finding in self.findings:
            lines += textwrap.wrap(
                f"{finding.rank:>3}. {finding.what}: {finding.a} -> {finding.b}",
                width,
                subsequent_indent=indent,
            )
            lines += textwrap.wrap(
                f"{finding.explains}: {finding.why}",
                width,
                initial_indent=indent,
                subsequent_indent=indent,
            )
        lines.append(f"{self.same} facts are the same in both")
        lines += [f"not compared: {text}" for text in self.missing]
        return lines


def compare(run_a: Path, run_b: Path) -> Difference:
    """How two runs (directories or recordings) differ, and what of it may explain their memory.

    Raises ConfigError where one of them cannot be read.
    """
    return compare_facts(read_run([run_a]), read_run([run_b]), names=(str(run_a), str(run_b)))


def compare_facts(a: RunFacts, b: RunFacts, *, names: tuple[str, str]) -> Difference:
    """`compare` of two runs that were read already."""
    missing = [f"{side} has {what}" for side, run in (("A", a), ("B", b)) for what in run.missing]
    left, right = causes_of(a), causes_of(b)
    differing: list[tuple[int, str, str, str, str]] = []
    same = 0
    for section in left.keys() | right.keys():
        if section not in left or section not in right:
            side = "A" if section not in left else "B"
            missing.append(f"{side} does not tell {_SECTIONS[section]}")
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
            shown = key if section in ("config", "variable") else f"{_PREFIX[section]}{key}"
            differing.append((rule.weight, shown, one, other, rule.why))
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
        lines_of=(a.verdict.line, b.verdict.line),
        changed=tuple(_changed(outcome_of(a), outcome_of(b))),
        findings=tuple(findings),
        same=same,
        missing=tuple(sorted(missing)),
    )


_SECTIONS = {
    "compile": "what was compiled",
    "capture": "what was captured",
    "shape": "the sizes of its steps",
    "processes": "which processes were on its devices",
    "environment": "the machine it ran on",
    "version": "its versions",
    "variable": "its environment variables",
    "config": "its configuration",
    "choice": "its automatic choices",
}
_PREFIX = {
    "compile": "compile: ",
    "capture": "capture: ",
    "shape": "",
    "processes": "processes: ",
    "environment": "",
    "version": "version of ",
    "choice": "choice of ",
}


def _explains(weight: int) -> str:
    return next(word for limit, word in _WORDS.items() if weight >= limit)


def _noise(name: str, a: object, b: object) -> bool:
    share = _NOISE.get(name)
    if share is None or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return False
    return abs(a - b) <= max(share * max(abs(a), abs(b)), 5.0)


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Changed]:
    rows = []
    for what in sorted(a.keys() | b.keys(), key=_place):
        one, other = a.get(what), b.get(what)
        same = one == other
        if isinstance(one, float) and isinstance(other, float):
            same = math.isclose(one, other, rel_tol=_SAME, abs_tol=0.05)
        rows.append(
            Changed(
                what,
                "not known" if one is None else _show(one),
                "not known" if other is None else _show(other),
                same,
            )
        )
    return rows


_ORDER = ("verdict", "memory is", "because", "device", "reserved", "tensors", "allocator")


def _place(what: str) -> tuple[str, int, str]:
    """Verdict, then device by device, then speed."""
    device = what.rpartition(", device ")[2] if ", device " in what else ""
    place = next((i for i, word in enumerate(_ORDER) if what.startswith(word)), len(_ORDER))
    speed = place == len(_ORDER)
    return ("~" if speed else "" if what == "verdict" else device.rjust(4), place, what)


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
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _table(rows: Sequence[Changed], width: int) -> list[str]:
    cells = [("", "A", "B", ""), *((r.what, r.a, r.b, "" if r.same else "*") for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    most = max(12, (width - widths[0] - 8) // 2)
    widths[1:] = [min(size, most) for size in widths[1:]]
    lines = []
    for row in cells:
        parts = [
            text if len(text) <= size else f"{text[: size - 3]}..."
            for text, size in zip(row[:3], widths, strict=True)
        ]
        padded = [text.ljust(size) for text, size in zip(parts, widths, strict=True)]
        lines.append(f"{row[3] or ' '} {'  '.join(padded)}".rstrip())
    return [*lines, "  (* differs)"]
