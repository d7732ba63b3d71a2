"""Two runs side by side: what changed, and what is said to explain it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.report.diff import Difference, compare
from draftline.signal.report.diff_rules import RULES, rule_for
from tests.support.recorded_runs import CONFIG, GIB, Row, recompiling, write_run


def whats(difference: Difference) -> list[str]:
    return [finding.what for finding in difference.findings]


def test_a_run_is_like_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    found = compare(run, run)
    assert found.findings == ()
    assert found.memory_differs is False
    assert all(row.same for row in found.changed)
    assert found.missing == ()
    assert found.same > 20


def it_used_to_be_flat(tmp_path: Path) -> Difference:
    def signal(row: Row) -> Row:
        if row["kind"] == "start":
            row["facts"]["variables"] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            row["facts"]["versions"] = {"triton": "3.7.0"}
            row["facts"]["driver"] = "590.1"
            row["facts"]["dynamo_disabled"] = True
        return recompiling(row)

    def events(row: Row) -> Row:
        if row.get("what") == "target forwards":
            row["got"] = "eager"
        if row["event"] == "sealed":
            row["warmed"][0]["outcome"] = "compiled"
            row["seconds"] = 90.0
        if row["event"] == "start":
            row |= {"argv": ["elsewhere"], "config": "f" * 16, "started": "tomorrow"}
        return row

    config = CONFIG.replace("4096", "8192").replace("0.001", "0.002").replace("runs/my", "runs/b")
    flat = write_run(tmp_path / "a")
    return compare(flat, write_run(tmp_path / "b", signal=signal, events=events, config=config))


def test_differences_are_ranked_by_what_they_explain(tmp_path: Path) -> None:
    found = it_used_to_be_flat(tmp_path)
    assert found.memory_differs is True
    assert whats(found) == [
        "compile: switched off",
        "compile: outcome of drafter-0 step",
        "compile: compiles in the steady state",
        "capture: parts captured",
        "choice of target forwards",
        "version of triton",
        "PYTORCH_CUDA_ALLOC_CONF",
        "token_budget",
        "driver",
        "compile: seconds",
        "OMP_NUM_THREADS",
        "train.learning_rate",
    ]
    assert [f.rank for f in found.findings] == list(range(1, 13))
    by_name = {f.what: f for f in found.findings}
    assert by_name["compile: switched off"].explains == "likely"
    assert by_name["driver"].explains == "possible"
    assert by_name["train.learning_rate"].explains == "unlikely"
    alloc = by_name["PYTORCH_CUDA_ALLOC_CONF"]
    assert (alloc.a, alloc.b) == ("not set", "expandable_segments:True")
    assert "allocator" in alloc.why


def test_paths_and_moments_are_left_out(tmp_path: Path) -> None:
    text = json.dumps(it_used_to_be_flat(tmp_path).to_dict()["findings"])
    for word in ("runs/b", "tomorrow", "elsewhere", "ffff"):
        assert word not in text


def test_the_outcome_stands_side_by_side(tmp_path: Path) -> None:
    rows = {(row.where, row.what): row for row in it_used_to_be_flat(tmp_path).changed}
    assert rows["", "verdict"].a == "healthy"
    assert rows["", "verdict"].b == "fault"
    assert "recompiling" in rows["GPU 0", "because"].b
    assert not rows["GPU 0", "memory is"].same
    assert rows["GPU 0", "reserved MiB, highest - lowest"].a == "0"
    assert rows["speed", "ms per step"].same
    assert [where for where, _ in rows][-1] == "speed"


def test_lines_fit_and_group_what_has_one_reason(tmp_path: Path) -> None:
    def other(row: Row) -> Row:
        if row["kind"] == "start":
            row["facts"]["versions"] = {"triton": "3.7.0"}
        return row

    config = CONFIG.replace("4096", "8192\nmax_anchors: 9")
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", signal=other, config=config)
    found = compare(a, b)
    lines = found.lines(width=80)
    assert max(map(len, lines[2:])) <= 80
    assert "memory behaves alike in both; these differ all the same:" in lines
    text = "\n".join(lines)
    assert text.count("It sets the sizes of the tensors of a step.") == 1
    assert re.search(r"2\. max_anchors: no such key -> 9\n +3\. token_budget: 4096 -> 8192", text)


def test_what_one_side_lacks_is_said_and_not_compared(tmp_path: Path) -> None:
    without = ["signal.jsonl", "config.yaml"]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", without=without)
    found = compare(a, b)
    assert found.memory_differs is None
    assert "B has no signal.jsonl" in found.missing
    assert "B does not tell its configuration" in found.missing
    assert "B does not tell its environment variables" in found.missing
    assert not [what for what in whats(found) if "token_budget" in what or "OMP" in what]
    text = "\n".join(found.lines())
    assert "whether memory behaves alike cannot be told" in text or "no other difference" in text
    assert "not compared: B has no signal.jsonl" in text


def test_variables_that_nobody_set_were_recorded_all_the_same(tmp_path: Path) -> None:
    def none_set(row: Row) -> Row:
        if row["kind"] == "start":
            row["facts"]["variables"] = {}
        return row

    found = compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", signal=none_set))
    finding = next(f for f in found.findings if f.what == "OMP_NUM_THREADS")
    assert (finding.a, finding.b) == ("8", "not set")

    def unseen(row: Row) -> Row:
        if row["kind"] == "start":
            row["facts"]["variables"] = None
        return row

    found = compare(write_run(tmp_path / "c"), write_run(tmp_path / "d", signal=unseen))
    assert found.findings == ()
    assert found.missing == ("B does not tell its environment variables",)


def test_devices_are_paired_by_order(tmp_path: Path) -> None:
    def moved(row: Row) -> Row:
        if "device" in row:
            row["device"] = "5"
        return row

    found = compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", signal=moved))
    assert {row.where for row in found.changed} == {"", "GPU 0 | GPU 5", "speed"}
    assert found.memory_differs is False


def test_recordings_alone_are_compared(tmp_path: Path) -> None:
    def eager(row: Row) -> Row:
        if row["kind"] == "step":
            row |= {"frames": 0, "frames_ok": 0, "compiles": 0, "graph_replays": 0, "captures": 0}
            row["allocator_calls"] = 5000 + 700 * row["step"]
        return row

    a = write_run(tmp_path / "a") / "signal.jsonl"
    b = write_run(tmp_path / "b", signal=eager) / "signal.jsonl"
    found = compare(a, b)
    assert "capture: replays per step" in whats(found)
    rows = {row.what: row for row in found.changed}
    assert (rows["allocator calls per step"].a, rows["allocator calls per step"].b) == ("0", "700")


def test_another_level_of_flat_memory_is_a_difference(tmp_path: Path) -> None:
    def smaller(row: Row) -> Row:
        if row["kind"] == "step":
            row["reserved_bytes"] -= 5 * GIB
        return row

    found = compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", signal=smaller))
    assert found.memory_differs is True


def test_a_path_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        compare(write_run(tmp_path / "a"), tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("variable.TORCH_COMPILE_DISABLE", 100),
        ("variable.PYTORCH_CUDA_ALLOC_CONF", 82),
        ("variable.PYTORCH_ALLOC_CONF", 82),
        ("variable.TORCHINDUCTOR_CACHE_DIR", 30),
        ("variable.TORCHINDUCTOR_CUDAGRAPHS", 64),
        ("variable.CUDA_VISIBLE_DEVICES", 50),
        ("config.train.learning_rate", 20),
        ("config.loss.chunk_rows", 76),
        ("config.loss.gamma", 20),
        ("version.torch", 86),
        ("version.numpy", 16),
        ("something.else", 10),
    ],
)
def test_the_first_rule_that_matches_counts(name: str, weight: int) -> None:
    assert rule_for(name).weight == weight


def test_every_rule_gives_one_sentence() -> None:
    for rule in RULES:
        assert re.fullmatch(r"[A-Z].*\.", rule.why), rule.pattern
        assert ". " not in rule.why, rule.pattern


def test_what_runs_say_cannot_steer_the_terminal(tmp_path: Path) -> None:
    escape = "\x1b]0;owned\x07\x1b[2J\r\nx"

    def signal(row: Row) -> Row:
        if row["kind"] == "start":
            row["program"] = escape
            row["facts"] |= {"versions": {escape: escape}, "variables": {"T" + escape: escape}}
        return row

    def events(row: Row) -> Row:
        return row | {"versions": {escape: "1"}, "what": f"a {escape}"}

    config = json.dumps({escape: {escape: escape}})
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", signal=signal, events=events, config=config)
    for found in (compare(a, b), compare(b, a)):
        assert all(line.isprintable() for line in found.lines())
