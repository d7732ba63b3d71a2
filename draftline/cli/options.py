"""Arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def expand(value: Any) -> Any:
    """A path option, or a list of them, with `~` expanded: shells do so at a word's beginning only."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return [expand(path) for path in value] if isinstance(value, list) else value


ConfigFile = Annotated[
    Path, typer.Argument(help="YAML configuration.", metavar="CONFIG", callback=expand)
]
TrainedDrafter = Annotated[
    Path,
    typer.Argument(
        help="Run directory, checkpoint, or exported drafter (the z-lab layout).",
        metavar="DRAFTER",
        callback=expand,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, such as train.steps=200.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Every number as JSON.")]
