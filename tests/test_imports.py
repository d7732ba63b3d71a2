"""Which room may import which (docs/design.md), and what is imported without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import draftline

PACKAGE = Path(draftline.__file__).parent
_GROUND = {
    "choices",
    "config",
    "config_faults",
    "config_sections",
    "config_training",
    "config_file",
    "config_yaml",
}
_GROUND |= {"errors", "runlog", "progress", "locks", "files"}
_ROOMS = {"runtime", "model", "data", "demo", "signal"}
# Room -> what it may import besides itself. `demo` is data that ships; `demo.run` is a command.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config_sections": set(),
    "config_training": {"config_sections"},
    "config": {"config_sections", "config_training", "errors"},
    "config_yaml": {"errors"},
    "config_faults": {"config", "config_sections"},
    "config_file": {"config", "config_sections", "config_faults", "config_yaml", "errors"},
    "choices": {"errors"},
    "files": set(),
    "locks": {"errors"},
    "progress": set(),
    "runlog": {"errors"},
    "signal": {"config", "errors", "files", "runlog"},
    "runtime": _GROUND | {"signal"},
    "model": _GROUND | {"signal"},
    "data": _GROUND | {"signal"},
    "demo": _GROUND,
    "train": _GROUND | _ROOMS,
    "decode": _GROUND | _ROOMS,
    "export": _GROUND | _ROOMS | {""},
    "demo.run": _GROUND | _ROOMS | {"train", "decode", "export"},
    "cli_options": set(),
    "cli_plan": _GROUND | _ROOMS | {"train", "cli_options"},
    "cli_regenerate": _GROUND | _ROOMS | {"decode"},
    "cli_bench": _GROUND | _ROOMS | {"train", "cli_options"},
    "cli_export": _GROUND | _ROOMS | {"train", "export", "cli_options"},
    "cli_signal": {"errors", "signal", "cli_options"},
    "cli": _GROUND
    | _ROOMS
    | {"train", "decode", "export", "demo.run", ""}
    | {"cli_options", "cli_plan", "cli_bench", "cli_regenerate", "cli_export", "cli_signal"},
    "__main__": {"cli"},
    "": set(),
}


def room_of(module: str) -> str:
    """The longest entry of the table that `module` lies in, else its first part."""
    inside = module.removeprefix("draftline").removeprefix(".")
    homes = [room for room in ALLOWED if room and f"{inside}.".startswith(f"{room}.")]
    return max(homes, key=len, default=inside.split(".")[0])


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports from, inside functions too; "" is the package itself."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    rooms = {room_of(module) for module in modules if module.split(".")[0] == "draftline"}
    return {"" if room == "__version__" else room for room in rooms}


def wrong_imports(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package).with_suffix(""))
        room = room_of(name.replace("/", ".").removesuffix("__init__").removesuffix("."))
        if room not in ALLOWED:
            found.append(f"{room} is a room without a place in this table")
            continue
        for other in sorted(imported_rooms(path) - ALLOWED[room] - {room}):
            found.append(f"{name} imports {other}")
    return found


def test_rooms_import_only_what_stands_below_them() -> None:
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("runtime/ring.py", "from draftline.model.target import Head", "model"),
        ("runtime/ring.py", "import draftline.data.tokens", "data"),
        ("model/x.py", "def f():\n    from draftline.train import loop", "train"),
        ("model/x.py", "from draftline.decode.chain import ChainDecoder", "decode"),
        ("data/x.py", "from draftline.model.taps import choose_taps", "model"),
        ("decode/x.py", "from draftline.train.loop import train", "train"),
        ("train/x.py", "from draftline.demo.run import run", "demo.run"),
        ("train/x.py", "from draftline import cli", "cli"),
        ("config.py", "from draftline.choices import Choices", "choices"),
    ],
)
def test_a_wrong_import_would_be_found(file: str, text: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert wrong_imports(tmp_path) == [f"{file.removesuffix('.py')} imports {wrong}"]
    path.write_text("from draftline.errors import ConfigError")
    assert wrong_imports(tmp_path) == []


def test_a_new_room_needs_a_place(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "x.py").write_text("")
    assert wrong_imports(tmp_path) == ["utils is a room without a place in this table"]


def loads_torch(*modules: str) -> bool:
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_what_needs_no_torch_does_not_load_it() -> None:
    ground = ("errors", "config", "choices", "runlog", "data.conversations", "demo", "cli")
    ground += tuple(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted((PACKAGE / "signal").rglob("*.py"))
        if path.stem != "__init__"
    )
    assert not loads_torch(*(f"draftline.{name}" for name in ground))


def test_what_needs_torch_loads_it() -> None:
    """The twin of the test above: it would see torch."""
    assert loads_torch("draftline.runtime.devices")
