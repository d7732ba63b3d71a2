"""What is read of PyTorch in this process: no torch, no CUDA, a torch of another release, a real one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.recorder import counters
from draftline.signal.recorder.counters import Compile, Rising, allocator_values
from tests.support.fake_cuda import FakeCuda, idle, stats

EVERYTHING = {
    "allocator_calls": 7,
    "allocated_bytes": 100,
    "reserved_bytes": 400,
    "inactive_bytes": 20,
    "device_allocations": 3,
    "device_frees": 0,
    "retries": 0,
    "ooms": 0,
}


def test_nested_and_flat_stats_give_the_same() -> None:
    flat = {
        "allocation.all.allocated": 7,
        "allocated_bytes.all.current": 100,
        "allocated_bytes.all.peak": 150,
        "reserved_bytes.all.current": 400,
        "inactive_split_bytes.all.current": 20,
        "num_device_alloc": 3,
        "num_device_free": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
    assert allocator_values(stats()) == allocator_values(flat) == EVERYTHING
    assert allocator_values(stats(), peak=True) == EVERYTHING | {"peak_bytes": 150}
    assert allocator_values(flat, peak=True)["peak_bytes"] == 150


def test_the_documented_name_of_the_calls_is_read_too() -> None:
    assert allocator_values({"allocated.all.allocated": 9}) == {"allocator_calls": 9}
    assert allocator_values({"allocated": {"all": {"allocated": 9}}}) == {"allocator_calls": 9}


def test_what_the_stats_lack_is_absent() -> None:
    assert allocator_values({}) == {}
    assert allocator_values({"num_ooms": "many", "allocation": 3, "reserved_bytes": {}}) == {}


def test_devices_that_were_never_used_are_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda([idle(), stats(), idle()]).install(monkeypatch)
    assert counters.active_devices() == [1]
    assert counters.allocator(1) == EVERYTHING
    assert counters.cuda_device(1) == counters.CudaDevice(1, "NVIDIA H200", "bb", 1000)


def test_a_device_without_a_context_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda([stats(), stats()]).install(monkeypatch)
    asked = []
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda n: asked.append(n) or stats())
    c = SimpleNamespace(_cuda_hasPrimaryContext=lambda ordinal: ordinal == 1)
    monkeypatch.setitem(sys.modules, "torch._C", c)
    assert (counters.active_devices(), asked) == ([1], [1])


def test_the_peak_is_left_alone_unless_it_is_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda().install(monkeypatch)
    assert "peak_bytes" not in counters.allocator(0)
    assert cuda.peaks_reset == []
    assert counters.allocator(0, own_peak=True)["peak_bytes"] == 150
    assert cuda.peaks_reset == [0]


def test_cuda_that_is_not_initialised_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(initialised=False).install(monkeypatch)
    monkeypatch.setattr(cuda, "device_count", lambda: pytest.fail("asked CUDA"))
    assert counters.active_devices() == []
    assert counters.allocator(0) == {}
    assert counters.cuda_device(0) is None


def test_an_import_of_torch_that_is_under_way_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace())
    assert counters.active_devices() == []
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    assert counters.dynamo() == {}
    assert counters.compiles_after(None) is None


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from draftline.signal.recorder import counters as c;"
        "c.dynamo(expected=True), c.facts(), c.active_devices(), c.eager_flex();"
        "print([m for m in ('torch', 'pydantic', 'rich', 'transformers', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def dynamo_of(monkeypatch: pytest.MonkeyPatch, **groups: dict[str, int]) -> None:
    FakeCuda().install(monkeypatch)
    held: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, group in groups.items():
        held[name] = Counter(group)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=held))


def test_counts_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo_of(
        monkeypatch,
        frames={"total": 5, "ok": 3},
        stats={"unique_graphs": 3},
        graph_break={"print": 2, "item": 1},
        inductor={"cudagraph_skips": 4, "fxgraph_cache_hit": 9},
    )
    expected = {"frames": 5, "frames_ok": 3, "graph_breaks": 3, "capture_skips": 4}
    assert counters.dynamo() == counters.dynamo(expected=True) == expected


def test_what_fullgraph_compiles_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo_of(monkeypatch, frames={"total": 5, "ok": 3}, stats={"unique_graphs": 5})
    assert (counters.dynamo()["frames"], counters.dynamo()["frames_ok"]) == (7, 5)


def test_no_compile_is_a_count_only_where_one_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo_of(monkeypatch)
    assert counters.dynamo() == {}
    assert counters.dynamo(expected=True)["frames"] == 0
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert counters.dynamo() == {}
    assert counters.dynamo(expected=True) == {"frames": 0, "frames_ok": 0}
    monkeypatch.delitem(sys.modules, "torch")
    assert counters.dynamo(expected=True) == {}


def test_looking_makes_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo_of(monkeypatch, frames={"total": 1})
    counters.dynamo()
    assert list(sys.modules["torch._dynamo.utils"].counters) == ["frames"]


def test_compiles_are_handed_out_once_and_runtime_entries_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(**known: Any) -> SimpleNamespace:
        return SimpleNamespace(
            **{"compile_id": "0/0", "co_name": "f", "is_forward": True, "end_time_us": 2e6} | known
        )

    first = entry(duration_us=5e5, co_filename="/src/a.py", co_firstlineno=3)
    runtime = entry(is_runtime=True)
    backward = entry(co_name=None, is_forward=False)
    failed = entry(compile_id="0/1", co_name=None, fail_type="Unsupported", fail_reason="why")
    kept = [first, runtime]
    FakeCuda().install(monkeypatch)
    utils = SimpleNamespace(get_compilation_metrics=lambda: list(kept))
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    compiles, last = counters.compiles_after(None) or ([], None)
    assert compiles == [Compile("0/0", False, "f", "/src/a.py:3", 2.0, 0.5, None, None, None)]
    kept += [backward, failed]
    compiles, last = counters.compiles_after(last) or ([], None)
    assert [c.backward for c in compiles] == [True, False]
    assert (compiles[1].failure, compiles[1].function) == ("why", "")
    assert counters.compiles_after(last) == ([], failed)
    kept[:] = [entry(compile_id="9/0")]  # older ones fell out of torch's list
    compiles, _ = counters.compiles_after(last) or ([], None)
    assert [c.number for c in compiles] == ["9/0"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_totals_never_fall_and_keep_every_gain(readings: list[int]) -> None:
    rising, seen = Rising(), []
    for reading in readings:
        values: dict[str, float] = {"frames": reading, "allocated_bytes": reading}
        rising.take(values)
        assert values["allocated_bytes"] == reading  # a level may fall
        seen.append(values["frames"])
    assert seen == sorted(seen)
    pairs = itertools.pairwise(readings)
    gains = sum(b - a if b >= a else b for a, b in pairs)
    assert seen[-1] == readings[0] + gains


def test_the_names_exist_in_the_torch_that_is_installed() -> None:
    """Each is private and may go: then the column it feeds goes, and this test says so."""
    import torch
    import torch._dynamo.utils
    import torch.nn.attention.flex_attention

    assert counters.facts() == {"stance": "default", "dynamo_disabled": False}
    with torch.compiler.set_stance("eager_on_recompile"):
        assert counters.facts()["stance"] == "eager_on_recompile"
    assert counters.callback_handler() is not None
    assert counters.compiles_after(None) is not None
    assert isinstance(torch._dynamo.utils.graph_break_reasons, list)
    assert isinstance(torch.nn.attention.flex_attention._WARNINGS_SHOWN, set)
    assert callable(torch.cuda.memory_stats_as_nested_dict)


def test_eager_flex_attention_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.flex_attention as flex

    shown: set[str] = set()
    monkeypatch.setattr(flex, "_WARNINGS_SHOWN", shown)
    assert not counters.eager_flex()
    shown.add("flex_attention_performance")
    assert counters.eager_flex()
