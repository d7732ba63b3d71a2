"""Formats are told apart by what they hold, and nothing that a file may hold breaks the reader."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.errors import ConfigError
from draftline.signal.readers.read import read_trace
from tests.support.recordings import (
    MIB,
    START_S,
    TRACES,
    dmon,
    json_lines,
    pmon,
    query_csv,
    query_lines,
    recording_rows,
    step_row,
    table,
    write,
)
from tests.support.trace_checks import assert_same, assert_sound, mutated

NAMES = ("graph", "leak", "eager_flex")
SNAPSHOT = {
    "segments": [{"device": 0, "total_size": 2, "blocks": [{"size": 2, "state": "inactive"}]}],
    "device_traces": [[{"action": "alloc", "size": 1, "time_us": 5}]],
}


def fixture(name: str) -> bytes:
    return gzip.decompress((TRACES / name).read_bytes())


def corpus() -> dict[str, bytes]:
    """One file of each format."""
    made = {
        "query": query_csv(gpus=2),
        "bare": "\n".join(query_lines()) + "\n",
        "dmon": dmon(gpus=2),
        "dmon -o T": dmon(times="T"),
        "pmon": pmon(),
        "table": "".join(table(n) for n in range(15)),
        "mig": "".join(table(n, mig=True) for n in range(15)),
        "recording": json_lines(recording_rows()),
        "two runs": json_lines(recording_rows(20) + recording_rows(20, start_s=START_S + 99)),
        "steps": json_lines([step_row(n) for n in range(40)]),
    }
    found = {name: text.encode() for name, text in made.items()}
    found |= {path.name: path.read_bytes() for path in TRACES.glob("watch*")}
    found |= {path.name: fixture(path.name)[:20_000] for path in TRACES.glob("*.gz")}
    return found | {"snapshot": pickle.dumps(SNAPSHOT)}


CORPUS = corpus()


@pytest.mark.parametrize("name", NAMES)
def test_shared_traces(name: str) -> None:
    trace = read_trace([TRACES / f"{name}.steps.jsonl.gz", TRACES / f"{name}.nvidia-smi.csv.gz"])
    assert trace.devices == ["0"]
    assert trace.notes == ()
    (samples,), (steps,) = trace.samples, trace.steps
    assert_sound(trace)
    # What the driver reports is what PyTorch holds and the context: some hundred MiB more.
    at = np.searchsorted(samples.time_s, steps.time_s[5:-5]) - 1
    beyond = samples.used_bytes[at] - steps.values["reserved_bytes"][5:-5]
    assert 0 < np.median(beyond) < 1500 * MIB
    assert steps.known("frames") is not None
    assert (steps.values["frames"][0] == 0) == (name == "eager_flex")


def test_same_whatever_the_names_and_order() -> None:
    paths = [TRACES / "leak.steps.jsonl.gz", TRACES / "leak.nvidia-smi.csv.gz"]
    assert_same(read_trace(paths), read_trace(paths[::-1]))


@pytest.mark.parametrize("name", CORPUS)
def test_compressed_and_encoded_alike(tmp_path: Path, name: str) -> None:
    data = CORPUS[name]
    plain = read_trace([write(tmp_path / "a.txt", data)])
    assert_same(read_trace([write(tmp_path / "b", gzip.compress(data))]), plain)
    assert_same(read_trace([write(tmp_path / "c", lzma.compress(data))]), plain)
    if name != "snapshot" and not name.startswith("watch"):
        text = data.decode()
        for other in (text.replace("\n", "\r\n").encode("utf-16"), text.encode("utf-8-sig")):
            assert_same(read_trace([write(tmp_path / "d", other)]), plain)


@pytest.mark.parametrize("name", ["query", "bare", "table", "recording", "steps", *sorted(
    path.name for path in TRACES.glob("*.gz"))])  # fmt: skip
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_split_in_two(tmp_path: Path, name: str, share: float) -> None:
    lines = CORPUS[name].splitlines(keepends=True)
    # A table is written at once.
    unit = len(lines) // 15 if name == "table" else 1
    cut = int(share * len(lines) / unit) * unit
    whole = read_trace([write(tmp_path / "whole", CORPUS[name])])
    parts = [
        write(tmp_path / "1", b"".join(lines[:cut])),
        write(tmp_path / "2", b"".join(lines[cut:])),
    ]
    assert_same(read_trace(parts), whole)


def test_given_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a", CORPUS["query"])
    trace = read_trace([path, path])
    assert_same(trace, read_trace([path]))
    assert "given twice" in trace.notes[0]


def test_lines_of_a_log_around_it(tmp_path: Path) -> None:
    """Banners, one table, then the query that counts."""
    noise = "Collecting torch\n" * 20_000 + table(0) + "WARNING: something, else\n"
    trace = read_trace([write(tmp_path / "a", noise.encode() + CORPUS["query"])])
    assert_same(trace, read_trace([write(tmp_path / "b", CORPUS["query"])]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\0\n\r\n", "is empty"),
        (b"hello world\nhow are you\n", "text that begins with 'hello world'"),
        (b'[{"step": 1}]', "a JSON document, not one JSON object per line"),
        (b'{\n "a": 1\n}\n', "a JSON document"),
        (b"\x7fELF\x02\x01", "a program"),
        (bz2.compress(b"x" * 99), "bzip2 archive; unpack it first"),
        (b"PK\x03\x04abc", "a zip archive"),
        (b"<?xml version='1.0'?><nvidia_smi_log>", "record with --query-gpu"),
        (b"==============NVSMI LOG==============\n", "long form of nvidia-smi -q"),
        (bytes(range(256)) * 9, "binary data"),
        (b"\x1f\x8b\x08\x00", "is empty"),
        (b"timestamp, index, memory.used [MiB]\n", "holds no memory reading"),
        (
            b'{"kind": "phase", "time_s": 1795959600, "phase": "run"}\n',
            "no memory reading and no step",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_trace([write(tmp_path / "file", data)])
    assert caught.value.exit_code == 2
    assert str(tmp_path / "file") in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file was given"):
        read_trace([])
    with pytest.raises(ConfigError, match="No such file"):
        read_trace([tmp_path / "none.csv"])


def test_sources_and_notes_name_the_files(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a", CORPUS["query"] + b"odd\n"),
        write(tmp_path / "b", CORPUS["steps"]),
    ]
    trace = read_trace(paths)
    assert set(trace.sources) == {str(path) for path in paths}
    assert f"{paths[0]}: 1 line(s) could not be read" in trace.notes


def test_folders_of_other_machines_are_named(tmp_path: Path) -> None:
    rows = json_lines(recording_rows())
    write(tmp_path / "signal.jsonl", rows)
    for name in ("machine-1", "machine-10", "machine-2", "machine-x"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "signal.jsonl", rows)
    trace = read_trace([tmp_path])
    assert trace.notes == (
        "the run's other machines are not in this: diagnose machine-1, machine-2, machine-10 in "
        f"{tmp_path} each by its own name",
    )
    assert read_trace([tmp_path / "machine-2"]).notes == ()


def read_soundly(path: Path, data: bytes) -> None:
    with suppress(ConfigError):
        assert_sound(read_trace([write(path, data)]))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    read_soundly(tmp_path_factory.getbasetemp() / "any-bytes", data)


ODD_LINE = st.lists(
    st.sampled_from(
        ("2026/11/29 13:40:00.123", "0", "1225 MiB", "4 %", "[N/A]", "timestamp", "memory.used [MiB]",
         "# gpu fb", "| NVIDIA-SMI 5 |", "|   0  X  | 00000000:4F:00.0 Off |", "12MiB / 30MiB | 3% |",
         '{"step": 1, "t": 1795959600}', '{"kind": "start"}', "pid", "4242", "-", "13:40:07", "gpu",
         '{"kind": "device", "time_s": 1e300, "device": "0"}', "\x1b[3;4H", "\x00", "\r", "99999999999999")
    ) | st.text(max_size=6),
    max_size=6,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(ODD_LINE, max_size=12), st.sampled_from((", ", " ", "|")))
def test_any_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[str]], between: str
) -> None:
    text = "\n".join(between.join(cells) for cells in lines) + "\n"
    read_soundly(tmp_path_factory.getbasetemp() / "any-lines", text.encode("utf-8", "replace"))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CORPUS)), st.integers(0, 2**32))
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> None:
    read_soundly(tmp_path_factory.getbasetemp() / "mutated", mutated(CORPUS[name], seed))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(CORPUS)), min_size=2, max_size=4), st.integers(0, 2**32))
def test_any_files_together(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], seed: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    paths = [write(folder / f"together-{n}", CORPUS[name]) for n, name in enumerate(names)]
    write(paths[0], mutated(paths[0].read_bytes(), seed))
    with suppress(ConfigError):
        assert_sound(read_trace(paths))


def long_steps() -> str:
    return json_lines([step_row(n) for n in range(13_000)])


def long_query() -> str:
    return query_csv(6_000)


def long_pmon() -> str:
    return "# gpu  pid  type  fb  command\n" + "".join(
        f"    0   {1 + n % 5000}   C   {n % 900}   x\n" for n in range(12_000)
    )


def long_bare_steps() -> str:
    rows = "".join(f'{{"step":{n},"t":{1795959600 + n},"allocs":1}}\n' for n in range(8_000))
    return json_lines([step_row(0)]) + rows


def long_drawing() -> str:
    return "| NVIDIA-SMI 5 |\n" + "\x1b[1;1Hx\x1b[40;1Hy" * 11_000


def one_long_line() -> str:
    return CORPUS["query"].decode() + ", ".join(["1225 MiB"] * 30_000) + "\n" + "| 1 2 C " * 30_000


@pytest.mark.parametrize(
    "make", [long_steps, long_query, long_pmon, long_bare_steps, long_drawing, one_long_line]
)
def test_memory_is_a_small_multiple_of_the_file(tmp_path: Path, make: Callable[[], str]) -> None:
    path = write(tmp_path / "a", make())
    size = path.stat().st_size
    assert size > (2_000_000 if make is long_steps else 150_000)
    tracemalloc.start()
    try:
        with suppress(ConfigError):
            read_trace([path])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * size


def test_reading_needs_no_torch() -> None:
    heavy = "('torch', 'pydantic', 'rich', 'transformers', 'plotly')"
    code = (
        f"import draftline.signal.readers.read, sys; assert not {{*{heavy}}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
