"""What is found of the first device of a trace."""

from __future__ import annotations

from draftline.signal.judge.evidence import Evidence, gather
from draftline.signal.judge.findings import find_causes
from draftline.signal.judge.verdict import judge
from draftline.signal.trace import Trace


def seen(trace: Trace) -> Evidence:
    return gather(trace)[0]


def causes(trace: Trace) -> list[str]:
    """The causes that rules find."""
    return [cause.cause for cause in find_causes(seen(trace))]


def sentence(trace: Trace) -> str:
    """The evidence of the first of them."""
    return find_causes(seen(trace))[0].evidence


def first(trace: Trace) -> str:
    """The first cause of the verdict, which is one also where nothing is wrong."""
    return judge(trace).devices[0].causes[0].cause
