"""The page about a run: what is on it, that it is whole without a network, and harmless."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import ConfigError
from draftline.signal.judge.cause import Cause
from draftline.signal.judge.verdict import Verdict
from draftline.signal.report.diff import compare
from draftline.signal.report.report import write_report
from draftline.signal.report.run_facts import read_run
from draftline.signal.report.summary import headline
from tests.support.recorded_runs import GIB, RUN_AT_S, START_S, STEP_S, Row, recompiling, write_run

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    "<a href='javascript:alert(1)'>x</a>\u202e\ud800\x00"
)


class Page(HTMLParser):
    """A report taken apart: its text, its figure, its scripts, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.words: list[str] = []
        self.figure: dict[str, Any] = {"data": []}
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = (tag, dict(attrs))
        self.tags.append(self._open)

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open
        if tag == "script" and attributes.get("type") == "application/json":
            self.figure = json.loads(data)
        elif tag == "script":
            self.scripts.append(data)
        elif tag != "style":
            self.words.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ("", {})

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def curves(self) -> list[str]:
        return [line["name"] for line in self.figure["data"]]

    @property
    def charts(self) -> list[str]:
        layout = self.figure["layout"]
        return [part["title"]["text"] for name, part in layout.items() if name.startswith("legend")]


def report(run: Path | list[Path], tmp_path: Path) -> Page:
    out = tmp_path / "report.html"
    write_report(run, out)
    return Page(out)


def test_a_whole_run_has_everything(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "my-run"), tmp_path)
    assert page.text.index("Healthy: memory is flat") < page.text.index("Memory of GPU 0")
    assert page.curves == [
        "whole device",
        "held by PyTorch",
        "tensors",
        "peak of a step",
        "loss",
        "acceptance length",
        "drafters work",
        "drafters wait for features",
        "targets",
        "drafters",
        "rows per second",
    ]
    assert page.charts == [
        "<b>Memory of GPU 0</b>",
        "<b>Loss</b>",
        "<b>Acceptance length</b>",
        "<b>Step time</b>",
        "<b>Waiting</b>",
        "<b>Rate</b>",
    ]
    for said in (
        "my-run",
        "torch 2.11.0",
        "load (4.0 s), warm (6.0 s), run (40 s)",
        "fallback",
        "no wheel",
        "cache hit",
        "drafter-0 step",
        "580.159.04",
        "NVIDIA H200, 140.0 GiB",
        "OMP_NUM_THREADS",
        "train.learning_rate",
        "All 7 settings",
    ):
        assert said in page.text, said
    bands = page.figure["layout"]["shapes"]
    assert [band["x0"] for band in bands] == [0, 4, 10]


def test_a_fault_is_said_in_words_and_its_moments_are_marked(tmp_path: Path) -> None:
    def faulty(row: Row) -> Row:
        if row["kind"] == "phase" and row["phase"] == "end":
            row |= {"kind": "event", "event": "recompile", "text": "L['n'] == 8", "device": "0"}
            row["time_s"] = START_S + RUN_AT_S + 20
        return recompiling(row)

    page = report(write_run(tmp_path / "a", signal=faulty), tmp_path)
    assert "Fault: it compiles again while it runs" in page.text
    assert "L['n'] == 8" in page.text
    marks = page.figure["data"][4]
    assert (marks["name"], marks["x"]) == ("recompile", [30.0])
    # A movement of 1 GiB at 20 GiB is shown close up first, and a button leads back.
    low, high = page.figure["layout"]["yaxis"]["range"]
    assert 0 < low < high
    [menu] = page.figure["layout"]["updatemenus"]
    assert menu["active"] == 1
    [first, close] = [button["args"][0]["yaxis.range"] for button in menu["buttons"]]
    assert first[0] == 0
    assert close == [low, high]


