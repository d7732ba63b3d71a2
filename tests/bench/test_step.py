"""The bench of a step measures the trainer's own step, and its table says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftline.bench import step as bench_step
from draftline.bench.step import StepBench, StepTimes, kernel_group
from draftline.cli.app import app
from draftline.config.load import build_config
from draftline.errors import DeviceError, DraftlineError
from draftline.runtime.memory import MemoryChange
from draftline.train.step.step import TrainStep

TREE: dict[str, Any] = {
    "run": {"device": "cpu"},
    "target": {"tap_layers": [1, 2]},
    "drafter": {"layers": 1},
    "block_size": 4,
    "token_budget": 64,
    "max_anchors": 8,
    "data": {"train": ["builtin:demo-train"], "max_length": 32},
    "train": {"steps": 5},
}


def tree(target: Path) -> dict[str, Any]:
    return {**TREE, "target": {**TREE["target"], "path": str(target)}}


def test_every_step_is_staged_trained_and_updated(
    target_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("stage", "gradients", "update"):
        plain = getattr(TrainStep, name)

        def counted(self: TrainStep, *given: Any, name: str = name, plain: Any = plain) -> None:
            calls.append(name)
            plain(self, *given)

        monkeypatch.setattr(TrainStep, name, counted)
    config = build_config(tree(target_dir("llama")), [])
    found = bench_step.bench_step(config, steps=3, profile=False)
    assert calls == ["stage", "gradients", "update"] * (1 + 3)
    assert (found.rows, found.context) == (32, 64)
    assert found.captured is None, "there are no graphs on a CPU"
    assert found.compiled.least_ms <= found.compiled.median_ms <= found.compiled.most_ms
    assert found.lines()[2].split()[0] == "eager"


def test_another_gpu_than_the_first_is_timed_on_its_own_stream(
    target_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued on cuda:1 is no work of cuda:0's stream, whose events would time nothing."""
    current: list[object] = []

    @contextmanager
    def enter(what: object) -> Iterator[None]:
        current.append(what)
        yield
        current.pop()

    def build(*_: object) -> None:
        assert current == [torch.device("cuda", 1), None]
        raise DeviceError("seen")

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(bench_step, "pick_device", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(bench_step, "_build", build)
    with pytest.raises(DeviceError, match="seen"):
        bench_step.bench_step(build_config(tree(target_dir("llama")), []), steps=1, profile=False)


def test_the_command_prints_json_and_refuses_a_target_without_a_config(
    target_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(tree(target_dir("llama"))))
    done = CliRunner().invoke(app, ["bench", "step", str(config), "--steps", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rows"] == 32
    assert found["compiled"]["median_ms"] > 0
    assert "versions" in found["provenance"]
    config.write_text(json.dumps(tree(tmp_path)))
    done = CliRunner().invoke(app, ["bench", "step", str(config)])
    assert isinstance(done.exception, DraftlineError)
    assert "config.json" in str(done.exception)


def test_the_table_shows_both_modes_with_their_memory() -> None:
    def times(ms: float, calls: int) -> StepTimes:
        change = MemoryChange("cuda:0", 3 * 2**30, 2 * 2**20, calls, 0, 0)
        return StepTimes(ms, ms - 1, ms - 2, ms + 2, change, 2**30)

    bench = StepBench(
        device="a GPU",
        rows=1000,
        context=500,
        parameters=7_000_000,
        warm_s=30.0,
        floor_ms=5.0,
        compiled=times(20.0, 50),
        captured=times(10.0, 0),
        steps=40,
        groups={"matrix products": 6.0},
        kernels=[],
    )
    lines = bench.lines()
    assert lines[2].split() == ["compiled", "20.0", "19.0", "22.0", "50000", "3.00", "2", "5"]
    assert lines[3].split() == ["captured", "10.0", "9.0", "12.0", "100000", "3.00", "2", "0"]
    assert lines[4].endswith("matrix products 6.0")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "matrix products"),
        ("triton_tem_fused_flex_attention_backward_transpose_view_5", "flex backward"),
        ("triton_tem_fused_flex_attention_7", "flex forward"),
        ("triton_poi_fused__to_copy_abs_add_div_eq_lerp_mul_ne_rsub_sqrt_sub_5", "optimizer"),
        ("triton_red_fused__fused_rms_norm_14", "fused reductions"),
        ("triton_poi_fused_mul_silu_15", "fused pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1>", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name: str, group: str) -> None:
    assert kernel_group(name) == group
