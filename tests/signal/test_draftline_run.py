"""What draftline's own training writes is known in one place."""

from __future__ import annotations

import re
from pathlib import Path

from draftline import signal
from draftline.signal.draftline_run import Pace, ending_of, events_of, files_of, pace_of

_NAMES = re.compile(
    r"events\.jsonl|\"(?:step_ms|tokens_per_s|rows_per_s|sealed|reserved_gib)\"|_waited_pct"
)


def test_only_one_file_of_those_that_read_judge_and_watch_knows_its_names() -> None:
    home = Path(signal.__file__).parent
    told = {
        str(path.relative_to(home))
        for room in (".", "judge", "live", "readers", "recorder")
        for path in (home / room).glob("*.py")
        for line in path.read_text().splitlines()
        if _NAMES.search(line.partition('"""')[0])
    }
    assert told == {"draftline_run.py"}


def test_recordings_come_before_logs(tmp_path: Path) -> None:
    for name in (
        "events.jsonl",
        "metrics.jsonl.gz",
        "signal.jsonl",
        "signal-rank1.jsonl",
        "x.jsonl",
    ):
        (tmp_path / name).touch()
    names = [path.name for path in files_of(tmp_path)]
    assert names == ["signal-rank1.jsonl", "signal.jsonl", "events.jsonl", "metrics.jsonl.gz"]
    assert "metrics.jsonl.gz" not in {path.name for path in files_of(tmp_path, packed=False)}


def test_events_and_metrics_in_words() -> None:
    assert events_of({"event": "failed", "error": "CUDA out of memory"})[0][0] == "oom"
    assert events_of({"event": "checkpoint"}) == [("phase", "checkpoint"), ("phase", "run")]
    endings = [ending_of({"event": name}) for name in ("start", "end", "choice")]
    assert endings == ["", "the run has ended", None]
    assert pace_of({"step": 3, "step_ms": -1, "drafters_waited_pct": 5}) == Pace(
        3.0, waited_pct={"drafters": 5.0}
    )
