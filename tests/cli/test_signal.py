"""diagnose, watch, diff and report as a user types them: output, exit codes, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.cli.app import main

TRACES = Path(__file__).parents[1] / "data" / "traces"
GRAPH = TRACES / "graph.steps.jsonl.gz"
GRAPH_SMI = TRACES / "graph.nvidia-smi.csv.gz"
LEAK = TRACES / "leak.steps.jsonl.gz"
LEAK_SMI = TRACES / "leak.nvidia-smi.csv.gz"
EAGER = TRACES / "eager_flex.steps.jsonl.gz"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit code, stdout and stderr of `draftline ARGUMENTS`, those of its children included."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftline", *(str(a) for a in arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("files", "code", "shape", "cause"),
    [
        ([GRAPH], 0, "flat", "healthy"),
        ([GRAPH, GRAPH_SMI], 0, "flat", "healthy"),
        ([GRAPH_SMI], 0, "flat", "unknown"),
        ([LEAK, LEAK_SMI], 3, "slope", "leak"),
        ([LEAK_SMI], 3, "slope", "unknown"),
        ([EAGER], 3, "flat", "not_compiled"),
    ],
)
def test_diagnose_says_shape_and_cause_and_exits_accordingly(
    run: Run, files: list[Path], code: int, shape: str, cause: str
) -> None:
    got, out, _ = run("diagnose", *files, "--json")
    found = json.loads(out)
    [device] = found["devices"]
    assert (got, device["shape"], device["causes"][0]["cause"]) == (code, shape, cause)
    assert set(device["causes"][0]) == {"cause", "confidence", "evidence", "action"}
    assert found["verdict"]


def test_diagnose_tells_a_person_what_to_do(run: Run) -> None:
    code, out, _ = run("diagnose", LEAK)
    assert code == 3
    assert "GPU 0: slope" in out
    assert "grows by 32.25 MiB per step" in out
    assert "next: look for tensors kept across steps" in out


def test_a_recording_too_short_to_tell_exits_with_4(run: Run, tmp_path: Path) -> None:
    short = tmp_path / "short.csv"
    rows = [f"2026/11/29 13:00:0{i}.000, 0, 1000 MiB, 5 %" for i in range(4)]
    header = "timestamp, index, memory.used [MiB], utilization.gpu [%]"
    short.write_text("\n".join([header, *rows]) + "\n")
    code, out, _ = run("diagnose", short)
    assert code == 4
    assert "only 2 readings in the steady state" in out


def test_a_file_of_no_known_kind_is_a_users_fault(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "x.txt"
    bad.write_text("hello\n")
    code, _, err = run("diagnose", bad)
    assert code == 2
    assert "nvidia-smi" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["watch"], "and none came"),
        (["watch", TRACES, "--pid", "1"], "RUN and --pid came"),
        (["watch", "python", "train.py"], "a command stands behind --"),
        (["watch", "--once", "--", "true"], "a command is watched until it ends"),
        (["watch", "--"], "nothing stands behind --"),
        (["watch", TRACES, "--out", "x"], "a RUN has its recording already"),
        (["watch", "--", "no-such-program-here"], "no-such-program-here"),
        (["watch", "no-such-run"], "is not there"),
        (["watch", "--once", LEAK], "draftline diagnose reads other files"),
    ],
)
def test_watch_refuses_what_it_cannot_watch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert said in err


def test_a_watched_command_keeps_its_arguments_output_and_exit_code(
    run: Run, tmp_path: Path
) -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit(7)"
    code, out, err = run(
        "watch",
        "--out",
        tmp_path / "seen",
        "--",
        sys.executable,
        "-c",
        program,
        "--once",
        "--",
        "x",
    )
    assert code == 7
    assert out == "['--once', '--', 'x']\n"
    assert "ended with exit code 7" in err
    assert (tmp_path / "seen" / "signal.jsonl").exists()


def test_diff_names_what_explains_the_memory(run: Run) -> None:
    code, out, _ = run("diff", GRAPH, LEAK)
    assert code == 0
    assert "healthy" in out
    assert "leak" in out
    code, out, _ = run("diff", GRAPH, LEAK, "--json")
    assert json.loads(out)["memory_differs"] is True


def test_report_is_one_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    code, out, _ = run("report", LEAK, LEAK_SMI, "-o", page)
    assert (code, out) == (0, f"wrote {page}\n")
    text = page.read_text()
    assert "leak" in text
    assert 'src="http' not in text
    assert '<link rel="stylesheet"' not in text


def test_an_archive_of_several_runs_is_not_read_as_one(run: Run) -> None:
    archive = Path(__file__).parents[1] / "data" / "faults" / "corpus.tar.xz"
    code, _, err = run("diagnose", archive)
    assert code == 2
    assert "tar archive" in err


def test_a_file_without_memory_is_told_what_it_lacks(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "util.csv"
    rows = [f"2026/11/29 13:00:{i:02d}.000, 0, 50 %" for i in range(40)]
    file.write_text("\n".join(["timestamp, index, utilization.gpu [%]", *rows]) + "\n")
    code, out, _ = run("diagnose", file)
    assert code == 4
    assert "no memory in use (memory.used)" in out


def test_diagnose_leaves_the_collector_on_and_numpy_without_threads() -> None:
    """In a process of its own, which has imported nothing yet."""
    code = (
        "import gc, os, sys\n"
        "from draftline.cli.signal import diagnose_command\n"
        "try:\n    diagnose_command([])\n"
        "except Exception: pass\n"
        "print('numpy' in sys.modules, gc.isenabled(), os.environ['OPENBLAS_NUM_THREADS'])"
    )
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["True", "True", "1"], done.stderr
