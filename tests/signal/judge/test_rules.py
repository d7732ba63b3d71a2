"""Each rule finds its own fault, names its number, and keeps silent at the other faults' evidence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from draftline.signal.judge.cause import because, last_text
from draftline.signal.judge.compiler_rules import COMPILER_RULES, compile_storm, recompiling
from draftline.signal.judge.findings import find_causes
from draftline.signal.judge.memory_rules import (
    allocator_retries,
    cache_flush,
    fragmentation,
    leak,
    other_process,
    unbounded_shapes,
)
from draftline.signal.trace import TOTALS, Event
from draftline.signal.words import CAUSES
from draftline.signal.words import FAULTS as FAULT_NAMES
from tests.support.faulty_runs import FAULTS, HEALTHY, MARKS, STEPS
from tests.support.judged import causes, seen, sentence
from tests.support.traces import (
    COMPILED,
    CONTEXT_MIB,
    EAGER,
    FLOOR_MIB,
    GIB,
    RESERVED_MIB,
    TOTAL_MIB,
    Trace,
    counter,
    run,
    stairs,
)

RULES = {
    rule.__name__: rule
    for rule in (
        *COMPILER_RULES,
        allocator_retries,
        cache_flush,
        leak,
        unbounded_shapes,
        fragmentation,
        other_process,
    )
}
# What else speaks, rightly, of the same evidence; which comes first is find_causes' business.
ALSO = {
    "eager flex": {"not_compiled"},
    "limit": {"recompiling"},
    "storm": {"recompiling"},
    "retries": {"cache_flush"},
}
AT = np.arange(STEPS)


PAIRS = [(name, rule) for name in FAULTS for rule in RULES]


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_a_rule_speaks_of_its_own_evidence_only(name: str, rule: str) -> None:
    cause, _, build = FAULTS[name]
    found = RULES[rule](seen(build(marks=MARKS)))
    assert (found is not None) == (rule == cause or rule in ALSO.get(name, ()))
    assert found is None or found.cause == rule


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("marks", [MARKS, ()])
def test_no_rule_speaks_of_a_healthy_run(name: str, rule: str, marks: tuple[object, ...]) -> None:
    assert RULES[rule](seen(HEALTHY[name](marks=marks))) is None


@pytest.mark.parametrize("marks", [MARKS, ()])
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_with_marks_and_without(name: str, marks: tuple[object, ...]) -> None:
    cause, numbers, build = FAULTS[name]
    first = find_causes(seen(build(marks=marks)))[0]
    assert first.cause == cause
    assert first.confidence in ("high", "medium", "low")
    assert first.evidence.rstrip().endswith(".")
    assert first.action
    named = re.findall(r"\d[\d,]*(?:\.\d+)?", first.evidence)
    assert not marks or set(numbers.split()) <= set(named)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("counted", [True, False])
def test_faults_without_samples_or_without_counters(name: str, counted: bool) -> None:
    cause, _, build = FAULTS[name]
    found = causes(build(marks=MARKS, sampled=not counted, counted=counted))
    if counted and cause != "other_process":
        assert found[0] == cause
    elif cause in ("eager_flex", "recompiling", "recompile_limit"):
        assert found in ([], [cause])  # the events alone may say it
    else:
        assert found == []


@pytest.mark.parametrize("name", list(FAULTS))
@pytest.mark.parametrize("unknown", [None, "nan"])
def test_without_any_counter_no_fault_is_made_up(name: str, unknown: str | None) -> None:
    cause, _, build = FAULTS[name]
    gone = dict.fromkeys(TOTALS, np.full(STEPS, np.nan) if unknown else None)
    trace = replace(build(marks=MARKS, **gone), program=None)
    assert set(causes(trace)) <= {cause}


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("build", HEALTHY.values(), ids=HEALTHY)
def test_a_counter_that_is_missing_makes_no_healthy_run_faulty(
    name: str, build: Callable[..., Trace]
) -> None:
    assert causes(build(marks=MARKS, **{name: None})) == []


def test_the_names_of_causes() -> None:
    assert set(RULES) == set(FAULT_NAMES)
    assert set(CAUSES) - set(RULES) == {"healthy", "pause", "largest_so_far", "unknown"}


def test_words_around_reasons() -> None:
    assert because("") == ""
    assert because(" x == 3. ") == " (x == 3)"
    texts = [Event(1.0, "recompile", text) for text in ("first", "last", "")]
    assert last_text(texts) == "last"
    assert last_text([]) == ""


# The order of their say.


def test_a_storm_that_fills_the_memory_is_a_storm() -> None:
    storm = FAULTS["storm"][2]
    growing = storm(marks=MARKS, reserved=stairs(STEPS, range(5, STEPS, 5), 2000.0, 100))
    assert causes(growing) == ["compile_storm"]
    keeping = storm(marks=MARKS, allocated=FLOOR_MIB + 5.0 * AT, reserved=2000 + 5.0 * AT)
    assert causes(keeping) == ["compile_storm", "leak"]


def test_retries_that_flush_are_retries() -> None:
    assert causes(FAULTS["retries"][2]()) == ["allocator_retries"]


def test_a_leak_that_makes_the_allocator_grow_is_a_leak() -> None:
    assert causes(FAULTS["leak"][2](tokens=1000.0 + AT)) == ["leak"]


def test_a_leak_that_runs_into_the_limit_is_both() -> None:
    trace = run(
        marks=MARKS,
        allocated=FLOOR_MIB + 5.0 * AT,
        reserved=RESERVED_MIB + 5.0 * AT,
        retries=[180, 188, 194],
    )
    assert set(causes(trace)) == {"allocator_retries", "leak"}


def test_eager_flex_of_a_limit_is_eager_flex() -> None:
    limit = FAULTS["limit"][2](marks=MARKS)
    warned = Event(limit.events[-1].time_s + 0.1, "eager_flex", "w")
    assert causes(replace(limit, events=(*limit.events, warned)))[0] == "eager_flex"


def test_a_limit_is_more_telling_than_the_recompiles_before_it() -> None:
    assert causes(FAULTS["limit"][2](marks=MARKS)) == ["recompile_limit"]


def test_a_flush_in_an_uncompiled_run_is_both() -> None:
    trace = FAULTS["flushes"][2](marks=MARKS, expects=["compiled"], **EAGER)
    assert causes(trace) == ["not_compiled", "cache_flush"]


# What the sentences say.


def test_recompiles_name_the_latest_reason_and_how_many() -> None:
    steps = [20, 40, 60]
    trace = run(
        marks=MARKS,
        compiles=[0, *steps],
        frames=[0, *steps],
        events=[(step, "recompile", f"scale == {step}") for step in steps],
    )
    assert "3 compiles in 192 steps" in sentence(trace)
    assert "scale == 60" in sentence(trace)


def test_retries_say_how_many_and_what_the_device_showed() -> None:
    words = sentence(run(marks=MARKS, retries=[50, 90], beside_mib=140_000))
    shown = (RESERVED_MIB + CONTEXT_MIB + 140_000) * 2**20 / GIB
    assert "2 in 192 steps" in words
    assert f"showed {shown:.1f} of {TOTAL_MIB * 2**20 / GIB:.1f} GiB." in words


def test_a_storm_in_sparse_records_is_a_storm() -> None:
    build = FAULTS["storm"][2]
    found = [compile_storm(seen(build(marks=MARKS, every=n))) for n in (1, 10)]
    assert found[0] is not None
    assert found[1] is not None


def test_now_and_then_a_compile_is_no_storm() -> None:
    every_4th = list(range(0, STEPS, 4))
    found = seen(run(marks=MARKS, compiles=every_4th, frames=every_4th))
    assert compile_storm(found) is None
    assert recompiling(found) is not None


def test_a_declared_program_must_not_compile_even_once() -> None:
    once = {"compiles": [0, 120], "frames": [0, 120]}
    assert causes(run(marks=MARKS, **once)) == []
    assert causes(run(marks=MARKS, expects=["compiled"], **once)) == ["recompiling"]


def test_what_the_program_declares_alone_is_no_fault() -> None:
    assert causes(run(marks=MARKS, expects=["compiled"])) == []
    replays = {**COMPILED, "graph_replays": 1, "captures": [2], "allocator_calls": 1}
    assert causes(run(marks=MARKS, expects=["captured"], **replays)) == []
    quiet = {**COMPILED, "allocator_calls": 2}  # a program that cannot count its replays
    assert causes(run(marks=MARKS, expects=["captured"], **quiet)) == []


def test_a_cache_that_is_emptied_once_is_no_fault() -> None:
    once = np.where(AT == 99, 600.0, RESERVED_MIB)
    assert causes(run(marks=MARKS, reserved=once)) == []


def test_flushes_seen_as_events_are_enough() -> None:
    trace = run(marks=MARKS, events=[(60, "cache_flush", ""), (120, "cache_flush", "")])
    assert causes(trace) == ["cache_flush"]


def test_a_counter_reset_is_no_fault() -> None:
    reset = {
        name: np.r_[counter(COMPILED[name], 100), counter(COMPILED[name], 100)]
        for name in ("allocator_calls", "frames", "compiles", "retries")
    }
    assert causes(run(marks=MARKS, **reset)) == []
