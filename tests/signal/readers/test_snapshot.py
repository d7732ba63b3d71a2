"""Memory snapshots are read; pickles that would do anything else are refused before they do."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.errors import ConfigError
from draftline.signal.readers import snapshot as module
from draftline.signal.readers.plain_pickle import HostilePickleError, PickleError, load_plain
from draftline.signal.readers.read import read_trace
from draftline.signal.readers.snapshot import read_snapshot
from tests.support.recordings import START_S, write
from tests.support.trace_checks import mutated

MIB = 1 << 20
KEYS = ("a", "b", "segments", "blocks")


def block(size: int, state: str, line: int = 1) -> dict[str, Any]:
    frames = [
        {"filename": "??", "line": 0, "name": "c10::alloc"},
        {"filename": "/x/torch/nn/modules/linear.py", "line": 134, "name": "forward"},
        {"filename": "/home/me/train.py", "line": line, "name": "step"},
    ]
    return {
        "address": 7 << 40,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frames,
    }


def tree() -> dict[str, Any]:
    """Device 0 with two segments, of which one is free, and a history with a flush; device 1 with one."""

    def entry(n: int, action: str, size: int) -> dict[str, Any]:
        us = int((START_S + n) * 1e6)
        return {"action": action, "addr": 1 << 40, "size": size, "stream": 0, "time_us": us,
                "pool_id": (0, 0), "frames": []}  # fmt: skip

    segments = [
        {"device": 0, "address": 1 << 45, "total_size": 20 * MIB, "allocated_size": 12 * MIB, "stream": 0,
         "active_size": 12 * MIB, "segment_type": "large", "segment_pool_id": (0, 0), "blocks": [
             block(8 * MIB, "active_allocated", 11), block(4 * MIB, "active_awaiting_free", 22),
             block(8 * MIB, "inactive")]},
        {"device": 0, "total_size": 2 * MIB, "allocated_size": 0, "blocks": [block(2 * MIB, "inactive")]},
        {"device": 1, "total_size": 2 * MIB, "allocated_size": MIB, "blocks": [
            block(MIB, "active_allocated", 33), block(MIB, "inactive")]},
    ]  # fmt: skip
    trace = [
        entry(0, "segment_alloc", 20 * MIB),
        entry(0, "alloc", 8 * MIB),
        entry(1, "alloc", 6 * MIB),
        entry(2, "free_requested", 6 * MIB),
        entry(2, "free_completed", 6 * MIB),
        entry(3, "segment_free", 6 * MIB),
        entry(3, "segment_free", 2 * MIB),
        entry(4, "alloc", 4 * MIB),
        entry(5, "segment_free", 2 * MIB),
        entry(6, "oom", 900 * MIB) | {"device_free": 5},
        entry(7, "snapshot", 0),
    ]
    return {
        "segments": segments,
        "device_traces": [trace, []],
        "allocator_settings": {"x": 1.5, "y": None},
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_snapshot(tmp_path: Path, protocol: int) -> None:
    path = write(tmp_path / "dump.pickle", pickle.dumps(tree(), protocol=protocol))
    first, second = read_trace([path]).snapshots
    assert (first.device, second.device) == ("0", "1")
    assert first.reserved_bytes == 22 * MIB
    assert first.allocated_bytes == 12 * MIB
    assert first.inactive_bytes == 8 * MIB  # a whole free segment is no fragment
    assert (first.segments, first.flushes, first.ooms) == (2, 2, 1)
    np.testing.assert_array_equal(first.history[:, 0], START_S + np.array([0, 1, 2, 4]))
    np.testing.assert_array_equal(first.history[:, 1], np.array([8, 14, 8, 12]) * MIB)
    assert first.largest == ((8.0 * MIB, "train.py:11 step"), (4.0 * MIB, "train.py:22 step"))
    assert second.history.shape == (0, 2)
    assert second.allocated_bytes == MIB


def test_compressed_snapshot(tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pickle.gz", gzip.compress(pickle.dumps(tree())))
    assert len(read_trace([path]).snapshots) == 2


def test_empty_snapshot(tmp_path: Path) -> None:
    path = write(tmp_path / "a", pickle.dumps({"segments": [], "device_traces": []}))
    with pytest.raises(ConfigError, match="no memory reading"):
        read_trace([path])


def test_undated_history_is_left_out(tmp_path: Path) -> None:
    old = tree()
    for entry in old["device_traces"][0]:
        del entry["time_us"]
    trace = read_trace([write(tmp_path / "a", pickle.dumps(old))])
    assert trace.snapshots[0].history.shape == (0, 2)
    assert "carry no time" in trace.notes[0]


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def hostile(made: Path) -> dict[str, bytes]:
    target = str(made).encode()
    return {
        "reduce": pickle.dumps({"segments": [Runs(made)]}),
        "reduce deep inside": pickle.dumps({"segments": [[[{"a": (1, Runs(made))}]]]}, protocol=2),
        "global": b"\x80\x02cos\nmkdir\nU" + bytes([len(target)]) + target + b"\x85R.",
        "instance": b"\x80\x02(U" + bytes([len(target)]) + target + b"ios\nmkdir\n.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c"
        + bytes([len(target)])
        + target
        + b"\x85R.",
        "persistent": b"\x80\x04\x8c\x03abcQ.",
        "extension": b"\x80\x02\x82\x01.",
        "builtin": pickle.dumps({"segments": [OrderedDict(a=1)]}),
        "set": pickle.dumps({"segments": {1, 2}}),
        "bytes": pickle.dumps({"segments": b"abc"}, protocol=4),
    }


@pytest.mark.parametrize("name", list(hostile(Path("x"))))
def test_pickles_that_call_are_refused(tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    path = write(tmp_path / "dump.pickle", hostile(made)[name])
    with pytest.raises(ConfigError, match="is refused: it would run code"):
        read_trace([path])
    assert not made.exists()


HUGE = struct.pack("<Q", 1 << 40)
BOMBS = {
    "text of a terabyte": b"\x80\x04\x8d" + HUGE + b"abc.",
    "frame of a terabyte": b"\x80\x04\x95" + HUGE + b"]\x94.",
    "place two billion": b"\x80\x02]r\xff\xff\xff\x7f.",
    "integer of a megabit": b"\x80\x02\x8b"
    + struct.pack("<i", 1 << 17)
    + b"\x7f" * (1 << 17)
    + b".",
    "short long integer": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "empty lists": b"\x80\x02(" + b"]" * 200_000 + b"l.",
    "nested lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "nothing but marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "doubled again and again": b"\x80\x04]\x94" + b"(h\x00h\x00e" * 20_000 + b".",
    "pops an empty stack": b"\x80\x02a.",
    "no end": b"\x80\x02]",
    "only a head": b"\x80\x04",
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_bombs(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "dump.pickle", BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"refused|damaged"):
            read_snapshot(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(BOMBS[name]) + (4 << 20)


def test_shared_parts_are_not_walked_for_ever(tmp_path: Path) -> None:
    """Ten thousand segments with one list of ten thousand blocks: a hundred million blocks."""
    blocks = [block(1, "inactive")] * 10_000
    segment = {"device": 0, "total_size": 1, "blocks": blocks}
    path = write(tmp_path / "a", pickle.dumps({"segments": [segment] * 10_000}))
    with pytest.raises(ConfigError, match="same parts again and again"):
        read_trace([path])


def test_archive_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNPACKED_BYTES", 1000)
    path = write(tmp_path / "a.gz", gzip.compress(b"\x80\x04" + b"\0" * 1_000_000))
    with pytest.raises(ConfigError, match="holds more than"):
        read_trace([path])


@pytest.mark.parametrize("value", [None, [], {"segments": 3}, {"segments": None}, "text", {1: 2}])
def test_other_pickles_are_no_snapshots(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="no list of segments"):
        read_trace([write(tmp_path / "a", pickle.dumps(value))])


def test_odd_values_in_a_snapshot(tmp_path: Path) -> None:
    odd = tree()
    odd["segments"] += [None, 5, [], {"total_size": "x"}, {"total_size": 1e400}, {"total_size": -1}]
    odd["segments"][0]["blocks"] += [
        None,
        {"size": None},
        {"size": 1 << 64, "state": 3, "frames": 7},
    ]
    odd["device_traces"][0] += [None, {"action": 3}, {"action": "alloc", "size": "x"}]
    odd["device_traces"] += [5, None, "text"]
    first = read_trace([write(tmp_path / "a", pickle.dumps(odd))]).snapshots[0]
    assert first.reserved_bytes == 22 * MIB


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.sampled_from(KEYS), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(PLAIN, st.integers(2, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol=protocol), KEYS) == value


def test_other_keys_are_dropped() -> None:
    assert load_plain(pickle.dumps({"a": 1, "other": [2] * 9, 7: 3, (1, 2): 4}), KEYS) == {"a": 1}


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with suppress(PickleError):
        load_plain(b"\x80\x04" + data, KEYS)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_snapshots(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.mktemp("s") / "a"
    write(path, mutated(pickle.dumps(tree()), seed))
    with suppress(ConfigError):
        for found in read_snapshot(path)[0]:
            assert np.isfinite(found.history).all()


def test_error_tells_what_it_would_run() -> None:
    with pytest.raises(
        HostilePickleError, match=r"would run code \(GLOBAL 'os system' at byte 2\)"
    ):
        load_plain(b"\x80\x02cos\nsystem\n.", KEYS)


def test_frames_cannot_command_a_terminal(tmp_path: Path) -> None:
    held = block(2 * MIB, "active_allocated")
    held["frames"][-1] |= {"filename": "/x/a\x1b[2J.py", "name": "f\x1b]0;x\x07"}
    segments = [{"device": 0, "total_size": 2 * MIB, "allocated_size": 2 * MIB, "blocks": [held]}]
    path = write(tmp_path / "a", pickle.dumps({"segments": segments, "device_traces": []}))
    ((_, frames),) = read_trace([path]).snapshots[0].largest
    assert frames == "a [2J.py:1 f ]0;x"
