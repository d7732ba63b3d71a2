"""`draftline plan`: what a run would need, on this machine or on one that is only thought of."""

from __future__ import annotations

from typing import Annotated

import typer

from draftline.cli.options import AsJson, ConfigFile, Overrides

# The median of three is one step's time without what the first one allocates.
_TIMED_STEPS = 3


def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1e15, help="Rows per second that one drafter was measured at."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Plan for GPUs that are not here: 8x141 (GiB each) or 8xH200."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=65536, help="Machines like this one.")] = 1,
    timed: Annotated[
        bool,
        typer.Option(
            "--time",
            help="Run three steps of one drafter here on random weights, as bench step does, and take "
            "their rate.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Place workers, count steps, hours, memory and disk; load no weights.

    Exits with 2 and the numbers when the run would not fit, or with every file that is missing. A
    target directory may hold config.json only: token counts are then guessed from characters.
    """
    import json

    from draftline.choices import Choices
    from draftline.config.load import load_config
    from draftline.errors import ConfigError
    from draftline.progress import doing
    from draftline.train.plan.named import check_named

    if timed and (rate is not None or devices is not None):
        other = "--rate" if rate is not None else "--devices"
        raise ConfigError(
            f"--time measures this machine, and {other} speaks of another measurement; give one of them"
        )
    loaded = load_config(config, overrides or [])
    check_named(loaded)
    with doing("loading PyTorch"):
        from draftline.bench.step import bench_step
        from draftline.runtime.devices import parse_devices, visible_devices
        from draftline.train.plan.inputs import epoch_packs, prepare
        from draftline.train.plan.placement import place
        from draftline.train.plan.plan import plan_run

    choices = Choices(strict=loaded.run.strict_choices)
    available = visible_devices(choices) if devices is None else parse_devices(devices)
    inputs = prepare(loaded, choices, available, estimate=True)
    placement = place(loaded, inputs.facts, available, choices, nodes=nodes)
    packs = epoch_packs(loaded, inputs.samples, 0)
    said = ""
    if timed:
        # Whether it fits is known before anything is allocated.
        plan_run(loaded, inputs, packs, placement, available, nodes=nodes)
        with doing("timing one drafter's step on random weights"):
            found = bench_step(loaded, steps=_TIMED_STEPS, profile=False)
        rate = found.rows_per_s
        said = (
            f"plan: timed {_TIMED_STEPS} steps of one drafter on {found.device}, target forwards left "
            f"out: {rate:.0f} rows/s, {1000 * found.rows / rate:.0f} ms per step"
        )
    plan = plan_run(loaded, inputs, packs, placement, available, nodes=nodes, rate=rate)
    if as_json:
        typer.echo(json.dumps(plan.to_dict() | {"rows_per_s": rate}, indent=1))
        return
    typer.echo("\n".join([inputs.summary(), *([said] if said else []), *plan.lines()]))
