import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftline.signal.draftline_run import Pace, pace_of
from draftline.signal.live.alerts import Alert
from draftline.signal.live.view import (
    DeviceRow,
    View,
    device_line,
    device_rows,
    lines,
    plain,
    rate,
    sparkline,
)
from draftline.signal.trace import Samples, Steps, Trace

GIB = 2.0**30


def row(values_gib: list[float], name: str = "0", **options: float | str | None) -> DeviceRow:
    time_s = np.arange(len(values_gib), dtype=float)
    values = np.array(values_gib) * GIB
    return DeviceRow(name, time_s, values, total_bytes=141 * GIB, **options)  # type: ignore[arg-type]


def test_a_curve_runs_from_its_lowest_to_its_highest_value() -> None:
    ramp = np.linspace(0, 70 * GIB, 200)

    assert sparkline(np.arange(200.0), ramp, 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.arange(200.0), ramp, 8, "_.-~=+*#") == "_.-~=+*#"


def test_a_flat_curve_is_a_line_and_a_spike_stands_out() -> None:
    flat = np.full(100, 70 * GIB)
    flat[::2] += 2**20  # readings of a still device differ by a MiB
    assert len(set(sparkline(np.arange(100.0), flat, 20))) == 1

    flat[50] = 80 * GIB
    assert sparkline(np.arange(100.0), flat, 20).count("█") == 1


def test_an_old_part_and_an_unknown_start_are_not_drawn() -> None:
    values = np.full(1000, 5.0 * GIB)
    values[:600] = 50 * GIB  # more than five minutes ago
    assert len(set(sparkline(np.arange(1000.0), values, 10))) == 1

    values[:850] = np.nan
    assert sparkline(np.arange(1000.0), values, 10).startswith("   ")


@given(st.lists(st.floats(0, 2e11) | st.just(float("nan")), max_size=60), st.integers(0, 130))
def test_any_curve_has_the_width_asked_for(values: list[float], width: int) -> None:
    drawn = sparkline(np.arange(float(len(values))), np.array(values), width)

    assert len(drawn) == (width if values else 0)


@given(st.integers(20, 200), st.sampled_from([None, 3.0]), st.sampled_from(["flat", "staircase"]))
def test_a_device_fits_its_line(width: int, reserved: float | None, shape: str) -> None:
    held = None if reserved is None else reserved * GIB
    line = plain(
        device_line(row([1.0, 70.5], reserved_bytes=held, util_pct=97.0, shape=shape), width)
    )

    assert line.startswith("GPU 0")
    assert "70.50/141 GiB" in line
    assert line.endswith(shape)
    assert len(line) <= max(width, 44)


def test_a_wide_terminal_shows_more_of_a_device() -> None:
    device = row([1.0, 70.5], reserved_bytes=60 * GIB, util_pct=97.0, shape="flat")

    wide, narrow = plain(device_line(device, 119)), plain(device_line(device, 60))

    assert all(part in wide for part in ("min 1.00 max 70.50", "reserved 60.00", "util 97 %"))
    assert "util" not in narrow


def test_no_line_is_longer_than_the_terminal_or_holds_control_characters() -> None:
    view = View(
        title="python train.py\x1b[2J --" + "x" * 300,
        state="watched for 3 s",
        devices=[row([1.0, 2.0])],
        rate="step 3" * 40,
        compiles="3 compiles" * 40,
        verdict="GPU 0: memory is flat " * 40,
        alerts=[Alert("oom", "text\nwith a \x07 bell" * 30, 0.0, 0.0)],
        notes=["note" * 100],
    )

    for width in (60, 80, 120):
        drawn = [plain(line) for line in lines(view, width)]
        assert max(map(len, drawn)) <= width
        assert all(line.isprintable() for line in drawn)
        assert sum(line.startswith("verdict") for line in drawn) == 1
        assert drawn[-1].endswith("…")
    assert all(plain(line).isascii() for line in lines(view, 80, ascii_only=True))


def test_a_view_without_devices_says_why() -> None:
    drawn = [plain(line) for line in lines(View("t", "s", no_devices="not sampled: no driver"), 80)]

    assert drawn == [
        "t" + " " * 78 + "s",
        "memory  not sampled: no driver",
        "verdict no verdict yet",
    ]


def test_the_allocator_stands_in_where_the_driver_is_not_asked() -> None:
    time_s = np.arange(3.0)
    held = {"reserved_bytes": np.array([1.0, 2.0, 3.0]) * GIB}
    steps = Steps("1", time_s, time_s, np.full(3, 10.0), held)
    seen = Samples("0", time_s, np.full(3, 5 * GIB), np.full(3, np.nan), 141 * GIB)

    first, second = device_rows(Trace(samples=(seen,), steps=(steps,)), {"0": "flat"})

    assert (first.name, first.shape, first.util_pct) == ("0", "flat", None)
    assert (second.name, second.shape, second.reserved_bytes) == ("1", "?", 3 * GIB)


def test_the_rate_comes_from_metrics_else_from_steps() -> None:
    time_s = np.arange(100.0)
    wall_ms = np.full(100, 200.0)
    steps = Steps("0", time_s, time_s, wall_ms, {"tokens": np.full(100, 4096.0)})
    row = {"step": 8, "step_ms": 41.25, "tokens_per_s": 99410.0, "targets_waited_pct": 3.2}

    assert rate(Trace(), Pace()) is None
    assert rate(Trace(steps=(steps,)), Pace()) == "step 99, 200.0 ms per step, 20,480 tokens/s"
    assert rate(Trace(steps=(steps,)), pace_of(row)) == (
        "step 8, 41.2 ms per step, 99,410 tokens/s, waiting: targets 3 %"
    )
