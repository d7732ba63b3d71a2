import os
import sys
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.live.processes import (
    Identity,
    ProcessTree,
    began_s,
    environ_of,
    identify,
    is_alive,
    is_visible,
    open_files,
    raw_command,
)


class FakeProc:
    """A /proc with processes that tests add and take away."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, parent: int, began_ticks: int = 100, state: str = "S", name: str = "python"
    ) -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        middle = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {middle} {began_ticks} 0\n")

    def remove(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_a_process_is_known_by_its_beginning(proc: FakeProc) -> None:
    proc.add(7, 1, began_ticks=100)
    who = identify(7, proc.root)
    assert is_alive(who, proc.root)

    proc.add(7, 1, began_ticks=200)  # another process with the same number
    assert not is_alive(who, proc.root)


def test_a_name_with_parentheses_does_not_confuse(proc: FakeProc) -> None:
    proc.add(7, 1, began_ticks=100, name="a) S 1 (b")

    assert identify(7, proc.root) == Identity(7, 100)


def test_an_ended_or_unknown_process_is_refused(proc: FakeProc) -> None:
    proc.add(8, 1, state="Z")

    with pytest.raises(ConfigError, match="process 8: it has ended"):
        identify(8, proc.root)
    with pytest.raises(ConfigError, match="process 9: no such process is visible"):
        identify(9, proc.root)
    assert identify(8, proc.root, ended_too=True).pid == 8
    assert is_visible(8, proc.root)
    assert not is_visible(9, proc.root)


def test_the_tree_has_children_of_children_and_keeps_orphans(proc: FakeProc) -> None:
    proc.add(10, 1)
    proc.add(11, 10)
    proc.add(12, 11)
    proc.add(20, 1)
    tree = ProcessTree(identify(10, proc.root), proc.root)
    tree.update()
    assert set(tree.members) == {10, 11, 12}

    proc.remove(11)
    proc.add(12, 1)  # given to init
    proc.add(13, 12)
    tree.update()
    assert set(tree.members) == {10, 12, 13}


def test_a_reused_number_does_not_join_the_tree(proc: FakeProc) -> None:
    proc.add(10, 1)
    proc.add(11, 10)
    tree = ProcessTree(identify(10, proc.root), proc.root)
    tree.update()

    proc.add(11, 1, began_ticks=999)
    tree.update()
    assert set(tree.members) == {10}


def test_what_another_user_hides_is_unknown(proc: FakeProc) -> None:
    proc.add(10, 1)

    assert environ_of(10, proc.root) is None
    assert open_files(99, proc.root) == []
    assert raw_command(10, proc.root) == []


def test_this_process_is_seen_as_it_is(tmp_path: Path) -> None:
    me = os.getpid()
    path = tmp_path / "open file.txt"

    with path.open("w"):
        assert path in open_files(me)
    assert path not in open_files(me)
    told = environ_of(me)
    assert told is not None
    assert told["PATH"] == os.environ["PATH"]
    assert raw_command(me)[0] == sys.orig_argv[0]
    began = began_s(identify(me))
    assert began is not None
    assert 0 < began < os.stat(path).st_mtime + 1
