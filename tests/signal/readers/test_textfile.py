"""Lines whatever their encoding, ends and compression, in bounded memory."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.readers import textfile
from draftline.signal.readers.textfile import TextFile
from tests.support.recordings import write


@pytest.mark.parametrize(
    "data",
    [
        b"a, 1\nb, 2\n",
        b"a, 1\r\nb, 2\r\n",
        b"a, 1\rb, 2\r",
        b"a, 1\nb, 2",
        "a, 1\nb, 2\n".encode("utf-8-sig"),
        "a, 1\r\nb, 2\r\n".encode("utf-16"),
        b"\xfe\xff" + "a, 1\nb, 2\n".encode("utf-16-be"),
        b"a, 1\n" + "b, 2\n".encode("utf-16-le"),
        b"a, 1\n" + b"\0" * 5000 + b"b, 2\n",
    ],
)
def test_lines(tmp_path: Path, data: bytes) -> None:
    plain = [line for line in TextFile(write(tmp_path / "a", data)).lines() if line]
    packed = [line for line in TextFile(write(tmp_path / "b", gzip.compress(data))).lines() if line]
    assert plain == packed == ["a, 1", "b, 2"]
    assert [x for x in TextFile(write(tmp_path / "c", lzma.compress(data))).lines() if x] == plain


def test_lines_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfile, "_CHUNK", 7)
    lines = [f"line {n} of some length" for n in range(50)]
    assert list(TextFile(write(tmp_path / "a", "\n".join(lines))).lines()) == lines


def test_unended_last_line(tmp_path: Path) -> None:
    text = TextFile(write(tmp_path / "a", "1, 20\n1, 2"))
    assert list(text.lines(whole=True)) == ["1, 20"]
    assert text.notes() == ["the last line is cut off and was left out"]
    only = TextFile(write(tmp_path / "b", "1, 2"))
    assert list(only.lines(whole=True)) == ["1, 2"]


def test_overlong_lines_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfile, "_CHUNK", 64)
    monkeypatch.setattr(textfile, "LONGEST_LINE", 100)
    text = TextFile(write(tmp_path / "a", "first\n" + "x" * 5000 + "\nlast\n"))
    assert list(text.lines()) == ["first", "last"]
    assert "1 line(s) of more than 100 bytes" in text.notes()[0]


def test_cut_archive_gives_what_it_holds(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(100_000).hex().encode() + b"\n")
    whole = b"".join(b"row %d\n" % n for n in range(50_000))
    text = TextFile(write(tmp_path / "a.gz", gzip.compress(whole)[:-2000]))
    rows = list(text.lines())
    assert rows[:2] == ["row 0", "row 1"]
    assert text.cut
    assert "cut off" in text.notes()[0]
    assert list(TextFile(write(tmp_path / "b.gz", data[:30])).lines()) == []


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path / "none", "No such file"),
        (Path("a\0b"), "cannot be the name"),
    ):
        with pytest.raises(ConfigError, match=words):
            list(TextFile(path).lines())


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_small_file_cannot_unpack_to_a_huge_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(textfile, "_UNPACKED_BYTES", 1 << 20)
    data = b"0, 1 MiB\n" * 600_000
    path = write(tmp_path / "a", pack(data))
    allowed = max(1 << 20, 100 * path.stat().st_size)
    text = TextFile(path)
    size = sum(len(line) + 1 for line in text.lines())
    assert 0.5 * allowed < size <= allowed + 1  # the last line may be cut
    assert f"unpacks to more than {allowed >> 20} MiB" in text.notes()[0]
    plain = TextFile(write(tmp_path / "b", data))
    assert sum(len(line) + 1 for line in plain.lines()) == len(data)
    assert plain.notes() == []
