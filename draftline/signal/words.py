"""What causes and events are called, once for all who read, judge, watch or report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CauseWord:
    """`title` for people; `fault` where something should be mended."""

    title: str
    fault: bool = True


# By the names that a verdict uses, in the order in which tables list them.
CAUSES = {
    "healthy": CauseWord("nothing is wrong", fault=False),
    "not_compiled": CauseWord("the step is not compiled"),
    "eager_flex": CauseWord("flex_attention runs uncompiled"),
    "graph_breaks": CauseWord("the compiled graph breaks"),
    "recompiling": CauseWord("it compiles again while it runs"),
    "recompile_limit": CauseWord("the recompile limit was reached"),
    "compile_storm": CauseWord("it compiles nearly all the time"),
    "no_graph_capture": CauseWord("steps are not captured as graphs"),
    "allocator_retries": CauseWord("allocations fail and are tried again"),
    "cache_flush": CauseWord("the memory cache is emptied in the loop"),
    "leak": CauseWord("memory leaks"),
    "fragmentation": CauseWord("memory is fragmented"),
    "unbounded_shapes": CauseWord("sizes keep growing"),
    "largest_so_far": CauseWord("the largest step so far, which levels off", fault=False),
    "other_process": CauseWord("another program moves the memory"),
    "pause": CauseWord("pauses, which are normal", fault=False),
    "unknown": CauseWord("the cause cannot be told", fault=False),
}
FAULTS = frozenset(name for name, word in CAUSES.items() if word.fault)


@dataclass(frozen=True, slots=True)
class EventWord:
    """`title` for people, in the singular. `badness` orders what a watcher warns of, 0 is routine;
    `logged` where PyTorch's own logs tell of it; `lasting` where it holds until something else is
    said; `watched` where a watcher finds it, and no recording holds it."""

    title: str
    badness: int = 0
    logged: bool = False
    lasting: bool = False
    watched: bool = False


# In the order in which legends and lists have them. A phase goes by the name that is its text.
EVENTS = {
    "phase": EventWord("phase", lasting=True),
    "compile": EventWord("compile", logged=True),
    "recompile": EventWord("recompile", 5, logged=True),
    "graph_break": EventWord("graph break", 4, logged=True),
    "recompile_limit": EventWord("recompile limit", 7, logged=True, lasting=True),
    "eager_flex": EventWord("uncompiled flex_attention", 8, lasting=True),
    "capture": EventWord("graph capture", logged=True),
    "capture_skip": EventWord("refused capture", 3, logged=True),
    "cache_flush": EventWord("cache flush", 2),
    "oom": EventWord("out of memory", 9),
    "error": EventWord("error", 10),
    "storm": EventWord("compile storm", 6, watched=True),
    "other_process": EventWord("another process", 1, watched=True),
}
LOGGED = tuple(kind for kind, word in EVENTS.items() if word.logged)
# What a recording may hold besides phases.
RECORDED = tuple(kind for kind, word in EVENTS.items() if kind != "phase" and not word.watched)
# These tell that something was compiled, whatever became of it.
OF_COMPILER = frozenset(("compile", "recompile", "graph_break", "recompile_limit", "eager_flex"))


def cause_title(cause: str) -> str:
    """A cause for people; one of a later release goes by its name."""
    return CAUSES[cause].title if cause in CAUSES else cause


def event_title(kind: str) -> str:
    """A kind of event for people; a recording may hold others, which go by their names."""
    return EVENTS[kind].title if kind in EVENTS else kind


def duration(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 5 s", "2 h 10 min"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
