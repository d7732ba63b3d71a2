import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.signal.readers.tail import GrowingFile


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = GrowingFile(path)
    assert file.lines() == []

    append(path, b"one\ntw")
    assert file.lines() == ["one"]
    append(path, b"o\r\nthree")
    assert file.lines() == ["two"]
    assert file.lines() == []


def test_a_file_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"first run\n")
    file = GrowingFile(path)
    assert file.lines() == ["first run"]

    path.write_bytes(b"cut\n")
    assert file.lines() == ["cut"]

    other = tmp_path / "new"
    other.write_bytes(b"a new file\nlonger\n")
    other.replace(path)
    assert file.lines() == ["a new file", "longer"]


def test_what_was_there_before_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"old\n")
    file = GrowingFile(path, from_end=True)
    append(path, b"new\n")

    assert file.lines() == ["new"]


def test_one_call_reads_no_more_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"12345678\n" * 1000)
    file = GrowingFile(path)

    first = file.lines(most_bytes=4500)
    assert len(first) == 500
    assert len(file.lines()) == 500


def test_an_endless_line_is_dropped_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * (5 << 20))
    file = GrowingFile(path)
    assert file.lines() == []
    append(path, b"\nnext\n")

    assert file.lines()[-1] == "next"


def test_releasing_gives_disk_space_back_and_loses_nothing_unread(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"x" * 4095 + b"\n")
    append(path, (b"y" * 1023 + b"\n") * 1024)
    file = GrowingFile(path)
    file.lines()
    append(path, b"unread\n")
    before = os.stat(path)
    if not file.release(4096):
        pytest.skip("this file system has no holes")
    after = os.stat(path)

    assert after.st_size == before.st_size
    assert after.st_blocks * 512 < 64 << 10
    assert path.read_bytes()[:4095] == b"x" * 4095
    assert file.lines() == ["unread"]
    assert file.release(4096)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_bytes_in_any_portions_give_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, portions: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.touch()
    file, found = GrowingFile(path), []
    for portion in portions:
        append(path, portion)
        found += file.lines()

    assert found == GrowingFile(path).lines()
