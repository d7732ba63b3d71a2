"""Whose a compile is: the function that the thread is in, or the one whose number it carries."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from draftline.runtime.compile.watch import Compiled, CompileWatch

DRAFTER = Compiled("drafter", "cuda:0", print)
HEAD = Compiled("head", "cuda:1", print)


def compile_of(trigger: str, number: str) -> Any:
    return SimpleNamespace(callback_trigger=SimpleNamespace(name=trigger), compile_id=number)


def test_only_a_compile_after_the_seal_is_late() -> None:
    watch = CompileWatch()
    watch.on_compile(compile_of("DYNAMO", "0/0"))
    assert (watch.compiles, watch.late) == (1, [])
    watch.sealed = True
    watch.on_compile("autotune")
    assert watch.compiles == 2
    assert watch.late == ["autotune of a function unknown here (unknown)"]


def test_a_lazy_backward_is_named_after_the_forward_whose_number_it_has() -> None:
    watch = CompileWatch()
    with watch.inside(DRAFTER):
        with watch.inside(HEAD):
            watch.on_compile(compile_of("DYNAMO", "1/0"))
        watch.on_compile(compile_of("DYNAMO", "0/0"))
    watch.sealed = True
    for number in ("0/0", "1/0", "2/0"):
        watch.on_compile(compile_of("LAZY_BACKWARD", number))
    assert watch.late == [
        "LAZY_BACKWARD of drafter on cuda:0",
        "LAZY_BACKWARD of head on cuda:1",
        "LAZY_BACKWARD of a function unknown here (2/0)",
    ]
    assert DRAFTER.called


def test_what_another_thread_compiles_is_not_this_ones() -> None:
    watch = CompileWatch()
    watch.sealed = True
    with watch.inside(DRAFTER):
        other = threading.Thread(target=watch.on_compile, args=(compile_of("DYNAMO", "5/0"),))
        other.start()
        other.join()
    assert watch.late == ["DYNAMO of a function unknown here (5/0)"]


def test_every_compile_is_recorded_with_its_part() -> None:
    watch = CompileWatch()
    with watch.inside(DRAFTER):
        watch.on_compile(compile_of("DYNAMO", "0/0"))
        watch.on_compiled(compile_of("DYNAMO", "0/0"))
    watch.on_compile(compile_of("LAZY_BACKWARD", "0/0"))
    watch.on_compiled(compile_of("LAZY_BACKWARD", "0/0"))
    watch.on_compiled("an end whose begin was before the watch")
    found = [(g.name, g.device, g.part, g.outcome) for g in watch.graphs]
    assert found == [
        ("drafter", "cuda:0", "forward", "compiled"),
        ("drafter", "cuda:0", "backward", "compiled"),
    ]
    assert all(g.seconds >= 0 for g in watch.graphs)
