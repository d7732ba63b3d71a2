"""How near a whole run comes to its slower side: targets and drafters alone, then together.

The target has the shapes of the configuration and random weights; conversations are random tokens
of data.max_length. The run is `train` itself, checkpoint and log included.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftline.bench.step import bench_step
from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.data.store import Sample, Samples
from draftline.errors import ConfigError
from draftline.model.drafter.init import build_shape
from draftline.model.target.facts import TargetFacts
from draftline.model.target.target import Target
from draftline.runtime.devices import synchronize, visible_devices
from draftline.train.loop import train
from draftline.train.plan.inputs import Inputs, epoch_packs, open_facts
from draftline.train.plan.placement import Placement, device_type, place
from draftline.train.plan.start import feature_worker

_ALONE_PACKS = 6
# Of a run's metrics the first lines still hold the filling of the rings.
_SETTLED = 2


@dataclass(frozen=True, slots=True)
class PipelineBench:
    """Milliseconds per pack: of one target and of one drafter alone, of the side that is slower as a
    whole, and of the run. `memory` is the allocators' change from the seal to the end."""

    placement: str
    target_ms: float
    drafter_ms: float
    slower_ms: float
    run_ms: float
    steps: int
    rows_per_s: float
    tokens_per_s: float
    targets_waited_pct: float
    drafters_waited_pct: float
    memory: list[dict[str, Any]]

    @property
    def efficiency_pct(self) -> float:
        return 100 * self.slower_ms / self.run_ms

    def lines(self) -> list[str]:
        flat = "; ".join(
            f"{m['device']} {m['reserved_bytes'] / 2**30:.2f} GiB, "
            f"{m['reserved_change_bytes'] / 2**20:+.1f} MiB, {m['allocator_calls']} calls"
            for m in self.memory
        )
        return [
            self.placement,
            f"{'alone, ms per pack':>22}: target {self.target_ms:.1f}, drafter {self.drafter_ms:.1f}; "
            f"slower side {self.slower_ms:.1f}",
            f"{'together, ms per pack':>22}: {self.run_ms:.1f}, {self.efficiency_pct:.1f} % of the "
            f"slower side, over {self.steps} steps",
            f"{'rate':>22}: {self.rows_per_s:.0f} rows/s, {self.tokens_per_s:.0f} tokens/s",
            f"{'stood still':>22}: targets {self.targets_waited_pct:.1f} %, drafters "
            f"{self.drafters_waited_pct:.1f} % of their time",
            f"{'memory since the seal':>22}: {flat or 'not measured'}",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "efficiency_pct": self.efficiency_pct}


def bench_pipeline(config: Config, *, steps: int) -> PipelineBench:
    """Runs `steps` steps as `config` places them; raises the errors of such a run."""
    choices = Choices()
    available = visible_devices(choices)
    facts = open_facts(config, device_type(config, available))
    placement = place(config, facts, available, choices)
    inputs = _inputs(config, facts)
    target = _random_target(config, placement, facts)
    target_ms = _alone(config, inputs, target, choices)
    with tempfile.TemporaryDirectory() as directory:
        tree = config.model_dump(mode="json")
        tree["run"]["dir"] = directory
        tree["train"] |= {"steps": steps, "epochs": None, "log_every": max(1, steps // 20)}
        tree["train"] |= {"checkpoint_every": steps, "trackers": []}
        train(build_config(tree, []), inputs=inputs, target=target, choices=choices)
        metrics = _lines(Path(directory) / "metrics.jsonl")[_SETTLED:]
        events = _lines(Path(directory) / "events.jsonl")
    del target
    gc.collect()
    if available:
        torch.cuda.empty_cache()
    alone = config.model_copy(
        update={"run": config.run.model_copy(update={"device": str(placement.drafters[0])})}
    )
    timed = bench_step(alone, steps=20, profile=False)
    drafter_ms = (timed.captured or timed.compiled).median_ms
    packs = statistics.median(m["tokens_per_s"] for m in metrics) / config.token_budget
    return PipelineBench(
        placement="; ".join(placement.lines()),
        target_ms=target_ms,
        drafter_ms=drafter_ms,
        slower_ms=placement.pack_time(target_ms, drafter_ms),
        run_ms=1000 / packs,
        steps=steps,
        rows_per_s=packs * config.anchors * config.block_size,
        tokens_per_s=packs * config.token_budget,
        targets_waited_pct=statistics.mean(m["targets_waited_pct"] for m in metrics),
        drafters_waited_pct=statistics.mean(m["drafters_waited_pct"] for m in metrics),
        memory=[e for e in events if e["event"] == "memory"],
    )


def _inputs(config: Config, facts: TargetFacts) -> Inputs:
    random = np.random.default_rng(config.run.seed)
    length = config.data.max_length
    count = 4 * max(1, config.token_budget // length)
    samples = Samples.of(
        Sample(
            id=str(index),
            input_ids=random.integers(0, facts.vocab_size, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            truncated=False,
        )
        for index in range(count)
    )
    token_ids = None
    if config.drafter.vocab_size is not None:
        token_ids = torch.arange(config.drafter.vocab_size)
    mask_token = config.drafter.mask_token_id
    if mask_token is None:
        # Of a random target the row that pads is zero, and that is mostly one of the first.
        mask_token = facts.embedding_rows - 1
    return Inputs(
        facts=facts,
        samples=samples,
        rejects=(),
        rows=count,
        supervised_tokens=count * (length - 1),
        cut_turns=0,
        shape=build_shape(config, facts, mask_token),
        token_ids=token_ids,
        estimated=False,
    )


def _random_target(config: Config, placement: Placement, facts: TargetFacts) -> Target:
    from draftline.model.target.architecture import empty_model, keep_language_model, read_config
    from draftline.model.target.source import resolve_target

    if len(placement.targets[0]) > 1:
        raise ConfigError("bench pipeline makes its target on one device; name no span of devices")
    path, remote = config.target.path, config.target.trust_remote_code
    settings = read_config(path, resolve_target(path), remote)
    torch.manual_seed(config.run.seed)
    with torch.device(placement.targets[0][0]):
        model = empty_model(path, settings, facts.dtype, remote)
    keep_language_model(model)
    return Target(model, facts.tokenizer, taps=facts.taps)


def _alone(config: Config, inputs: Inputs, target: Target, choices: Choices) -> float:
    """Milliseconds per pack of one target with nobody beside it."""
    worker = feature_worker(config, inputs, target, None, target.device, choices)
    worker.warm()
    packs = epoch_packs(config, inputs.samples, 0).packs

    def run() -> None:
        for index in range(_ALONE_PACKS):
            worker.run(inputs.samples, packs[index % len(packs)])

    return _wall_ms(run, target.device) / _ALONE_PACKS


def _wall_ms(run: Callable[[], None], device: torch.device) -> float:
    run()
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return 1000 * (time.perf_counter() - began)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
