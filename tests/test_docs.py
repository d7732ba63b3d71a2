"""What the documents name exists: files, headings, keys of the configuration, options of the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from draftline.cli.app import app
from draftline.config.faults import known_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What looks like a key and is none: recorded choices, mistakes that are shown, names in Python.
NOT_KEYS = re.compile(
    r"data\.tokens|target\.(check|rope|unread|weights)|train\.(lr|stepz)"
    r"|signal\.(step|start|phase|mark_step|transformers_callback)|\w+\.(md|py|jsonl|yaml)"
)
# Of programs that the documents call besides draftline.
FOREIGN = {
    "speculative-config",
    "speculative-algorithm",
    "speculative-draft-model-path",
    "speculative-num-draft-tokens",
    "model-path",
    "hf-overrides",
    "max-model-len",
    "no-deps",
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "query-gpu",
    "query-compute-apps",
    "format",
    "faults",
    "set",
    "help",
}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (name[2:] for name in parameter.opts if name.startswith("--"))
    for child in getattr(command, "commands", {}).values():
        yield from options(child)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link

    keys = set(known_keys())
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    named = {found[0] for found in re.finditer(rf"(?<![\w./-])({sections})\.[a-z]\w*", text)}
    assert {key for key in named - keys if not NOT_KEYS.fullmatch(key)} == set()

    known = set(options(typer.main.get_command(app)))
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) - known - FOREIGN == set()


def test_every_option_of_a_command_is_in_the_pages() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    known = set(options(typer.main.get_command(app))) - {
        "version",
        "install-completion",
        "show-completion",
    }
    assert {option for option in known if f"--{option}" not in text} == set()
