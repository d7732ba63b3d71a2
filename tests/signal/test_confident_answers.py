"""Files that once got a confident wrong answer: what is said of them now."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftline.errors import ConfigError
from draftline.signal.judge.verdict import Verdict, judge, report_lines
from draftline.signal.readers.read import read_trace

MIB = 1 << 20


def of(path: Path, text: str, name: str = "a.csv") -> Verdict:
    file = path / name
    file.write_text(text)
    return judge(read_trace([file]))


def query(times: np.ndarray, used: np.ndarray, header: str = "memory.used [MiB]") -> str:
    rows = (f"{1.7e9 + t:.3f}, 0, {u:.3f}" for t, u in zip(times, used, strict=True))
    return "\n".join([f"timestamp, index, {header}", *rows]) + "\n"


def steps(count: int, **columns: object) -> str:
    fixed = {"kind": "step", "device": "0", "wall_ms": 120.0, "frames": 12, "compiles": 12}
    rows = []
    for n in range(count):
        own = {k: float(np.asarray(v).flat[n % np.size(v)]) for k, v in columns.items()}
        rows.append(json.dumps({**fixed, "step": n, "time_s": 1.7e9 + 0.12 * n, **own}))
    return "\n".join(rows) + "\n"


def causes(verdict: Verdict) -> list[str]:
    return [cause.cause for cause in verdict.devices[0].causes]


def test_a_gap_between_two_jobs_is_no_observed_time(tmp_path: Path) -> None:
    job = np.r_[np.linspace(1386, 2244, 38), np.full(12, 6.0)]
    times = np.r_[np.arange(50.0), 6600 + np.arange(50.0)]
    verdict = of(tmp_path, query(times, np.r_[job, job]))
    words = verdict.devices[0].words
    assert verdict.exit_code == 3
    assert "2 separate runs" in words
    assert "858 MiB" in words
    assert "nothing is known of 6,551 s" in words


def test_gaps_in_a_flat_run_are_left_out_of_its_length(tmp_path: Path) -> None:
    times = np.r_[np.arange(60.0), 400 + np.arange(60.0), 900 + np.arange(60.0)]
    flat = of(tmp_path, query(times, np.full(180, 5000.0)))
    assert flat.verdict == "flat"
    assert sum(p.seconds for p in flat.devices[0].phases if p.name == "run") == pytest.approx(177)
    higher = of(tmp_path, query(times, np.repeat([5000.0, 5000.0, 5600.0], 60)))
    assert higher.exit_code == 4
    assert "600 MiB more" in higher.devices[0].words


def test_a_gap_inside_a_rise_is_a_rise(tmp_path: Path) -> None:
    times = np.r_[np.arange(60.0), 200 + np.arange(60.0)]
    assert of(tmp_path, query(times, 5000 + 10 * times)).exit_code == 3


@pytest.mark.parametrize(
    ("header", "scale"),
    [
        ("memory.used [GiB]", 1024), ("memory.used [GB]", 1024), ("memory.used[MiB]", 1),
        ("memory.used (KiB)", 1 / 1024), ("memory_used_bytes", 1 / MIB), ("memory.used [bytes]", 1 / MIB),
    ],
)  # fmt: skip
def test_units_of_headers(tmp_path: Path, header: str, scale: float) -> None:
    times = np.arange(200.0)
    verdict = of(tmp_path, query(times, (10240 + 51.2 * times) / scale, header))
    assert verdict.devices[0].shape == "slope"
    assert verdict.devices[0].level.startswith("from 10,2")
    assert verdict.devices[0].level.endswith("to 20,378 MiB")


def test_a_unit_that_is_none_of_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no unit of memory"):
        of(tmp_path, query(np.arange(50.0), np.full(50, 9.0), "memory.used [%]"))


def test_a_total_tells_the_unit(tmp_path: Path) -> None:
    rows = [f"{1.7e9 + n}, 0, {10 + n / 20:.2f}, 80.0" for n in range(200)]
    text = "\n".join(["timestamp, index, memory.used, memory.total", *rows]) + "\n"
    verdict = of(tmp_path, text)
    assert verdict.devices[0].shape == "slope"
    assert any("taken as GiB" in note for note in verdict.notes)


def counters(used: np.ndarray, held: np.ndarray, names: tuple[str, str]) -> str:
    rows = zip(used.tolist(), held.tolist(), strict=True)
    return "\n".join(
        json.dumps({"step": n, names[0]: u, names[1]: h, "t": 1.7e9 + n / 5})
        for n, (u, h) in enumerate(rows)
    )


def test_counters_in_another_unit(tmp_path: Path) -> None:
    n = np.arange(300)
    plain = ("allocated", "reserved")
    assert causes(of(tmp_path, counters(8000 + 2 * n, 22000 + 2 * n, plain), "a")) == ["leak"]
    named = ("allocated_gb", "reserved_gb")
    assert causes(of(tmp_path, counters(8 + n / 500, 22.0 + 0 * n, named), "b")) == ["leak"]
    with pytest.raises(ConfigError, match="reserved is 22"):
        of(tmp_path, counters(8 + n / 500, 22.0 + 0 * n, plain), "c")
    with pytest.raises(ConfigError, match="reserved_bytes of at most 22,000"):
        of(tmp_path, counters(8000 + n, 22000 + 0 * n, ("allocated_bytes", "reserved_bytes")), "d")


def test_a_column_that_contradicts_itself_names_no_device(tmp_path: Path) -> None:
    rows = [f"{1.7e9 + n}, 0, {g}, {5000 + g}, 4{g}" for n in range(40) for g in range(4)]
    text = "\n".join(["timestamp, index, gpu_id, memory.used, temperature.gpu", *rows]) + "\n"
    assert [d.device for d in of(tmp_path, text).devices] == ["0", "1", "2", "3"]


def test_a_temperature_is_no_device(tmp_path: Path) -> None:
    rows = [
        f"{1.7e9 + n}, {5000 + g} MiB, 46068 MiB, {t}"
        for n in range(40)
        for g, t in enumerate((32, 24, 25, 22))
    ]
    assert [d.device for d in of(tmp_path, "\n".join(rows) + "\n").devices] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_leak_under_noise_is_one_and_noise_is_none(tmp_path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(8000, 40, 2400) * MIB
    quiet = {"reserved_bytes": 22000 * MIB, "peak_bytes": 20000 * MIB}
    assert "leak" not in causes(of(tmp_path, steps(2400, allocated_bytes=noise, **quiet), "a"))
    leaking = noise + np.linspace(0, 600, 2400) * MIB
    assert "leak" in causes(of(tmp_path, steps(2400, allocated_bytes=leaking, **quiet), "b"))
    batches = noise + 300 * MIB * (np.arange(2400) % 9)
    assert "leak" not in causes(of(tmp_path, steps(2400, allocated_bytes=batches, **quiet), "c"))


def test_the_largest_step_so_far_is_no_endless_growth(tmp_path: Path) -> None:
    peak = np.random.default_rng(5).gamma(4.0, 900, 3000).astype(int)
    held = (np.maximum.accumulate(peak) + 1000) // 2 * 2
    own = {"allocated_bytes": 900 * MIB, "inactive_bytes": 90 * MIB}
    verdict = of(
        tmp_path, steps(3000, peak_bytes=peak * MIB, reserved_bytes=held * MIB, **own), "a"
    )
    assert causes(verdict) == ["largest_so_far"]
    larger = peak // 20 + np.arange(3000)
    held = (np.maximum.accumulate(larger) + 1000) // 2 * 2
    text = steps(3000, peak_bytes=larger * MIB, reserved_bytes=held * MIB, **own)
    assert "largest_so_far" not in causes(of(tmp_path, text, "b"))


def test_fragmentation_stands_before_the_retries_it_causes(tmp_path: Path) -> None:
    held = np.minimum(4500 + 44 * np.arange(200), 12420)
    text = steps(
        200, reserved_bytes=held * MIB, inactive_bytes=(held - 3300) * MIB, allocated_bytes=1062 * MIB,
        device_allocations=np.minimum(300 + np.arange(200), 480), retries=np.arange(200) > 190,
    )  # fmt: skip
    verdict = of(tmp_path, text)
    assert causes(verdict) == ["fragmentation", "allocator_retries"]
    assert "12.1 GiB reserved 1.0 are in use" in verdict.line


def test_the_process_that_grows_is_named(tmp_path: Path) -> None:
    rows = [
        f"2026/05/23 10:{n // 60:02}:{n % 60:02}.123, GPU-3f1c9a52, {pid}, {used} MiB"
        for n in range(240)
        for pid, used in ((111, 20000), (222, 5000 + 20 * n))
    ]
    text = "timestamp, gpu_uuid, pid, used_gpu_memory [MiB]\n" + "\n".join(rows) + "\n"
    said = of(tmp_path, text).line
    assert "process 222 grows by 20 MiB per second" in said
    assert "process 111 is flat at 20,000 MiB" in said


def test_an_idle_device_is_idle(tmp_path: Path) -> None:
    verdict = of(tmp_path, query(np.arange(60.0), np.full(60, 15.0)))
    assert (verdict.verdict, verdict.exit_code) == ("idle", 4)
    assert report_lines(verdict)[0].startswith("GPU 0: idle at 15 MiB")


def test_the_level_is_said(tmp_path: Path) -> None:
    verdict = of(tmp_path, query(np.arange(60.0), np.full(60, 8598.0)))
    assert report_lines(verdict)[0].startswith("GPU 0: flat at 8,598 MiB")
    assert "flat at 8,598 MiB" in verdict.line


def test_a_program_that_dies_in_its_first_step_is_not_called_uncompiled(tmp_path: Path) -> None:
    died = {"kind": "event", "time_s": 1.7e9, "event": "error", "text": "ValueError: shapes"}
    text = steps(1, frames=0, reserved_bytes=300 * MIB) + json.dumps(died) + "\n"
    assert causes(of(tmp_path, text)) == ["unknown"]


@pytest.mark.parametrize("how", ["killed", "exit", "captured"])
def test_a_program_that_ends_early_without_a_word_is_not_called_uncompiled(
    tmp_path: Path, how: str
) -> None:
    expects = ["captured", "compiled"] if how == "captured" else ["compiled"]
    start = {"kind": "start", "time_s": 1.7e9 - 3, "pid": 5, "program": "t.py", "expects": expects}
    count = 2 if how == "exit" else 1
    text = json.dumps(start) + "\n" + steps(count, frames=0, compiles=0, allocator_calls=700)
    assert causes(of(tmp_path, text)) == ["unknown"]


def test_what_ended_a_program_in_its_first_step_is_said_without_a_gpu(tmp_path: Path) -> None:
    start = {"kind": "start", "time_s": 1.7e9 - 3, "pid": 5, "expects": ["compiled"]}
    step = {
        "kind": "step",
        "device": "cpu",
        "step": 1,
        "time_s": 1.7e9,
        "wall_ms": 9.0,
        "frames": 0,
    }
    died = {"kind": "event", "time_s": 1.7e9, "event": "error", "text": "ValueError: shapes"}
    verdict = of(tmp_path, "\n".join(map(json.dumps, (start, step, died))) + "\n")
    assert causes(verdict) == ["unknown"]
    assert "ended early (ValueError: shapes)" in verdict.line


@pytest.mark.parametrize("seed", range(2))
def test_a_few_outliers_hide_no_leak(tmp_path: Path, seed: int) -> None:
    noise = 8000 + 60 * np.random.default_rng(seed).standard_t(2, 2400)
    held = {"reserved_bytes": 22000 * MIB}
    grown = (noise + np.linspace(0, 480, 2400)) * MIB
    assert causes(of(tmp_path, steps(2400, allocated_bytes=grown, **held), "a")) == ["leak"]
    assert causes(of(tmp_path, steps(2400, allocated_bytes=noise * MIB, **held), "b")) == [
        "healthy"
    ]


def test_what_swings_is_healthy_with_less_confidence_and_a_late_rise_is_unknown(
    tmp_path: Path,
) -> None:
    noise = np.random.default_rng(3).normal(8000, 40, 2400)
    held = {"reserved_bytes": 22000 * MIB}
    said = of(tmp_path, steps(2400, allocated_bytes=noise * MIB, **held), "a").devices[0].causes[0]
    assert (said.cause, said.confidence) == ("healthy", "medium")
    assert "a slow growth is not seen" in said.evidence
    late = (noise + np.maximum(np.linspace(-1200, 600, 2400), 0)) * MIB
    said = of(tmp_path, steps(2400, allocated_bytes=late, **held), "b").devices[0].causes[0]
    assert (said.cause, said.confidence) == ("unknown", "low")
    assert "a leak that began late" in said.evidence


def of_two(late_s: float, **names: object) -> str:
    """Lines of two processes in turn, of which the second leaks."""
    rows = [
        {"step": n, "t": 1.7e9 + n / 5 + rank * late_s, "reserved_mb": 20000,
         "allocated_mb": 9000 + 2 * n * rank} | dict.fromkeys(names, rank)
        for n in range(300) for rank in (0, 1)
    ]  # fmt: skip
    return "\n".join(map(json.dumps, sorted(rows, key=lambda row: row["t"]))) + "\n"


@pytest.mark.parametrize("name", ["rank", "local_rank", "gpu_id"])
def test_processes_in_one_file_are_told_apart_by_their_place(tmp_path: Path, name: str) -> None:
    devices = of(tmp_path, of_two(0.0, **{name: 0}), "a").devices
    assert [(d.device, d.causes[0].cause) for d in devices] == [("0", "healthy"), ("1", "leak")]


@pytest.mark.parametrize("late_s", [0.0, 0.004, 0.203])
def test_processes_that_nothing_tells_apart_are_refused(tmp_path: Path, late_s: float) -> None:
    with pytest.raises(ConfigError, match="of several processes: name the device"):
        of(tmp_path, of_two(late_s), "a")


def test_a_step_that_is_recorded_in_parts_is_of_one_process(tmp_path: Path) -> None:
    rows = [
        {
            "step": n // 2,
            "t": 1.7e9 + n / 5,
            "reserved_mb": 20000,
            "allocated_mb": 5000 + n % 2 * 40,
        }
        for n in range(300)
    ]
    assert causes(of(tmp_path, "\n".join(map(json.dumps, rows)), "a")) == ["healthy"]


def test_a_process_that_grows_into_what_another_gives_back_is_named(tmp_path: Path) -> None:
    rows = [
        f"2026/05/23 10:{n // 60:02}:{n % 60:02}.123, GPU-3f1c9a52, {pid}, {used} MiB"
        for n in range(200)
        for pid, used in ((111, 20000 - 10 * n), (222, 5000 + 10 * n))
    ]
    text = "timestamp, gpu_uuid, pid, used_gpu_memory [MiB]\n" + "\n".join(rows) + "\n"
    assert "process 222 grows by 10 MiB per second" in of(tmp_path, text).line


def test_prose_before_a_header_is_no_table(tmp_path: Path) -> None:
    text = "=== monitor ===\nfile: gpu.log\n\n" + query(np.arange(60.0), np.full(60, 8598.0))
    verdict = of(tmp_path, text)
    assert verdict.verdict == "flat"
    assert verdict.notes == ("2 line(s) could not be read",)
