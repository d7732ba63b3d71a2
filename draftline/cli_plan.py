"""`draftline plan`: what a run would need, on this machine or on one that is only thought of."""

from __future__ import annotations

from typing import Annotated

import typer

from draftline.cli_options import AsJson, ConfigFile, Overrides


def plan_command(
    config: ConfigFile,
    overrides: Overrides = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1e15, help="Rows a second that one drafter was measured at."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Plan for GPUs that are not here: 8x141 (GiB each) or 8xH200."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=65536, help="Machines like this one.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Place workers, count steps, hours, memory and disk; load and allocate nothing.

    Exits with 2 and the numbers when the run would not fit. A target directory may hold config.json
    only: token counts are then guessed from characters.
    """
    import json

    from draftline.choices import Choices
    from draftline.config_file import load_config
    from draftline.runtime.devices import parse_devices, visible_devices
    from draftline.train.inputs import epoch_packs, prepare
    from draftline.train.placement import place
    from draftline.train.plan import plan_run

    loaded = load_config(config, overrides or [])
    choices = Choices(strict=loaded.run.strict_choices)
    available = visible_devices() if devices is None else parse_devices(devices)
    inputs = prepare(loaded, choices, available, estimate=True)
    placement = place(loaded, inputs.facts, available, choices, nodes=nodes)
    packs = epoch_packs(loaded, inputs.samples, 0)
    plan = plan_run(loaded, inputs, packs, placement, available, nodes=nodes, rate=rate)
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=1))
        return
    typer.echo("\n".join([inputs.summary(), *plan.lines()]))
