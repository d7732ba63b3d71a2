"""Records one program of the corpus in a fresh process, which imports everything and then waits.

    python bench/fault_run.py NAME K DIR --seconds S --device cuda:0

Prints "ready", and once a line arrives on standard input runs the program and writes
DIR/signal.jsonl and DIR/label.json. `faults.py` starts the next one while this one records.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
from fault_compiling import COMPILING
from fault_healthy import HEALTHY
from fault_memory import MEMORY
from fault_model import SIZES, TINY, Size
from fault_session import LimitLog, Program, Session

from draftline.signal.recorder.record import Recorder

PROGRAMS: tuple[Program, ...] = (*COMPILING, *MEMORY, *HEALTHY)


def size_of(name: str, k: int) -> Size:
    """Another size for each recording of a program, in another order for each program."""
    index = [program.name for program in PROGRAMS].index(name)
    return SIZES[(index + k) % len(SIZES)]


def record(
    program: Program,
    k: int,
    out: Path,
    *,
    seconds: float,
    device: torch.device,
    size: Size,
    **parts: Any,
) -> dict[str, Any]:
    """Runs the program's recording `k` into `out` and returns its label. `parts` replace fields of
    the Session, for a test."""
    variant = program.variants[k]
    session = Session(
        variant, size, device, seconds, random.Random(k), limit_log=LimitLog(), **parts
    )
    dynamo_log = logging.getLogger("torch._dynamo")
    began, why = time.perf_counter(), None
    dynamo_log.addHandler(session.limit_log)
    try:
        with Recorder(
            out / "signal.jsonl",
            expects=variant.expects,
            program=f"{program.name}-{k}",
            own_peak=variant.own_peak,
        ) as session.recorder:
            program.body(session)
        why = session.missing((*program.needs, *variant.needs))
    except Exception as error:  # the top of a program: whatever happened goes into its label
        logging.getLogger("corpus").exception("%s-%d failed", program.name, k)
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        dynamo_log.removeHandler(session.limit_log)
    values = ", ".join(f"{name} {value}" for name, value in variant.values.items())
    return {
        "name": program.name,
        "cause": program.cause,
        "alarm": program.alarm,
        "size": f"{size}; {values}" if values else str(size),
        "seconds": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
        "expects": list(variant.expects),
        "phases_marked": variant.marked,
        "ok": why is None,
        "why": why,
        "evidence": {name: round(value, 2) for name, value in session.evidence.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[program.name for program in PROGRAMS])
    parser.add_argument("k", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    options = parser.parse_args()
    program = next(program for program in PROGRAMS if program.name == options.name)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        return
    cuda = options.device.type == "cuda"
    parts: dict[str, Any] = {} if cuda else {"backend": "eager"}
    if cuda:
        torch.cuda.set_device(options.device)
    size = size_of(options.name, options.k) if cuda else TINY
    label = record(
        program,
        options.k,
        options.out,
        seconds=options.seconds,
        device=options.device,
        size=size,
        **parts,
    )
    (options.out / "label.json").write_text(json.dumps(label, indent=1) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the driver frees the device; compile workers and pools need no farewell


if __name__ == "__main__":
    main()
