"""The command line: parse, call, print. Everything heavy is imported inside the commands."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from draftline import __version__
from draftline.cli.bench import bench_app
from draftline.cli.export import export_command
from draftline.cli.options import ConfigFile, Overrides, TrainedDrafter, expand
from draftline.cli.plan import plan_command
from draftline.cli.regenerate import regenerate_command
from draftline.cli.signal import (
    WatchCommand,
    diagnose_command,
    diff_command,
    report_command,
    watch_command,
)
from draftline.errors import ConfigError, DraftlineError
from draftline.library_warnings import LIBRARY_WARNINGS
from draftline.stopping import stopping


class Commands(TyperGroup):
    """Says that it was interrupted: typer would end without a word, and wait for hanging workers."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _leave("interrupted", 130)


app = typer.Typer(
    cls=Commands,
    help="Train, evaluate and export block-diffusion drafters for speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show, check and document configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")

app.command("plan")(plan_command)
app.command("export")(export_command)
app.command("regenerate")(regenerate_command)
app.command("diagnose")(diagnose_command)
app.command("watch", cls=WatchCommand)(watch_command)
app.command("diff")(diff_command)
app.command("report")(report_command)


def main() -> None:
    """Runs a command; draftline's own errors become one line on stderr and an exit code."""
    _quiet_transformers()
    try:
        with stopping(), LIBRARY_WARNINGS.held_back():
            app()
    except DraftlineError as error:
        _leave(f"error: {error}", error.exit_code)
    except OSError as error:  # a full or vanished disk where no room expected it
        _leave(f"error: {error}", 1)
    except KeyboardInterrupt:
        _leave("interrupted", 130)


def _leave(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be there to read it
        print(message, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    if any(t.name.startswith(("target-", "drafter-")) for t in threading.enumerate()):
        # A worker that hangs in a driver would keep the interpreter from ending.
        os._exit(code)
    raise SystemExit(code)


def _quiet_transformers() -> None:
    """Keeps transformers' bars and advice out of the output; read when it is first imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"draftline {__version__}")
        raise typer.Exit


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the effective configuration, defaults and overrides included."""
    from draftline.config.load import load_config

    print(load_config(config, overrides or []).to_yaml(), end="")


@config_app.command("check")
def config_check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a configuration, and that all it names is there; print its hash.

    Every fault is named at once: the target, data and prompt files that are missing or unreadable, a
    tracker that is not installed, a run directory that cannot be written.
    """
    from draftline.config.load import load_config
    from draftline.train.plan.named import check_named

    loaded = load_config(config, overrides or [])
    check_named(loaded)
    print(f"{config} is valid, hash {loaded.digest()}; all that it names is there")


@config_app.command("schema")
def config_schema(
    as_json: Annotated[bool, typer.Option("--json", help="JSON Schema instead.")] = False,
) -> None:
    """Print every key with its type, default and meaning."""
    import json

    from draftline.config.load import describe_keys
    from draftline.config.schema import Config

    if as_json:
        print(json.dumps(Config.model_json_schema(), indent=2))
        return
    for key in describe_keys():
        print(f"{key.name}  ({key.type}, default {key.default})\n    {key.meaning}")


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the newest checkpoint of run.dir; begin where there is none."
        ),
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although the configuration differs.")
    ] = False,
) -> None:
    """Train a drafter."""
    from draftline.config.load import load_config
    from draftline.progress import doing

    loaded = load_config(config, overrides or [])
    with doing("loading PyTorch"):
        from draftline.train.loop import train as run

    done = run(loaded, resume=resume, accept_changes=accept_changes)
    saved = done.checkpoint or "the first machine's run directory"
    if done.interrupted:
        again = ["draftline", "train", str(config), *(overrides or []), "--resume"]
        print(
            f"interrupted at step {done.step} of {done.total}, saved in {saved}; "
            f"continue with: {shlex.join(again)}"
        )
        raise typer.Exit(130)
    print(f"trained to step {done.step}, {done.seconds:.0f} s of training in all: {saved}")


@app.command("eval")
def evaluate_command(
    drafter: TrainedDrafter,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON with every number.", callback=expand)
    ] = None,
) -> None:
    """Decode prompts with a trained drafter and without, and compare.

    DRAFTER is a run (its newest checkpoint), a checkpoint, or an exported directory, draftline's or
    another's, which needs target.path=PATH. Overrides may change evaluate.*, run.*, topology.targets,
    target.path, target.dtype, data.template and data.date; the rest is fixed by the training.
    """
    import json

    from draftline.progress import doing

    with doing("loading PyTorch"):
        from draftline.checkpoint.restore import restore
        from draftline.choices import Choices
        from draftline.decode.evaluate import evaluate_drafter, score_details, score_table
        from draftline.environment import provenance
        from draftline.runlog import write_atomic
        from draftline.train.plan.inputs import (
            evaluation_devices,
            open_target,
            settle_date,
            template_arguments,
        )
        from draftline.train.plan.named import check_prompts

    if out is not None:
        _check_out(out)
    restored = restore(drafter, overrides or [])
    config = restored.config
    check_prompts(config)
    choices = Choices(strict=config.run.strict_choices)
    target = open_target(config, choices, evaluation_devices(config, choices))
    if another := restored.check_target(target):
        print(f"warning: {another}", file=sys.stderr)
    scores = evaluate_drafter(
        target,
        restored.drafter(target.device, target.dtype),
        restored.token_ids,
        config.evaluate,
        template=template_arguments(config, settle_date(config, target.tokenizer, choices)),
        seed=config.run.seed,
    )
    _print_table(score_table(scores, f"{restored.path}"))
    for score in scores:
        print(score_details(score))
    if out is not None:
        facts = {
            "checkpoint": str(restored.path),
            "step": restored.step,
            "another_target": another or None,
            "config": config.model_dump(mode="json"),
            "provenance": provenance(),
            "scores": [score.to_dict() for score in scores],
        }
        write_atomic(out, json.dumps(facts, indent=1) + "\n")
        print(f"wrote {out}")


def _check_out(out: Path) -> None:
    """Raises ConfigError where scores cannot be written to `out`, before hours go into them."""
    from draftline.files import irregular

    try:
        kind = irregular(out)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be written: {error.strerror}; name another file"
        ) from None
    if kind is not None:
        raise ConfigError(f"--out {out} is {kind}; name a regular file, or leave --out away")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.parent}; make it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {out.parent} cannot be written; name another file")


@app.command()
def demo(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Directory of the export.", callback=expand)] = Path(
        "exports/demo"
    ),
) -> None:
    """Train, evaluate and export a small drafter for the embedded target."""
    from draftline.progress import doing

    with doing("loading PyTorch"):
        from draftline.cli.demo import run_demo

    _print_table(run_demo(overrides or [], out))


def _print_table(table: object) -> None:
    from rich.console import Console

    Console(width=max(100, Console().width)).print(table)
