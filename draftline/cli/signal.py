"""`draftline diagnose`, `watch`, `diff` and `report`: what a program's memory says, of any program."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from draftline.cli.options import AsJson, expand
from draftline.errors import ConfigError

_COMMAND = "draftline.watched_command"


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Imports inside take less processor time: nothing that they make is garbage, and numpy's threads for
    matrix products, which wait busily, are not started. Not for a command whose child would inherit
    the environment."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def diagnose_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files or the run directory of one run.", metavar="FILE...", callback=expand
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Say whether GPU memory is flat, and if not, why.

    Reads run directories and signal.jsonl, nvidia-smi output (--query-gpu CSV, dmon, pmon, the plain
    table), counters as JSON lines, and PyTorch memory snapshots; several files are read as one run.
    Exits with 0 where nothing is wrong, 3 where memory is not flat or a fault is named, 4 where the
    files cannot tell, and 2 for files that cannot be read.
    """
    import json

    with _quick_imports():
        from draftline.signal.judge.verdict import judge, report_lines
        from draftline.signal.readers.read import read_trace

    verdict = judge(read_trace(files))
    typer.echo(
        json.dumps(verdict.to_dict(), indent=1) if as_json else "\n".join(report_lines(verdict))
    )
    if verdict.exit_code:
        raise typer.Exit(verdict.exit_code)


class WatchCommand(TyperCommand):
    """Takes what stands behind `--` as it is: it is another program's command line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_COMMAND] = args[cut + 1 :]
            args = args[:cut]
        elif len([word for word in args if not word.startswith("-")]) > 1 and not {
            "--pid",
            "--out",
        }.intersection(args):
            raise ConfigError(
                f"watch takes one RUN, not {' '.join(args)}; a command stands behind --, as in "
                "`draftline watch -- python train.py`"
            )
        return super().parse_args(ctx, args)


def watch_command(
    ctx: typer.Context,
    run: Annotated[
        Path | None,
        typer.Argument(help="Run directory or recording.", metavar="RUN", callback=expand),
    ] = None,
    pid: Annotated[int | None, typer.Option(min=1, help="A running process instead.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the recording of --pid or a command; ./signal-TIME.", callback=expand
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One look at RUN or --pid instead of a live view.")
    ] = False,
) -> None:
    """Watch a run, a process (--pid) or a command (after --) while it goes on.

    `draftline watch -- python train.py ...` leaves the command's behaviour and output alone, sets what
    PyTorch offers to tell of its compiles, and exits with the command's exit code. Watching a run or
    a process exits with 0, or 3 where the last verdict is a fault or memory that is not flat.
    """
    from draftline.signal.live import watch

    command: list[str] | None = ctx.meta.get(_COMMAND)
    given: dict[str, Any] = {"RUN": run, "--pid": pid, "a command after --": command}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) != 1:
        raise ConfigError(
            f"watch takes one of {', '.join(given)}, and {' and '.join(chosen) or 'none'} came; write "
            "`draftline watch -- python train.py`, say"
        )
    if run is not None and out is not None:
        raise ConfigError(f"--out {out}: a RUN has its recording already; leave --out away")
    if command is not None and once:
        raise ConfigError("--once looks at RUN or --pid; a command is watched until it ends")
    if run is not None:
        code = watch.watch_run(run, once=once)
    elif pid is not None:
        code = watch.watch_pid(pid, directory=out, once=once)
    elif command:
        code = watch.watch_command(command, directory=out)
    else:
        raise ConfigError("nothing stands behind --; write: draftline watch -- python train.py")
    raise typer.Exit(code)


def diff_command(
    run_a: Annotated[
        Path, typer.Argument(help="The run that was well.", metavar="RUN_A", callback=expand)
    ],
    run_b: Annotated[
        Path, typer.Argument(help="The run that is not.", metavar="RUN_B", callback=expand)
    ],
    as_json: AsJson = False,
) -> None:
    """Put two runs side by side: what differs, and what of it may explain their memory."""
    import json
    import shutil

    from draftline.signal.report.diff import compare

    found = compare(run_a, run_b)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
        return
    typer.echo("\n".join(found.lines(min(140, max(80, shutil.get_terminal_size().columns)))))


def report_command(
    run: Annotated[
        list[Path],
        typer.Argument(
            help="Run directory, or recordings of one run.", metavar="RUN", callback=expand
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="HTML file to write.", callback=expand)
    ] = Path("report.html"),
) -> None:
    """Write one HTML page of a run that opens offline: verdict, memory, curves, choices, environment."""
    from draftline.signal.report.report import write_report

    write_report(run, out)
    typer.echo(f"wrote {out}")
