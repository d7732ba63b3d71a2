"""Rules for what the compiler did: each looks for its own evidence and answers None without it."""

from __future__ import annotations

from draftline.signal.guards import INSIDE_TORCH, RESUMED
from draftline.signal.judge.cause import (
    Cause,
    Rule,
    because,
    calls_a_step,
    last_text,
    peak_over_floor,
)
from draftline.signal.judge.evidence import Evidence
from draftline.signal.judge.phases import PAUSES
from draftline.signal.judge.shape import counted

_STORM_SHARE = 0.5
_TELLING_RECOMPILES = 3
# More requests per step than this are not left-overs around a replayed graph (reading a metric is one).
_CAPTURED_CALLS = 20
_FEWEST_STEPS = 3  # of a program that ended earlier nobody knows what it would have compiled
_OF_TENSORS = ("size of", "stride of", "dtype of", "number of dimensions", "requires_grad of")


def eager_flex(seen: Evidence) -> Cause | None:
    warned = seen.events("eager_flex", steady=False)
    if not warned:
        return None
    runs = [phase for phase in seen.phases if phase.name == "run"]
    early = bool(runs) and all(event.time_s < runs[0].from_s for event in warned)
    if early and _replays_every_step(seen):
        return None
    return Cause(
        "eager_flex",
        # PyTorch says it once per process: a compiled program may have done so in its warm-up alone.
        "medium" if early and (seen.total("frames") or 0) > 0 else "high",
        "PyTorch warned that flex_attention was called without torch.compile; every attention score is "
        f"then built in memory. {peak_over_floor(seen)}".strip(),
        "compile the function that calls flex_attention (torch.compile(..., fullgraph=True)) and turn "
        "the warning into an error: warnings.filterwarnings('error', message='flex_attention called "
        "without torch.compile')",
    )


def recompile_limit(seen: Evidence) -> Cause | None:
    hit = seen.events("recompile_limit", steady=False)
    count = seen.total("recompile_limits") or 0
    if (not hit and not count) or _of_breaks(seen):
        return None
    why = last_text(hit) or last_text(seen.events("recompile", steady=False))
    return Cause(
        "recompile_limit",
        "high",
        f"{counted(max(int(count), len(hit)), 'function')} reached the recompile limit and ran "
        f"uncompiled since{because(why)}.",
        "make what changes between calls constant (pad to fixed shapes, pass tensors instead of Python "
        "numbers), and compile with fullgraph=True, which turns the limit into an error",
    )


def compile_storm(seen: Evidence) -> Cause | None:
    compiled = _compiles(seen)
    if compiled is None or seen.count == 0 or _of_breaks(seen):
        return None
    number, steps_hit = compiled
    spent = seen.grown("compile_s")
    share = spent / seen.seconds if spent is not None and seen.seconds else None
    if number < 5 or steps_hit < _STORM_SHARE * len(seen.between):
        return None
    took = "" if share is None else f"; compiling took {100 * min(share, 1):.0f} % of the time"
    why = last_text(seen.events("recompile", steady=False))
    return Cause(
        "compile_storm",
        "high",
        f"{counted(number, 'compile')} in all (backward passes included) at {steps_hit} of {seen.count} "
        f"steps after the start{took}{because(why)}.",
        "build compiled functions once, outside the loop, and warm every shape before it; find the "
        "callers with TORCH_LOGS=recompiles",
    )


def recompiling(seen: Evidence) -> Cause | None:
    if _of_breaks(seen):
        return None
    sealed = "compiled" in seen.program.expects
    compiled = _compiles(seen)
    if seen.steps is None:
        # Seen from outside, without steps: where the start ends is not known, so one or two say little.
        again = seen.events("recompile", steady=False)
        if len(again) < _TELLING_RECOMPILES:
            return None
        found, sure = f"{counted(len(again), 'recompile')}", False
    else:
        again = seen.events("recompile")
        if compiled is None or compiled[0] == 0:
            return None
        number, steps_hit = compiled
        # Other code that compiles for the first time, once, is a late start and no recompile.
        few = steps_hit < 2 or (steps_hit < 3 and seen.grown("recompiles") == 0)
        if few and not again and not sealed:
            return None
        found = f"{counted(number, 'compile')} in {seen.count} steps after the start"
        sure = steps_hit >= 2 or bool(again) or sealed
    why = last_text(again)
    return Cause(
        "recompiling",
        "high" if sure else "medium",
        f"{found}{because(why)}.",
        "make that argument constant or warm all its values before the loop; with "
        "torch.compiler.set_stance('fail_on_recompile') the first one raises"
        + ("" if why else "; TORCH_LOGS=recompiles names the argument"),
    )