def test_the_figure_is_valid_for_plotly(tmp_path: Path) -> None:
    from plotly.graph_objects import Figure

    figure = report(write_run(tmp_path / "a", signal=recompiling), tmp_path).figure
    assert len(Figure(figure).data) == len(figure["data"])


def test_charts_share_one_axis_of_time(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "a"), tmp_path)
    axes = [axis for name, axis in page.figure["layout"].items() if name.startswith("xaxis")]
    assert len(axes) == len(page.charts) == 6
    assert {axis["matches"] for axis in axes} == {"x"}
    assert len({tuple(axis["range"]) for axis in axes}) == 1


def test_the_page_is_whole_without_a_network_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "a"), tmp_path)
    assert len(page.scripts) == 2
    assert page.scripts[0].lstrip().startswith("/**\n* plotly.js")
    for tag, attributes in page.tags:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#"), tag
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in page.scripts
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert re.findall(r"'sha256-([^']+)'", policy) == digests


def hostile_run(folder: Path) -> Path:
    def signal(row: Row) -> Row:
        if row["kind"] == "start":
            row |= {"program": HOSTILE, "facts": {HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}}}
            row["facts"] |= {"variables": {"X": HOSTILE}, "gpus": [{"index": "0", "name": HOSTILE}]}
        if row["kind"] == "phase" and row["phase"] == "warm":
            row["phase"] = HOSTILE
        if row["kind"] == "phase" and row["phase"] == "end":
            row |= {"kind": "event", "event": "recompile", "text": HOSTILE, "device": None}
        return row

    def events(row: Row) -> Row:
        return {
            key: HOSTILE if isinstance(value, str) and key != "event" else value
            for key, value in row.items()
        } | ({"argv": [HOSTILE]} if row["event"] == "start" else {})

    config = json.dumps({HOSTILE[:40]: HOSTILE.replace("\ud800", "")})
    run = write_run(folder, signal=signal, events=events, config=config)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_s": START_S, "event": "failed", "error": HOSTILE}) + "\n")
    return run


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    page = report(hostile_run(tmp_path / "<img src=x onerror=alert(1)>"), tmp_path)
    assert len(page.scripts) == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [a for _, a in page.tags if any(name.startswith("on") for name in a)]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert all(link is not None and link.startswith("#") for link in links)
    assert page.text.count("<script>document.title=") > 8
    assert "\u202e" not in page.html
    assert "\x00" not in page.html
    assert "<script" not in json.dumps(page.figure["data"])
    # Neither do the data end the element that they are in.
    data = page.html.split('id="figure">')[1].split("</script>")[0]
    assert "\\u0026lt;script" in data
    assert not {"<", ">", "&"} & set(data)


