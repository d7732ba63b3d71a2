import os
import time
from pathlib import Path

import pytest

from draftline.signal.live import outlets as module
from draftline.signal.live.foreign import Outlets
from draftline.signal.live.outlets import CompileLog

HEAD = "W1129 20:41:17.649000 26985 torch/_inductor/cudagraph_utils.py:380] [0/0] [__cudagraphs] "
SKIP = f"{HEAD}skipping cudagraphs due to cpu device\n"
METRICS = (
    "V1129 20:49:33.000000 29530 torch/_dynamo/utils.py:2009] "
    '{"compilation_metrics": {"duration_us": 1500000}, "frame_id": 0}\n'
)
CHATTER = "V1129 20:49:33.000000 29530 torch/_dynamo/utils.py:1] " + "x" * 900 + "\n"


def outlets(folder: Path, *, ours: bool = True) -> Outlets:
    return Outlets(folder / "torch.log", folder / "trace", ours, ours, {})


def append(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_events_come_from_the_log_and_from_each_trace(tmp_path: Path) -> None:
    log = CompileLog(outlets(tmp_path), 0.0)
    assert log.poll(time.time()) == []

    append(tmp_path / "torch.log", SKIP)
    append(tmp_path / "trace" / "dedicated_log_torch_trace_rank_0_a.log", METRICS)
    append(tmp_path / "trace" / "dedicated_log_torch_trace_rank_1_b.log", METRICS)
    events = log.finish(time.time())

    assert sorted((e.kind, e.text[-8:], e.seconds) for e in events) == [
        ("capture_skip", "u device", None),
        ("compile", "[rank 0]", 1.5),
        ("compile", "[rank 1]", 1.5),
    ]
    assert log.finish(time.time()) == []


def test_a_record_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    log = CompileLog(outlets(tmp_path), 0.0)
    first, second = SKIP[:40], SKIP[40:]

    append(tmp_path / "torch.log", first)
    assert log.poll(time.time()) == []
    append(tmp_path / "torch.log", second)
    found = log.poll(time.time()) + log.poll(time.time())

    assert [event.kind for event in found] == ["capture_skip"]


def test_of_the_users_files_only_what_is_new_is_read(tmp_path: Path) -> None:
    append(tmp_path / "torch.log", SKIP)
    append(tmp_path / "trace" / "old.log", METRICS)
    os.utime(tmp_path / "trace" / "old.log", (1.0, 1.0))
    log = CompileLog(outlets(tmp_path, ours=False), time.time())

    append(tmp_path / "torch.log", SKIP)
    append(tmp_path / "trace" / "new.log", METRICS)

    assert sorted(event.kind for event in log.finish(time.time())) == ["capture_skip", "compile"]


HEAD_V = "V1129 20:49:33.000000 29530 torch/_dynamo/guards.py:5400] [0/1] "
RECOMPILE = "".join(
    f"{HEAD_V}[__recompiles] {text}\n"
    for text in (
        "Recompiling function loss in /src/a.py:3",
        "    triggered by the following guard failure(s):",
        "    - 0/0: k == 0",
    )
)
TRACED = (
    f'{HEAD_V}{{"artifact": {{"name": "recompile_reasons"}}, "frame_id": 0}}\n\t0/0: k == 0\n'
    f'{HEAD_V}{{"dynamo_start": {{"stack": [{{"line": 3, "name": "loss"}}]}}, "frame_id": 0}}\n'
)


def test_a_recompile_in_log_and_trace_is_told_once(tmp_path: Path) -> None:
    log = CompileLog(outlets(tmp_path), 0.0)
    append(tmp_path / "torch.log", RECOMPILE)
    append(tmp_path / "trace" / "a.log", TRACED)

    [event] = log.finish(time.time())

    assert (event.kind, event.text[:6]) == ("recompile", "`loss`")


def test_without_a_trace_recompiles_come_from_the_log(tmp_path: Path) -> None:
    log = CompileLog(outlets(tmp_path), 0.0)
    append(tmp_path / "torch.log", RECOMPILE)

    assert [event.kind for event in log.finish(time.time())] == ["recompile"]


@pytest.mark.parametrize("ours", [True, False])
def test_only_our_own_files_are_kept_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    monkeypatch.setattr(module, "TRACE_BYTES", 1 << 16)
    log = CompileLog(outlets(tmp_path, ours=ours), 0.0)
    path = tmp_path / "trace" / "a.log"
    append(path, CHATTER * 2000)
    full = os.stat(path).st_blocks

    log.poll(time.time())

    if log.notes:
        pytest.skip("this file system has no holes")
    assert (os.stat(path).st_blocks < full / 4) == ours
    append(path, METRICS)
    assert [event.kind for event in log.finish(time.time())] == ["compile"]


def test_a_file_system_without_holes_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRACE_BYTES", 1 << 16)
    monkeypatch.setattr(module.GrowingFile, "release", lambda _file, _keep: False)
    log = CompileLog(outlets(tmp_path), 0.0)
    for name in ("a.log", "b.log"):
        append(tmp_path / "trace" / name, CHATTER * 100)

    log.finish(time.time())

    assert len(log.notes) == 1
    assert "cannot be kept short" in log.notes[0]
