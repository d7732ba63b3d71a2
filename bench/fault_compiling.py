"""Programs whose fault is one of compilation: each does it for real and proves it by its counters.

The third recording of a program has no phase marks, as a foreign program's has none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from fault_session import Bound, Program, Session, Variant
from fault_training import Distance, Training
from torch import Tensor

LOGGER = logging.getLogger("corpus")
COMPILED, CAPTURED = ("compiled",), ("compiled", "captured")
# These programs compile often: the limit must not end that.
UNLIMITED = {"recompile_limit": 100_000, "accumulated_recompile_limit": 100_000}


def not_compiled(session: Session) -> None:
    how = session.values["how"]
    stance = "force_eager" if how == "stance" else "default"
    with torch.compiler.set_stance(stance):
        training = Training(session, compiled=how != "forgotten", flex=False)
        session.warm(training.step)
        session.run(training.step)


def eager_flex(session: Session) -> None:
    training = Training(session, compiled=False)
    if session.values["blocks"]:  # compiled all but the attention
        for layer in training.model.layers:
            layer.mlp.forward = session.compile(layer.mlp.forward)
    session.warm(training.step)
    session.run(training.step)


def graph_breaks(session: Session) -> None:
    def printed(x: Tensor) -> None:
        print("layer done")

    def item(x: Tensor) -> None:
        if x.float().abs().mean().item() > 1e6:
            raise ValueError("activations exploded")

    def logged(x: Tensor) -> None:
        LOGGER.info("layer done")

    training = Training(session)
    training.each_layer({"print": printed, "item": item, "log": logged}[session.values["how"]])
    session.warm(training.step)
    session.run(training.step)


def recompiling(session: Session) -> None:
    how, every = session.values["how"], session.values["every"]
    training, distance = Training(session), Distance(session)
    compiled = session.compile(distance, dynamic=False)

    def body(number: int) -> None:
        scores, turn = distance.scores, number // every
        training.feed(number)
        if how == "int":
            extra = compiled(scores, turn)
        elif how == "length":
            extra = compiled(scores[:, : min(4 + 2 * turn, scores.shape[1])])
        else:
            distance.temperature = 1.0 + 0.125 * turn
            extra = compiled(scores)
        training.update(training.loss() + extra)

    with torch._dynamo.config.patch(UNLIMITED):
        session.warm(lambda number: body(0))
        session.run(body)


def recompile_limit(session: Session) -> None:
    """Values that never come again: compiled up to the limit, eager from then on."""
    limit, every = session.values["limit"], session.values["every"]
    training, distance = Training(session), Distance(session)
    compiled = session.compile(distance, dynamic=False)
    warm_steps = session.values["warm"]

    def body(number: int) -> None:
        training.feed(number)
        training.update(training.loss() + compiled(distance.scores, number // every))

    with torch._dynamo.config.patch(recompile_limit=limit):
        session.warm(body, warm_steps)
        session.run(lambda number: body(number + warm_steps))


def _new_function(number: int) -> Callable[[Tensor], Tensor]:
    names: dict[str, Any] = {}
    code = f"def made(x):\n    return (x * {number}.5).sin().sum() + (x + {number}).tanh().mean()"
    exec(code, names)
    made: Callable[[Tensor], Tensor] = names["made"]
    return made


def compile_storm(session: Session) -> None:
    """New code or new shapes at nearly every step."""
    how, backend = session.values["how"], session.values["backend"] or session.backend
    training, distance = Training(session, compiled=False, flex=False), Distance(session)
    shaped = session.compile(distance, dynamic=False, backend=backend)
    data = torch.randn(64, 64, device=session.device)
    turn = threading.Lock()  # Dynamo compiles one thread at a time

    def new(number: int) -> None:
        with turn:
            session.compile(_new_function(number), backend=backend)(data)

    def body(number: int) -> None:
        training.step(number)
        if how == "shapes":
            shaped(distance.scores[:, : 2 + number % (distance.scores.shape[1] - 2)]).backward()
        elif how == "functions":
            new(number)
        else:
            threads = [threading.Thread(target=new, args=(3 * number + i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    with torch._dynamo.config.patch(UNLIMITED):
        session.warm(training.step)
        session.run(lambda number: body(number + 10))


def no_graph_capture(session: Session) -> None:
    """Compiled, but a CPU scalar or a mutated input keeps Inductor from capturing, or nobody did."""
    how = session.values["how"]
    more: tuple[Tensor | None, ...] = ()
    if how == "declared":
        session.count("graph_replays", 0)
        training = Training(session)
    else:
        training = Training(session, mode="reduce-overhead")
        hidden = torch.zeros(session.size.hidden, device=session.device)
        more = (torch.tensor(1.0),) if how == "cpu" else (None, hidden)

    def body(number: int) -> None:
        training.feed(number)
        training.update(training.loss(*more))

    # Partitioned graphs work around an input on the CPU: a program that switched that off.
    with torch._inductor.config.patch(graph_partition=False):
        session.warm(body)
        session.run(body)


def variant(expects: tuple[str, ...] = (), marked: bool = True, **values: Any) -> Variant:
    return Variant(values, expects, marked, own_peak=expects == CAPTURED)


NEVER = {"TORCH_COMPILE_DISABLE": "1"}
FRESH = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
SKIPPED = (Bound("capture_skips_total", least=1),)

COMPILING = (
    Program(
        "not_compiled",
        "not_compiled",
        not_compiled,
        (Bound("frames_total", most=0),),
        (
            Variant({"how": "environment"}, COMPILED, environment=NEVER),
            variant(COMPILED, how="stance"),
            variant(COMPILED, False, how="forgotten"),
        ),
    ),
    Program(
        "eager_flex",
        "eager_flex",
        eager_flex,
        (Bound("flex_warned_total", least=1),),
        (variant(blocks=False), variant(COMPILED, blocks=True), variant((), False, blocks=False)),
    ),
    Program(
        "graph_breaks",
        "graph_breaks",
        graph_breaks,
        (Bound("breaks_total", least=1), Bound("frames_ok_total", least=1)),
        (
            variant(COMPILED, how="print"),
            variant(COMPILED, how="item"),
            variant((), False, how="log"),
        ),
    ),
    Program(
        "recompiling",
        "recompiling",
        recompiling,
        (Bound("graphs", least=4), Bound("limits_total", most=0)),
        (
            variant(COMPILED, how="int", every=6),
            variant(COMPILED, how="length", every=12),
            variant((), False, how="attribute", every=9),
        ),
    ),
    Program(
        "recompile_limit",
        "recompile_limit",
        recompile_limit,
        (Bound("limits_total", least=1),),
        (
            variant(COMPILED, limit=8, every=1, warm=12),
            variant(COMPILED, limit=4, every=8, warm=6),
            variant((), False, limit=8, every=3, warm=6),
        ),
    ),
    Program(
        "compile_storm",
        "compile_storm",
        compile_storm,
        (Bound("graphs_a_step", least=0.8), Bound("steps", least=4)),
        (
            Variant({"how": "functions", "backend": None}, COMPILED, environment=FRESH),
            Variant({"how": "threads", "backend": None}, COMPILED, environment=FRESH),
            Variant({"how": "shapes", "backend": "aot_eager"}, (), False, environment=FRESH),
        ),
    ),
    Program(
        "no_graph_capture",
        "no_graph_capture",
        no_graph_capture,
        (Bound("graph_replays", most=0), Bound("frames_ok_total", least=1)),
        (
            Variant({"how": "cpu"}, CAPTURED, needs=SKIPPED),
            variant(CAPTURED, how="declared"),
            Variant({"how": "mutation"}, (), False, needs=SKIPPED),
        ),
    ),
)