def test_a_page_without_charts_has_no_script(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<x>", without=["signal.jsonl", "metrics.jsonl"])
    page = report(run, tmp_path)
    assert "<title>&lt;x&gt; - draftline report</title>" in page.html
    assert "script-src 'none'" in page.html
    assert "<script" not in page.html
    assert "JavaScript" not in page.html


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_a_hostile_run_and_runs_nothing_of_it(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_report(hostile_run(tmp_path / "a"), out)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --virtual-time-budget=5000"
    )
    done = subprocess.run(
        [
            str(CHROMIUM),
            *flags.split(),
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            out.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "<title>a - draftline report</title>" in done.stdout
    assert done.stdout.count('class="nsewdrag drag"') == 6
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
    assert "&lt;img src=x" in drawn
    assert "<img src" not in drawn


def test_metrics_alone(tmp_path: Path) -> None:
    without = ["signal.jsonl", "events.jsonl", "config.yaml"]
    page = report(write_run(tmp_path / "a", without=without), tmp_path)
    assert "No GPU memory to judge: the run used no GPU" in page.text
    assert "loss" in page.curves
    assert "This run has no signal.jsonl." in page.text


def test_a_log_without_dates_has_its_own_clock(tmp_path: Path) -> None:
    def undated(row: Row) -> Row:
        return {key: value for key, value in row.items() if key != "time_s"}

    run = write_run(tmp_path / "a", metrics=undated, without=["signal.jsonl"])
    page = report(run, tmp_path)
    assert page.figure["data"][0]["x"][0] == 0
    assert page.figure["data"][0]["x"][-1] == 39


def test_a_recording_of_another_program(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "a") / "signal.jsonl", tmp_path)
    assert page.curves[:4] == ["whole device", "held by PyTorch", "tensors", "peak of a step"]
    assert page.curves[4:] == ["everything else", "compiling", "tokens per second"]


def test_a_table_of_nvidia_smi_and_steps_together(tmp_path: Path) -> None:
    rows = [
        f"2026/11/29 10:00:{second:02}.000, 0, {1000 + second} MiB, 5 %" for second in range(60)
    ]
    smi = tmp_path / "smi.csv"
    smi.write_text(
        "timestamp, index, memory.used [MiB], utilization.gpu [%]\n" + "\n".join(rows) + "\n"
    )
    page = report([smi], tmp_path)
    assert page.curves == ["whole device"]
    assert "2026-11-29 10:00:00" in page.text
    assert "UTC" not in page.text
    assert "reserved" not in page.text


def test_other_programs_on_the_device_are_drawn(tmp_path: Path) -> None:
    def shared(row: Row) -> Row:
        if row["kind"] == "device":
            row["processes"] = {"77": row["used_bytes"] - 3 * GIB, "99": 2 * GIB, "98": GIB}
        return row

    page = report(write_run(tmp_path / "a", signal=shared), tmp_path)
    others = page.figure["data"][1]
    assert others["name"] == "other programs"
    assert set(others["y"]) == {3.0}


def test_a_long_recording_is_thinned_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    with (folder / "signal.jsonl").open("w") as file:
        for step in range(12_000):
            row = {
                "kind": "step",
                "time_s": START_S + step * STEP_S,
                "device": "0",
                "step": step,
                "wall_ms": 250.0,
                "reserved_bytes": (40 if step == 7_001 else 20) * GIB,
            }
            file.write(json.dumps(row) + "\n")
    page = report(folder, tmp_path)
    held = page.figure["data"][0]
    assert len(held["x"]) <= 4000
    assert max(held["y"]) == 40
    assert "12,000 readings are drawn with 4,000 points" in page.text


def test_what_is_not_drawn_is_said(tmp_path: Path) -> None:
    """Frequent events and phases: a chart shows some of them."""
    folder = tmp_path / "busy"
    folder.mkdir()
    with (folder / "signal.jsonl").open("w") as file:
        for step in range(900):
            at = {"time_s": START_S + step * STEP_S, "device": "0"}
            row = {"kind": "step", **at, "step": step, "wall_ms": 250.0, "reserved_bytes": GIB}
            phase = {"kind": "phase", **at, "phase": ("run", "evaluate")[step % 2]}
            for line in (row, phase, {"kind": "event", **at, "event": "capture", "text": "g"}):
                file.write(json.dumps(line) + "\n")
    text = report(folder, tmp_path).text
    assert "Bands: the longest 120 of" in text
    assert "Of frequent events at most 400 are marked." in text


def test_time_begins_with_the_first_thing_known(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    steps = [
        {
            "kind": "step",
            "time_s": START_S + second,
            "device": "cpu",
            "step": second,
            "wall_ms": 1000.0,
        }
        for second in range(5, 40)
    ]
    event = {
        "kind": "event",
        "time_s": START_S + 1,
        "event": "compile",
        "text": "f",
        "device": None,
    }
    text = "".join(json.dumps(row) + "\n" for row in [event, *steps])
    (folder / "signal.jsonl").write_text(text)
    page = report(folder, tmp_path)
    assert page.figure["data"][0]["x"][:2] == [4, 5]
    assert "0.00 compile f" in page.text


def storm(path: Path) -> Path:
    """What watching a program on the CPU records of its compiles: no step, no device memory."""
    text = "`loss` (a.py:3): limit of 8 reached, new cases run uncompiled"
    events = [
        ("recompile", second, f"`loss` (a.py:3): value of `k` changed from {second} to another")
        for second in range(1, 8)
    ]
    rows: list[Row] = [
        {"kind": "start", "format": 1, "time_s": START_S, "pid": 77, "program": "a.py"},
        *(
            {"kind": "event", "time_s": START_S + at, "event": kind, "device": None, "text": why}
            for kind, at, why in [*events, ("recompile_limit", 8.5, text)]
        ),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_fault_of_a_program_without_gpu_is_not_hidden(tmp_path: Path) -> None:
    page = report(storm(tmp_path / "signal.jsonl"), tmp_path)
    assert "Fault: the recompile limit was reached" in page.text
    assert 'class="verdict bad"' in page.html
    assert "No GPU memory to judge" not in page.text
    for said in ("cpu Memory no device memory", "Finding", "recompile_limit", "Do next"):
        assert said in page.text, said


def test_moments_of_events_alone_count_from_the_first(tmp_path: Path) -> None:
    page = report(storm(tmp_path / "signal.jsonl"), tmp_path)
    assert "0.00 recompile `loss`" in page.text
    assert "7.50 recompile limit `loss`" in page.text
    assert "7.5 s recorded" in page.text


def test_a_failed_run_says_how_it_failed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    failed = {"time_s": START_S + 99, "event": "failed", "error": "RunError: non-finite loss"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    assert "The run failed: RunError: non-finite loss" in report(folder, tmp_path).text


def test_where_a_report_may_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", without=["signal.jsonl"])
    out = tmp_path / "report.html"
    write_report(run, out)
    write_report(run, out)
    with pytest.raises(ConfigError, match="exists and is no report"):
        write_report(run, run / "config.yaml")
    assert "token_budget" in (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="is a directory"):
        write_report(run, tmp_path)
    with pytest.raises(ConfigError, match="no directory"):
        write_report(run, tmp_path / "nowhere" / "x.html")
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/null"), "a device")):
        with pytest.raises(ConfigError, match=f"is {kind}"):
            write_report(run, path)
    with pytest.raises(ConfigError, match="nothing"):
        write_report(tmp_path / "nothing", out)


def test_the_headline_is_of_the_device_that_the_verdict_speaks_of(tmp_path: Path) -> None:
    """Of two faulty devices the one with more faults is not the one that `line` names."""
    run = read_run([write_run(tmp_path / "a")])
    [seen] = run.trace.samples
    [known] = run.verdict.devices
    lost, again = (Cause(name, "high", "Because.", "mend it") for name in ("leak", "recompiling"))
    verdict = Verdict(
        (
            replace(known, device="0", causes=(lost,)),
            replace(known, device="1", causes=(again, lost)),
        )
    )
    trace = replace(run.trace, samples=(seen, replace(seen, device="1")))
    _, _, words = headline(replace(run, trace=trace, verdict=verdict))

    assert verdict.line.startswith(f"GPU {verdict.worst.device}: {verdict.worst.causes[0].cause}")
    assert verdict.worst.device == "0"
    assert words == "Fault: memory leaks"


def test_numbers_that_count_nothing_are_no_obstacle(tmp_path: Path) -> None:
    endless = 10**400

    def signal(row: Row) -> Row:
        if row["kind"] == "start":
            row["facts"] |= {"memory_bytes": endless, "gpus": [{"total_bytes": endless}]}
        return row

    def events(row: Row) -> Row:
        return row | {"seconds": endless, "compiled": [{"name": "x", "seconds": endless}]}

    run = write_run(tmp_path / "a", signal=signal, events=events)
    assert "Healthy: memory is flat" in report(run, tmp_path).text
    assert compare(run, run).findings == ()
