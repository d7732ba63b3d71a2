"""Which room may import which (docs/design.md), and what is imported without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import draftline

PACKAGE = Path(draftline.__file__).parent
_SIGNAL_GROUND = tuple(
    f"signal.{noun}"
    for noun in (
        "words",
        "trace",
        "guards",
        "readers.clock",
        "readers.json_row",
        "draftline_run",
        "recorder.clock",
        "recorder.nvml",
    )
)
# Lowest first: a room may import itself and what stands in its entry, and an entry names lower rooms only.
_GROUND = {
    "amounts",
    "errors",
    "environment",
    "choices",
    "config",
    "files",
    "library_warnings",
    "locks",
    "progress",
    "runlog",
    "stopping",
}
_PARTS = _GROUND | {"runtime", "data", "model", "model.target", "model.drafter", "checkpoint"}
_SIGNAL = {
    "signal",
    *_SIGNAL_GROUND,
    *(f"signal.{r}" for r in ("recorder", "readers", "judge", "monitor")),
}
_TRAIN = {
    "train",
    *(f"train.{r}" for r in ("features", "step", "plan", "save", "report", "pipeline")),
}
ALLOWED: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    "environment": set(),
    "files": set(),
    "library_warnings": set(),
    "amounts": set(),
    "progress": set(),
    "stopping": set(),
    "choices": {"errors"},
    "locks": {"errors"},
    "runlog": {"errors"},
    "config": {"errors"},
    **{noun: {"errors", *_SIGNAL_GROUND[:place]} for place, noun in enumerate(_SIGNAL_GROUND)},
    "signal.readers": {"errors", *_SIGNAL_GROUND},
    "signal.recorder": {"errors", "environment", "signal.readers", *_SIGNAL_GROUND},
    "signal.judge": {"errors", *_SIGNAL_GROUND},
    "signal.monitor": {"signal.judge", *_SIGNAL_GROUND},
    "signal.live": {
        "errors",
        "environment",
        "signal.recorder",
        "signal.readers",
        "signal.judge",
        "signal.monitor",
        *_SIGNAL_GROUND,
    },
    "signal.report": {
        "errors",
        "files",
        "runlog",
        "signal.readers",
        "signal.judge",
        *_SIGNAL_GROUND,
    },
    "signal": {"signal.recorder", "signal.judge", "signal.monitor", *_SIGNAL_GROUND},
    "runtime": _GROUND,
    "data": _GROUND,
    "model": _GROUND,
    "model.target": _GROUND | {"model"},
    "model.drafter": _GROUND | {"model", "model.target"},
    "checkpoint": _GROUND | {"model.target", "model.drafter"},
    "train.features": _PARTS,
    "train.step": _PARTS | {"train.features"},
    "train.plan": _PARTS | {"train.features", "train.step"},
    "train.save": _PARTS | {"train.features", "train.step", "train.plan"},
    "train.report": _PARTS | _SIGNAL | {"train.step"},
    "train.pipeline": _PARTS | (_TRAIN - {"train"}),
    "train": _PARTS | _SIGNAL | _TRAIN,
    "bench": _PARTS | _TRAIN,
    "decode": _PARTS - {"checkpoint"},
    "export": (_PARTS - {"data", "runtime"}) | {""},
    "cli": _PARTS
    | _SIGNAL
    | _TRAIN
    | {"", "bench", "decode", "export", "signal.live", "signal.report"},
    "__main__": {"cli"},
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


def test_no_room_may_import_one_that_stands_later() -> None:
    order = list(ALLOWED)
    for room, others in ALLOWED.items():
        later = [other for other in others - {room} if order.index(other) > order.index(room)]
        assert not later, f"{room} may import {later}"


def test_rooms_import_only_what_stands_below_them() -> None:
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("runtime/ring.py", "from draftline.model.target.target import Head", "model.target"),
        ("runtime/ring.py", "import draftline.data.tokens", "data"),
        ("model/x.py", "def f():\n    from draftline.train import loop", "train"),
        ("model/x.py", "from draftline.decode.session import DecodeSession", "decode"),
        ("data/x.py", "from draftline.model.target.taps import choose_taps", "model.target"),
        ("decode/x.py", "from draftline.train.loop import train", "train"),
        ("train/step/x.py", "from draftline.train.plan.plan import Plan", "train.plan"),
        ("model/target/x.py", "import draftline.model.drafter.masks", "model.drafter"),
        ("signal/judge/x.py", "from draftline.signal.live.watch import watch", "signal.live"),
        ("train/x.py", "from draftline import cli", "cli"),
        ("config/schema.py", "from draftline.choices import Choices", "choices"),
    ],
)
def test_a_wrong_import_would_be_found(file: str, text: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
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
    ground = (
        "errors",
        "environment",
        "config",
        "choices",
        "runlog",
        "library_warnings",
        "data.conversations",
        "data.builtin",
        "cli.app",
    )
    ground += tuple(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted((PACKAGE / "signal").rglob("*.py"))
        if path.stem != "__init__"
    )
    assert not loads_torch(*(f"draftline.{name}" for name in ground))


def test_what_needs_torch_loads_it() -> None:
    """The twin of the test above: it would see torch."""
    assert loads_torch("draftline.runtime.devices")
