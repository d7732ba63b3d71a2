"""What a wheel takes along besides Python."""

from __future__ import annotations

import tomllib
from pathlib import Path

import draftline

PACKAGE = Path(draftline.__file__).parent


def test_the_wheel_has_every_file_of_the_package() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["draftline"]
    taken = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert others - taken == set()
    assert PACKAGE / "signal/report/report.html" in others
