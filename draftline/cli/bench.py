"""`draftline bench`: how fast a configuration runs here, and whether its memory is flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from draftline.cli.options import AsJson, ConfigFile, Overrides

bench_app = typer.Typer(
    help="Measure a configuration with random weights; its target may be a config.json only.",
    no_args_is_help=True,
)


@bench_app.command("step")
def bench_step_command(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Captured steps that are timed.")] = 50,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time one step by kernel group.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time one drafter's whole step, compiled and captured, with its memory."""
    from draftline.config.load import load_config
    from draftline.progress import doing

    loaded = load_config(config, overrides or [])
    with doing("loading PyTorch"):
        from draftline.bench.step import bench_step

    with doing(f"timing {steps} steps of one drafter on random weights"):
        found = bench_step(loaded, steps=steps, profile=profile)
    _show(found.lines(), found.to_dict(), as_json)


@bench_app.command("pipeline")
def bench_pipeline_command(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=20, help="Steps of the run.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Time targets and drafters alone, then a run of both as it would be placed here."""
    from draftline.config.load import load_config
    from draftline.progress import doing

    loaded = load_config(config, overrides or [])
    with doing("loading PyTorch"):
        from draftline.bench.pipeline import bench_pipeline

    with doing(f"timing targets, drafters, and {steps} steps of both"):
        found = bench_pipeline(loaded, steps=steps)
    _show(found.lines(), found.to_dict(), as_json)


def _show(lines: Sequence[str], values: dict[str, Any], as_json: bool) -> None:
    import json

    from draftline.environment import provenance

    if as_json:
        typer.echo(json.dumps({**values, "provenance": provenance()}, indent=1))
    else:
        typer.echo("\n".join(lines))
