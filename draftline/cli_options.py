"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, such as train.steps=200.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Every number as JSON.")]
