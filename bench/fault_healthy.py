"""The healthy programs of the corpus: nothing here deserves an alarm.

`pause` is the cause of runs that stop to evaluate or to save, `healthy` of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fault_compiling import CAPTURED, COMPILED
from fault_session import Bound, Program, Session, Variant
from fault_training import Training


def graph(session: Session) -> None:
    session.run(Training(session).captured())


def plain(session: Session) -> None:
    """Compiled or eager, one shape; `mode` is torch.compile's."""
    compiled, mode = session.values["compiled"], session.values.get("mode")
    training = Training(session, compiled=compiled, flex=compiled, mode=mode)

    def body(number: int) -> None:
        if mode is not None and session.cuda:
            torch.compiler.cudagraph_mark_step_begin()
        training.step(number)

    session.warm(body, 10)
    session.run(body)


def two_drafters(session: Session) -> None:
    """Two threads, each with its own model, stream and graph, take their steps together."""
    steps = [Training(session).captured() for _ in range(2)]
    streams = [torch.cuda.Stream(session.device) if session.cuda else None for _ in steps]

    def work(index: int, number: int) -> None:
        with torch.cuda.stream(streams[index]):
            steps[index](number)

    with ThreadPoolExecutor(2, "drafter") as pool:

        def body(number: int) -> None:
            list(pool.map(work, range(2), (number, number)))

        session.warm(body)
        session.run(body)


def pauses(session: Session) -> None:
    values = session.values
    training = Training(session)

    def evaluate() -> None:
        session.phase("evaluate")
        training.evaluate(values["rows"] * session.size.batch, values["batches"])
        if values["flush"] and session.cuda:
            torch.cuda.empty_cache()
        session.count_pause()
        session.phase("run")

    def checkpoint() -> None:
        session.phase("checkpoint")
        training.checkpoint()
        session.count_pause()
        session.phase("run")

    session.warm(training.step)
    between = evaluate if values["how"] == "evaluate" else checkpoint
    session.run(training.step, between=between, every=values["every"])


def long_warm(session: Session) -> None:
    """Lengths that grow in steps for a while, then one length."""
    training = Training(session, compiled=False, flex=False)
    full, steps = session.size.length, session.values["warm"]
    session.warm(lambda n: training.step_of(n, max(4, full * (1 + 6 * n // steps) // 8)), steps)
    session.warm(training.step, 10)
    session.run(training.step)


def accumulation(session: Session) -> None:
    training, parts = Training(session), session.values["parts"]

    def body(number: int) -> None:
        training.feed(number)
        (training.loss() / parts).backward()
        if number % parts == parts - 1:
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=True)

    session.warm(body, 3 * parts)
    session.run(body)


def buckets(session: Session) -> None:
    """Four lengths, all of them seen in warm-up, the longest first."""
    training = Training(session, compiled=False, flex=False)
    full = session.size.length
    lengths = [full, full * 3 // 4, full // 2, full // 4]
    session.warm(lambda n: training.step_of(n, lengths[n % 4]), 24)
    session.run(lambda n: training.step_of(n, session.random.choice(lengths)))


def steady_neighbour(session: Session) -> None:
    with session.neighbour():
        plain(session)


def lull(session: Session) -> None:
    """Stops for a while: the loader, say."""
    training = Training(session)
    session.warm(training.step)

    def wait() -> None:
        time.sleep(session.values["wait_s"])
        session.count_pause()

    session.run(training.step, between=wait, every=session.values["every"])


FLAT = (
    Bound("reserved_mib", least=0, most=0),
    Bound("device_allocations", most=0),
    Bound("device_frees", most=0),
    Bound("retries", most=0),
    Bound("graphs", most=0),
)
NEARLY = (Bound("reserved_mib", least=0, most=64), Bound("retries", most=0))
REPLAYED = (*FLAT, Bound("graph_replays", least=20))
PAUSED = (Bound("pauses", least=1), Bound("retries", most=0), Bound("graphs", most=0))


def _p(
    name: str,
    body: Callable[[Session], None],
    needs: tuple[Bound, ...],
    *variants: tuple[tuple[str, ...], bool, dict[str, Any]],
    cause: str = "healthy",
) -> Program:
    made = tuple(Variant(v, e, m, own_peak=e == CAPTURED) for e, m, v in variants)
    return Program(name, cause, body, needs, made)


def _evaluate(rows: int, every: int, flush: bool = False) -> dict[str, Any]:
    return {"how": "evaluate", "rows": rows, "batches": 6, "every": every, "flush": flush}


COMPILES, EAGER = {"compiled": True}, {"compiled": False}
CONSTANT = {"compiled": True, "pattern": "constant", "mib": 3000, "period_s": 1.0}
SAVES = {"how": "checkpoint"}

HEALTHY = (
    _p("graph", graph, REPLAYED, (CAPTURED, True, {}), (CAPTURED, True, {}), ((), False, {})),
    _p("compiled", plain, FLAT, (COMPILED, True, COMPILES), ((), False, COMPILES)),
    _p("eager", plain, FLAT, ((), True, EAGER), ((), False, EAGER)),
    _p("two_drafters", two_drafters, REPLAYED, (CAPTURED, True, {}), ((), False, {})),
    _p(
        "evaluate",
        pauses,
        PAUSED,
        (COMPILED, True, _evaluate(4, 60)),
        ((), False, _evaluate(3, 40)),
        cause="pause",
    ),
    _p(
        "evaluate_flush",
        pauses,
        PAUSED,
        (COMPILED, True, _evaluate(4, 50, True)),
        (COMPILED, True, _evaluate(2, 35, True)),
        cause="pause",
    ),
    _p(
        "checkpoint",
        pauses,
        PAUSED,
        (COMPILED, True, SAVES | {"every": 70}),
        ((), False, SAVES | {"every": 45}),
        cause="pause",
    ),
    _p("long_warm", long_warm, NEARLY, ((), True, {"warm": 90}), ((), False, {"warm": 60})),
    _p(
        "reduce_overhead",
        plain,
        FLAT,
        (COMPILED, True, COMPILES | {"mode": "reduce-overhead"}),
    ),
    _p("accumulation", accumulation, FLAT, (COMPILED, True, {"parts": 4})),
    _p("buckets", buckets, NEARLY, ((), True, {}), ((), False, {})),
    _p("steady_neighbour", steady_neighbour, FLAT, (COMPILED, True, CONSTANT)),
    _p("lull", lull, FLAT, (COMPILED, True, {"every": 60, "wait_s": 2.0})),
)
