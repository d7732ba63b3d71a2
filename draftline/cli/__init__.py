"""The commands; `main` is the console script `draftline`."""

from __future__ import annotations


def main() -> None:
    """Runs a command and ends the process with its exit code."""
    from draftline.cli import app

    app.main()
