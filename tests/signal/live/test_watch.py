import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftline.errors import ConfigError
from draftline.signal.live import run_feed, watch
from draftline.signal.live.run_feed import RunFeed
from draftline.signal.live.watch import follow, watch_command, watch_pid, watch_run
from draftline.signal.readers import recording as recording_reader
from draftline.signal.readers.tail import GrowingFile


def recording(path: Path, levels_gib: list[float], pid: int = 1) -> Path:
    start = {
        "kind": "start",
        "format": 1,
        "time_s": 1.8e9,
        "pid": pid,
        "program": "train.py",
        "expects": [],
    }
    rows = [
        {
            "kind": "device",
            "time_s": 1.8e9 + n / 5,
            "device": "0",
            "used_bytes": int(level * 2**30),
            "total_bytes": 141 << 30,
            "util_pct": 90.0,
        }
        for n, level in enumerate(levels_gib)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [start, *rows]))
    return path


FLAT = [0.5] * 10 + [70.0] * 200
CLIMBING = [0.5] * 10 + [50 + n / 20 for n in range(400)]


@pytest.mark.parametrize(("levels", "code"), [(FLAT, 0), (CLIMBING, 3)])
def test_a_snapshot_of_a_run_has_its_memory_and_an_exit_code(
    tmp_path: Path, levels: list[float], code: int
) -> None:
    recording(tmp_path / "run" / "signal.jsonl", levels)
    out = io.StringIO()

    assert watch_run(tmp_path / "run", once=True, out=out) == code
    assert f"{levels[-1]:.2f}/141 GiB" in out.getvalue()
    assert out.getvalue().startswith("train.py: ")


class SlowFile(GrowingFile):
    """A file of which a reader gets some hundred lines each time."""

    def lines(self, most_bytes: int = 16 << 20) -> list[str]:
        return super().lines(min(most_bytes, 32 << 10))


@pytest.mark.parametrize("once", [True, False])
def test_a_long_recording_is_read_to_its_end_before_it_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    monkeypatch.setattr(recording_reader, "GrowingFile", SlowFile)
    monkeypatch.setattr(run_feed, "_CATCH_UP_S", 0.0)
    levels = [*FLAT, *FLAT[10:], *(70 + n / 20 for n in range(400))]
    recording(tmp_path / "signal.jsonl", levels)
    (tmp_path / "events.jsonl").write_text(json.dumps({"time_s": 1.9e9, "event": "end"}) + "\n")
    out, pauses = io.StringIO(), []

    code = follow(RunFeed(tmp_path), out, 0.0 if once else None, pauses.append)

    assert code == 3
    assert pauses == []
    assert "flat" not in out.getvalue()  # as its first part is
    assert f"{levels[-1]:.2f}/141 GiB" in out.getvalue().splitlines()[-2]