def graph_breaks(seen: Evidence) -> Cause | None:
    count = seen.total("graph_breaks") or 0
    pauses = [phase for phase in seen.phases if phase.name in PAUSES]
    events = [
        event
        for event in seen.events("graph_break", steady=False)
        if not any(phase.from_s <= event.time_s < phase.to_s for phase in pauses)
    ]
    if not count and not events:
        return None
    own = [event for event in events if INSIDE_TORCH not in event.text]
    again = seen.events("recompile", steady=False)
    behind = [event for event in again if RESUMED in event.text]
    said = ""
    if again:
        of = f", {len(behind)} of them behind the break" if behind else ""
        said = f"; {counted(len(again), 'recompile')}{of}{because(last_text(again))}"
    if own and len(own) < len(events):
        inner = [event for event in events if INSIDE_TORCH in event.text]
        said += f"; {len(inner)} more in torch's own code, which follow from how it is called"
        said += because(last_text(inner))
    return Cause(
        "graph_breaks",
        "high",
        f"{counted(max(int(count), len(events)), 'graph break')}: parts of the step run uncompiled"
        f"{because(last_text(own or events))}{said}.",
        "compile with fullgraph=True, which raises where the graph breaks; TORCH_LOGS=graph_breaks "
        "names the lines"
        + ("; a learning rate that changes must be a tensor" if "['lr']" in said else ""),
    )


def _of_breaks(seen: Evidence) -> bool:
    """Whether most recompiles are of what runs behind a graph break, over what the break hands on."""
    again = seen.events("recompile", steady=False)
    behind = [e for e in again if RESUMED in e.text and not any(w in e.text for w in _OF_TENSORS)]
    broken = bool(seen.events("graph_break", steady=False)) or (seen.total("graph_breaks") or 0) > 0
    return broken and bool(behind) and 2 * len(behind) > len(again)


def not_compiled(seen: Evidence) -> Cause | None:
    expected = "compiled" in seen.program.expects
    off = _switched_off(seen)
    nothing = seen.total("frames") == 0
    # What ends a program often leaves no record: a signal, or an exit in the step itself.
    if not off and (seen.steps is None or len(seen.steps.time_s) < _FEWEST_STEPS):
        return None
    # A graph that the program captured itself is replayed without Dynamo.
    if not (nothing or (off and expected)) or _replays_every_step(seen):
        return None
    why = off or "Dynamo compiled nothing in this process"
    meant = ", though the program expects a compiled step" if expected else ""
    return Cause(
        "not_compiled",
        "high" if expected or off else "medium",
        f"{why}, so every step ran as separate eager operations{meant}. {calls_a_step(seen)}"
        f"{peak_over_floor(seen)}".strip(),
        _COMPILE,
    )


_COMPILE = (
    "check that the step goes through torch.compile (TORCH_COMPILE_DISABLE unset, no force_eager "
    "stance, no exception that was caught) and compile it with fullgraph=True; if the program means to "
    "run eagerly, this is no fault"
)


def no_graph_capture(seen: Evidence) -> Cause | None:
    refused = seen.events("capture_skip", steady=False)
    skips = max(seen.total("capture_skips") or 0, len(refused))
    replays, calls = seen.grown("graph_replays"), seen.gained("allocator_calls")
    expected = "captured" in seen.program.expects
    reason = ""
    if skips and not _replays_every_step(seen):
        reason = f"PyTorch refused a CUDA graph {int(skips)} time(s)"
        reason += because(last_text(refused))
    elif expected and replays is not None and replays < seen.count / 2:
        reason = (
            f"{int(replays)} graph replays in {seen.count} steps of a program that expects them"
        )
    elif expected and replays is None and len(calls) and calls.sum() > _CAPTURED_CALLS * seen.count:
        reason = "the program expects a captured step, and its steps still ask for memory"
    if not reason:
        return None
    return Cause(
        "no_graph_capture",
        "high",
        f"{reason}. {calls_a_step(seen)}".strip(),
        "capture the whole step with constant inputs on the device (no CPU tensors, no mutated "
        "inputs, no .item()) before the loop, and replay that one graph",
    )


def _replays_every_step(seen: Evidence) -> bool:
    return seen.count > 0 and (seen.grown("graph_replays") or 0) >= 0.9 * seen.count


def _compiles(seen: Evidence) -> tuple[int, int] | None:
    """Compiles in the steady state and the number of steps that had one; None where unknown."""
    for name in ("compiles", "frames"):
        gained = seen.gained(name)
        if len(gained):
            return int(gained.sum()), int((gained > 0).sum())
    events = seen.events("compile") or seen.events("recompile")
    return (len(events), len(events)) if events else None


def _switched_off(seen: Evidence) -> str:
    facts = seen.program.facts
    if facts.get("dynamo_disabled") is True:
        return "Dynamo is switched off in this process (TORCH_COMPILE_DISABLE or config.disable)"
    if facts.get("stance") == "force_eager":
        return "the compiler's stance is force_eager"
    return ""


# In the order of their say.
COMPILER_RULES: tuple[Rule, ...] = (
    eager_flex,
    compile_storm,
    recompile_limit,
    recompiling,
    graph_breaks,
    not_compiled,
    no_graph_capture,
)
