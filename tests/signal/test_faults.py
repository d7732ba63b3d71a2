"""The corpus' programs, in small on the CPU, and what makes a corpus of their recordings."""

from __future__ import annotations

import json
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import fault_corpus
import fault_neighbour
import faults
from fault_model import TINY
from fault_run import PROGRAMS, record
from fault_session import Bound

BY_NAME = {program.name: program for program in PROGRAMS}
# What a CPU can prove: Dynamo's part.
PROVEN = [
    *[("not_compiled", k) for k in (1, 2)],
    *[("graph_breaks", k) for k in range(3)],
    *[("recompiling", k) for k in range(3)],
    *[("recompile_limit", k) for k in range(3)],
    *[("compile_storm", k) for k in range(3)],
    ("no_graph_capture", 1),
]
# The rest needs a device's counters; here it must run through. `lull` only sleeps.
RUN = [
    (program.name, k)
    for program in PROGRAMS
    for k in range(len(program.variants))
    if (k == 0 or (program.name, k) in {("leak", 1), ("checkpoint", 1), ("unbounded_shapes", 1)})
    and (program.name, k) not in PROVEN
    and program.name not in ("not_compiled", "lull")
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def run(name: str, k: int, out: Path, steps: int) -> dict[str, Any]:
    return record(
        BY_NAME[name],
        k,
        out,
        seconds=1e6,
        device=torch.device("cpu"),
        size=TINY,
        backend="eager",
        capture_with=lambda function, device: function,
        max_steps=steps,
    )


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "signal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "k"), PROVEN)
def test_a_fault_of_compilation_proves_itself(name: str, k: int, tmp_path: Path) -> None:
    label = run(name, k, tmp_path, steps=14 if name == "compile_storm" else 64)
    assert label["why"] is None
    assert label["ok"]
    assert label["alarm"]
    assert label["cause"] == name
    recorded = lines(tmp_path)
    assert any(line["kind"] == "phase" for line in recorded) == BY_NAME[name].variants[k].marked
    assert sum(line["kind"] == "step" for line in recorded) == (
        14 if name == "compile_storm" else 64
    )


@pytest.mark.parametrize(("name", "k"), RUN)
def test_the_others_run_and_say_that_a_cpu_proves_nothing(
    name: str, k: int, tmp_path: Path
) -> None:
    label = run(name, k, tmp_path, steps=130 if name == "long_warm" else 32)
    assert not label["ok"]
    reasons = label["why"].split("; ")
    assert all("not known here" in why or ", wanted at" in why for why in reasons), reasons
    assert label["evidence"]["steps"] > 0 or name == "allocator_retries"


def test_a_program_that_fails_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(training: Any) -> Any:
        raise RuntimeError("no memory for a graph\nand more of it")

    monkeypatch.setattr("fault_training.Training.captured", captured)
    label = run("graph", 0, tmp_path, steps=5)
    assert (label["ok"], label["why"]) == (False, "RuntimeError: no memory for a graph")


@pytest.mark.parametrize(
    ("bound", "seen", "why"),
    [
        (Bound("x", least=1), {"x": 1}, None),
        (Bound("x", least=1), {"x": 0.5}, "x 0.5, wanted at least 1"),
        (Bound("x", most=1), {"x": 2}, "x 2, wanted at most 1"),
        (Bound("x", most=1), {}, "x is not known here"),
    ],
)
def test_a_bound_says_what_is_wrong(bound: Bound, seen: dict[str, float], why: str | None) -> None:
    assert bound.broken(seen) == why


def test_the_corpus_is_what_was_asked_for() -> None:
    causes = Counter(p.cause for p in PROGRAMS for _ in p.variants)
    alarms = [p for p in PROGRAMS if p.alarm]
    assert len(alarms) >= 14
    assert all(len(p.variants) == 3 for p in alarms)
    assert causes["healthy"] + causes["pause"] >= 14
    assert all(not p.variants[2].marked for p in alarms)
    assert all(p.variants[0].marked for p in PROGRAMS)


def test_one_recording_of_each_program_comes_first() -> None:
    jobs = faults.jobs_of([])
    assert [job.k for job in jobs] == sorted(job.k for job in jobs)
    assert len(set(map(str, jobs))) == len(jobs) == sum(len(p.variants) for p in PROGRAMS)
    first = [BY_NAME[job.name].alarm for job in jobs[:8]]
    assert 3 <= sum(first) <= 5
    assert [str(job) for job in faults.jobs_of(["leak-1", "graph"])] == [
        "graph-0",
        "graph-1",
        "leak-1",
        "graph-2",
    ]


@given(st.dictionaries(st.text("abc", min_size=1), st.sampled_from("xyz"), max_size=30))
def test_a_split_halves_each_cause_whatever_the_order(causes: dict[str, str]) -> None:
    found = {name: {"cause": cause} for name, cause in causes.items()}
    sides = fault_corpus.split(found)
    assert sorted(sides["tuning"] + sides["test"]) == sorted(found)
    for cause in set(causes.values()):
        counts = [sum(causes[name] == cause for name in names) for names in sides.values()]
        assert abs(counts[0] - counts[1]) <= 1
    assert fault_corpus.split(dict(reversed(found.items()))) == sides


@given(
    st.dictionaries(st.text("abc", min_size=1), st.sampled_from("xyz"), max_size=20),
    st.dictionaries(st.text("abc", min_size=1), st.sampled_from("xyz"), max_size=20),
)
def test_a_recording_stays_on_its_side_when_others_join(
    first: dict[str, str], more: dict[str, str]
) -> None:
    before = fault_corpus.split({name: {"cause": cause} for name, cause in first.items()})
    found = {name: {"cause": cause} for name, cause in (more | first).items()}
    sides = fault_corpus.split(found, before)
    assert sorted(sides["tuning"] + sides["test"]) == sorted(found)
    for side, names in before.items():
        assert set(names) <= set(sides[side])
    gone = fault_corpus.split({}, before)
    assert gone == {"tuning": [], "test": []}


def recorded(path: Path, *rows: dict[str, Any]) -> str:
    """What is left of the rows, once as a text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    fault_corpus.thin(path)
    left = path.read_text()
    fault_corpus.thin(path)
    assert path.read_text() == left  # scrubbing again changes nothing
    return left


def test_a_recording_loses_digits_and_places(tmp_path: Path) -> None:
    text = "at /srv/a/run.py:3 and /tmp, 3/4 of lib/torch/x.py in /x"
    row = {"kind": "event", "wall_ms": 1.23456, "text": text, "n": [1, None]}
    (line,) = recorded(tmp_path / "signal.jsonl", row).splitlines()  # not the one cut off
    assert json.loads(line) == {
        "kind": "event",
        "wall_ms": 1.235,
        "text": "at run.py:3 and tmp, 3/4 of lib/torch/x.py in x",
        "n": [1, None],
    }


def test_a_recording_loses_what_tells_machines_apart(tmp_path: Path) -> None:
    ours, other = (f"GPU-0123456{n}-89ab-cdef-0123-456789abcdef" for n in (7, 8))
    variables = {
        "TORCH_COMPILE_DISABLE": "1",
        "TORCHINDUCTOR_CACHE_DIR": "somewhere",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_KERNEL_CACHE": "/var/kernels",
        "TORCH_CUDA_ARCH_LIST": "9.0a",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "CUDA_VISIBLE_DEVICES": other,
    }
    facts = {"python": "3.12.3", "kernel": "6.1-secret", "container": True, "cpus": 32}
    facts |= {"gpus": [{"uuid": ours}, {"uuid": other}], "variables": variables}
    left = recorded(
        tmp_path / "signal.jsonl",
        {"kind": "start", "pid": 4711, "facts": facts},
        {"kind": "facts", "devices": {"cuda:0": {"uuid": other}}, "facts": {"stance": "default"}},
        {"kind": "device", "processes": {"815": 5, "4711": 6}},
        {"kind": "device", "processes": {"4711": 6, "99": 7}},
        {"kind": "device", "processes": None},
    )
    start, learned, *devices = map(json.loads, left.splitlines())
    first, second = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
    assert start["pid"] == 1
    assert start["facts"] == {
        "python": "3.12.3",
        "gpus": [{"uuid": first}, {"uuid": second}],
        "variables": {
            "TORCH_COMPILE_DISABLE": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "CUDA_VISIBLE_DEVICES": second,
        },
    }
    assert learned["devices"] == {"cuda:0": {"uuid": second}}
    assert [device["processes"] for device in devices] == [{"2": 5, "1": 6}, {"1": 6, "3": 7}, None]


def test_an_archive_holds_what_was_proven_and_is_the_same_twice(tmp_path: Path) -> None:
    for name, ok in (("a-0", True), ("a-1", True), ("b-0", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "label.json").write_text(json.dumps({"cause": "leak", "ok": ok}))
        (tmp_path / name / "signal.jsonl").write_text('{"kind": "start", "pid": 77}\n')
        (tmp_path / name / "output.txt").write_text("noise")
    first = fault_corpus.pack(tmp_path).read_bytes()
    archive = fault_corpus.pack(tmp_path)
    assert archive.read_bytes() == first
    with tarfile.open(archive) as tar:
        names = ["split.json", *(f"a-{k}/{f}.json" for k in (0, 1) for f in ("signal", "label"))]
        assert [name.replace("jsonl", "json") for name in tar.getnames()] == names
    assert sorted(fault_corpus.unpack(archive, tmp_path / "again")) == ["a-0", "a-1"]
    for k in (0, 1):
        assert '"pid":1}' in (tmp_path / "again" / f"a-{k}" / "signal.jsonl").read_text()
    assert '"pid":1}' in (tmp_path / "b-0" / "signal.jsonl").read_text()


def test_packing_again_leaves_recordings_on_their_side(tmp_path: Path) -> None:
    for name in ("a-0", "a-1", "a-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "label.json").write_text(json.dumps({"cause": "leak", "ok": True}))
    sides = fault_corpus.split(fault_corpus.labels(tmp_path))
    swapped = {"tuning": sides["test"], "test": sides["tuning"]}
    (tmp_path / "split.json").write_text(json.dumps(swapped))
    fault_corpus.pack(tmp_path)
    assert json.loads((tmp_path / "split.json").read_text()) == swapped


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("constant", [1] * 9),
        ("stairs", [1, 1, 1, 1, 2, 2, 2, 2, 2]),
        ("ramp", [2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("saw", [2, 3, 4, 5, 6, 7, 8, 1, 2]),
    ],
)
def test_a_neighbour_follows_its_pattern(pattern: str, blocks: list[int]) -> None:
    assert list(islice(fault_neighbour.changes(pattern), 9)) == blocks


def test_the_driver_records_a_program_in_its_own_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one whose fault is a variable of the environment."""
    corpus = faults.Corpus(tmp_path, 0.2, end=float("inf"), neighbour="constant")
    corpus.run(faults.jobs_of(["not_compiled-0"]), [None])
    label = json.loads((tmp_path / "not_compiled-0" / "label.json").read_text())
    assert (label["ok"], label["device"], label["evidence"]["frames_total"]) == (True, "cpu", 0)
    assert label["neighbour"] == "constant"
    assert capsys.readouterr().out.startswith("not_compiled-0 ")
    assert {line["kind"] for line in lines(tmp_path / "not_compiled-0")} >= {"start", "step"}


def test_nothing_starts_after_the_deadline(tmp_path: Path) -> None:
    corpus = faults.Corpus(tmp_path, 8.0, end=0.0)
    corpus.run(faults.jobs_of([]), [None])
    assert list(tmp_path.iterdir()) == []