def test_a_run_is_followed_until_it_ends(tmp_path: Path) -> None:
    path = recording(tmp_path / "signal.jsonl", FLAT, os.getpid())
    out, pauses = io.StringIO(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        line = {"kind": "event", "time_s": time.time(), "event": "oom", "text": "no room"}
        end = {"kind": "phase", "time_s": time.time(), "phase": "end"}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n" + (json.dumps(end) + "\n" if pauses[2:] else ""))

    assert follow(RunFeed(path), out, None, pause) == 3
    told = out.getvalue().splitlines()
    assert len(pauses) == 3
    assert sum("out of memory: no room" in line for line in told) >= 3
    assert any(line == "train.py: the program has ended" for line in told)


def test_ctrl_c_ends_the_view_with_a_summary(tmp_path: Path) -> None:
    path = recording(tmp_path / "signal.jsonl", FLAT, os.getpid())
    feed, out = RunFeed(path), io.StringIO()
    feed.ended = lambda _now_s: None  # type: ignore[method-assign]

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    assert follow(feed, out, None, interrupt) == 0
    assert "train.py: no longer watched" in out.getvalue()


class Closing(io.StringIO):
    """Ends a program that reads its input as soon as something is written here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self.process = process

    def write(self, text: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return super().write(text)


def test_a_process_is_watched_until_it_ends(tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("it runs\n")
    assert process.stdout.readline() == "it runs\n"
    out = Closing(process)
    code = watch_pid(process.pid, directory=tmp_path / "out", out=out)
    process.stdout.close()
    process.wait()

    assert code == 0
    assert "cat: the process has ended" in out.getvalue()
    unseen, last = out.getvalue().splitlines()[-2:]
    assert unseen.startswith("not seen from outside: compiles, steps, memory requests")
    assert last == "nothing that could be diagnosed was recorded"
    first = json.loads((tmp_path / "out" / "signal.jsonl").read_text().splitlines()[0])
    assert first["pid"] == process.pid


def test_a_process_of_another_user_is_watched_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "environ_of", lambda _pid: None)
    monkeypatch.setattr(watch, "_SNAPSHOT_S", 0.0)
    out = io.StringIO()

    watch_pid(os.getpid(), directory=tmp_path / "out", once=True, out=out)

    assert f"process {os.getpid()} belongs to another user" in out.getvalue()


def test_a_process_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such process is visible"):
        watch_pid(2**22 + 1, directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`watch_command` of a Python script in a process of its own, since it takes over signals."""
    call = (
        "import os, sys\nfrom pathlib import Path\nfrom draftline.signal.live.watch import watch_command\n"
        "os.environ['TQDM_DISABLE'] = '1'\n"
        "command = [sys.executable, '-c', sys.argv[1], *sys.argv[3:]]\n"
        "sys.exit(watch_command(command, directory=Path(sys.argv[2])))"
    )
    return subprocess.run(
        [sys.executable, "-c", call, script, str(tmp_path / "out"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )


STORM = """
import sys, torch
@torch.compile(backend="eager", dynamic=False)
def loss(x, scale):
    return (x * scale).sum()
for step in range(4):
    print(step, float(loss(torch.ones(2), step)), file=sys.stdout)
sys.exit(9)
"""


def test_a_foreign_program_that_compiles_again_and_again_is_found_out(tmp_path: Path) -> None:
    done = run(tmp_path, STORM)

    assert done.returncode == 9
    assert done.stdout == "0 0.0\n1 2.0\n2 4.0\n3 6.0\n"
    assert "value of `scale` keeps growing: 0, 1, 2, now another" in done.stderr
    assert "4 compiles in" in done.stderr
    assert "ended with exit code 9" in done.stderr
    unseen, last = done.stderr.splitlines()[-2:]
    assert unseen.startswith("not seen from outside: steps, memory requests")
    assert last == "recorded: draftline diagnose out"
    assert "__recompiles" not in done.stderr  # PyTorch's own words would be the program's output
    told = [json.loads(x) for x in (tmp_path / "out" / "signal.jsonl").read_text().splitlines()]
    assert sum(row.get("event") == "recompile" for row in told) == 3


def test_what_the_watcher_sets_for_itself_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)  # other tests run commands in this process
    done = run(
        tmp_path, "import os; print(os.environ.get('TQDM_DISABLE'), len(os.environ['PATH']))"
    )

    assert done.stdout == f"None {len(os.environ['PATH'])}\n"


def test_a_program_that_ends_at_once_has_its_exit_code(tmp_path: Path) -> None:
    done = run(tmp_path, "raise SystemExit(4)")

    assert done.returncode == 4
    assert done.stderr.splitlines()[-1] == "nothing that could be diagnosed was recorded"


def test_a_directory_that_cannot_be_made_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the directory should be")

    with pytest.raises(ConfigError, match="cannot be made"):
        watch_command(["touch", str(tmp_path / "started")], directory=tmp_path / "out")
    assert not (tmp_path / "started").exists()


def test_a_watcher_that_fails_waits_for_the_program(tmp_path: Path) -> None:
    (tmp_path / "out" / "signal.jsonl").mkdir(parents=True)

    done = run(tmp_path, "print('worked'); raise SystemExit(6)")

    assert done.returncode == 6
    assert done.stdout == "worked\n"
    assert "watching stopped, the program goes on: ConfigError" in done.stderr


SECRETS = ("--hf-token", "hf_abc", "api_key=sk-abc")


def test_secrets_of_a_command_are_neither_recorded_nor_shown(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys; print(sys.argv[1:])", *SECRETS)

    assert done.stdout == f"{list(SECRETS)}\n"
    told = done.stderr + (tmp_path / "out" / "signal.jsonl").read_text()
    assert "--hf-token ... api_key=..." in told
    assert "abc" not in told


def test_secrets_of_a_process_are_neither_recorded_nor_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SNAPSHOT_S", 0.0)
    script = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *SECRETS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        out = io.StringIO()
        watch_pid(process.pid, directory=tmp_path / "out", once=True, out=out)
        process.communicate(b"\n")

    told = out.getvalue() + (tmp_path / "out" / "signal.jsonl").read_text()
    assert "--hf-token ... api_key=..." in told
    assert "abc" not in told
