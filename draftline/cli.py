"""The command line: parse, call, print. Everything heavy is imported inside the commands."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from draftline import __version__
from draftline.errors import DraftlineError

app = typer.Typer(
    help="Train, evaluate and export block-diffusion drafters for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show, check and document configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, such as train.steps=200.")
]


def main() -> None:
    """Runs a command; draftline's own errors become one line on stderr and an exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        app()
    except DraftlineError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


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
    from draftline.config import load_config

    print(load_config(config, overrides or []).to_yaml(), end="")


@config_app.command("check")
def config_check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a configuration and print its hash."""
    from draftline.config import load_config

    print(f"{config} is valid, hash {load_config(config, overrides or []).digest()}")


@config_app.command("schema")
def config_schema(
    as_json: Annotated[bool, typer.Option("--json", help="JSON Schema instead.")] = False,
) -> None:
    """Print every key with its type, default and meaning."""
    import json

    from draftline.config import Config, describe_keys

    if as_json:
        print(json.dumps(Config.model_json_schema(), indent=2))
        return
    for key in describe_keys():
        print(f"{key.name}  ({key.type}, default {key.default})\n    {key.meaning}")


@app.command()
def regenerate(
    files: Annotated[list[Path], typer.Argument(help="Conversation files with the prompts.")],
    out: Annotated[Path, typer.Option(help="JSONL to write.")],
    target: Annotated[str, typer.Option(help="Target, as target.path.")] = "builtin:smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="First conversations only.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Replace every answer by the target's own, which is what a drafter must be trained on."""
    from draftline.choices import Choices
    from draftline.data.conversations import read_conversations
    from draftline.decode.regenerate import regenerate as run
    from draftline.model.target import load_target
    from draftline.runtime.devices import pick_device

    choices = Choices()
    reading = read_conversations(files, need_answer=False)
    for reason, count in reading.counts().items():
        print(f"left out {count} rows: {reason}", file=sys.stderr)
    loaded = load_target(
        target, device=pick_device(device, choices), dtype=dtype, num_taps=1, choices=choices
    )
    done = run(
        reading.conversations[:limit],
        loaded,
        out,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        batch_size=batch_size,
        seed=seed,
        progress=lambda n, total: print(f"answered {n} of {total}", file=sys.stderr),
    )
    print(
        f"{out}: {done.written} conversations, {done.new_tokens} new tokens; "
        f"{done.cut} cut at {max_new_tokens} tokens, {done.too_long} dropped or shortened"
    )
