"""What a run will need, computed before anything large is allocated."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from draftline.amounts import counted, sized
from draftline.config.schema import Config
from draftline.config.section import MOST_STEPS
from draftline.data.packing import PackPlan
from draftline.data.store import token_lengths
from draftline.data.tokens import anchor_mask
from draftline.errors import ConfigError
from draftline.runtime.devices import DeviceFacts, free_host_bytes
from draftline.train.features.cache import feature_size
from draftline.train.plan.heldout_cost import HeldOutCost, heldout_cost
from draftline.train.plan.inputs import Inputs
from draftline.train.plan.memory import DeviceMemory, check_memory, device_memory, memory_table
from draftline.train.plan.placement import Placement, accumulation
from draftline.train.plan.start import batch_table
from draftline.train.plan.work import pack_work

# Matrix work that an H200 does in a step of this kind, of 790 TFLOP/s measured at best
# (bench/results); what other devices do is not known.
_KNOWN_FLOPS = {"H200": 0.55 * 790e12}
# Packs whose padding and anchors are counted; more would change the share by less than its print.
_PADDED_PACKS = 64


@dataclass(frozen=True, slots=True)
class Hours:
    """How long the steps take, None where nothing tells, and what that rests on."""

    hours: float | None
    basis: str

    def __str__(self) -> str:
        if self.hours is None:
            return self.basis
        length = f"{self.hours:.1f} hours" if self.hours >= 1 else f"{60 * self.hours:.1f} minutes"
        if self.hours < 1 / 60:
            length = "under a minute"
        return f"{length} ({self.basis})"


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in bytes and counts; `lines()` is what a person reads before the run starts.

    `accumulate` packs go through each drafter per step, `packs_per_step` through all of them; `rows`
    are those of a step, `anchored_pct` the share of the positions where a block could begin at which
    one does in an epoch, `padding_pct` the share of padding in target forwards. `heldout` is what
    measuring costs, None where nothing is held out.
    """

    steps: int
    epochs: float
    packs: int
    fill_pct: float
    limited_by: str
    packs_per_step: int
    accumulate: int
    rows: int
    anchors: int
    anchored_pct: float
    parameters: int
    padding_pct: float
    heldout: HeldOutCost | None
    hours: Hours
    placement: Placement
    memory: tuple[DeviceMemory, ...]
    cache_bytes: int
    checkpoint_bytes: int
    disk_bytes: int

    def lines(self) -> list[str]:
        about_steps = (
            f"plan: {counted(self.steps, 'step')}, {self.epochs:.2f} epochs of "
            f"{counted(self.packs, 'pack')}, "
            f"fill {self.fill_pct:.1f} % (limited by {self.limited_by})"
        )
        about_rows = (
            f"plan: {self.rows} rows per step from {self.packs_per_step} pack(s), {self.accumulate} "
            f"per drafter; drafter of {self._parameters()} parameters"
        )
        about_anchors = (
            f"plan: {self.anchors} anchors per pack, in an epoch at {self.anchored_pct:.0f} % of the "
            "positions where a block can begin"
        )
        about_target = f"plan: {self.padding_pct:.1f} % padding in target forwards"
        if self.cache_bytes:
            about_target += f", feature cache {sized(self.cache_bytes)}"
        about_disk = (
            f"plan: checkpoints of {sized(self.checkpoint_bytes)}, at most "
            f"{sized(self.disk_bytes)} of disk"
        )
        lines = [*self.placement.lines(), about_steps, about_rows, about_anchors, about_target]
        if self.heldout is not None:
            lines.append(self.heldout.line())
        table = [f"    {line}" for line in memory_table(self.memory)]
        return [
            *lines,
            about_disk,
            f"plan: duration {self.hours}",
            "plan: memory, of which step and total are lower bounds",
            *table,
        ]

    def _parameters(self) -> str:
        small = self.parameters < 10**5
        return str(self.parameters) if small else f"{self.parameters / 1e6:.1f} M"

    def to_dict(self) -> dict[str, object]:
        """Everything, as JSON takes it."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {
            "heldout": None if self.heldout is None else asdict(self.heldout),
            "hours": self.hours.hours,
            "hours_basis": self.hours.basis,
            "placement": {
                "targets": [[str(device) for device in span] for span in self.placement.targets],
                "drafters": [str(device) for device in self.placement.drafters],
                "slots": list(self.placement.slots),
                "shared": [str(device) for device in self.placement.shared],
            },
            "memory": [
                {
                    "device": str(row.device),
                    "name": row.name,
                    "parts": row.parts,
                    "total_bytes": row.total,
                    "free_bytes": row.free_bytes,
                }
                for row in self.memory
            ],
        }


def plan_run(
    config: Config,
    inputs: Inputs,
    packs: PackPlan,
    placement: Placement,
    available: Sequence[DeviceFacts],
    *,
    nodes: int = 1,
    rate: float | None = None,
) -> Plan:
    """The plan of a run; raises ConfigError or DeviceError when it cannot fit, with the numbers.

    `packs` are an epoch of all `nodes` machines, which are alike; `available` are this one's GPUs.
    `rate` is what one drafter was measured to do, in rows per second.
    """
    accumulate = accumulation(config, len(placement.drafters), nodes)
    together = accumulate * len(placement.drafters) * nodes
    steps = config.train.steps
    if steps is None:
        assert config.train.epochs is not None, "the configuration demands one of the two"
        steps = max(1, round(config.train.epochs * len(packs.packs) / together))
        if steps > MOST_STEPS:
            raise ConfigError(
                f"train.epochs={config.train.epochs:g} are {steps} steps over {len(packs.packs)} packs, "
                f"and a run has at most {MOST_STEPS}; lower it"
            )
    parameters = inputs.shape.num_parameters
    soft = config.loss.soft_labels > 0
    cached = config.features.source != "online"
    average = 4 if config.train.ema is not None else 0
    checkpoint = parameters * (12 + 2 * average)
    padding_pct = _padding_pct(config, inputs, packs)
    computed = packs.fill_pct / (100 - padding_pct)
    memory = device_memory(config, inputs, placement, available)
    plan = Plan(
        steps=steps,
        epochs=steps * together / len(packs.packs),
        packs=len(packs.packs),
        fill_pct=packs.fill_pct,
        limited_by=packs.limited_by,
        packs_per_step=together,
        accumulate=accumulate,
        rows=together * config.anchors * config.block_size,
        anchors=config.anchors,
        anchored_pct=_anchored_pct(config, inputs, packs),
        parameters=parameters,
        padding_pct=padding_pct,
        heldout=heldout_cost(config, inputs, steps=steps, accumulate=accumulate),
        hours=_hours(config, inputs, placement, memory, steps * together / nodes, computed, rate),
        placement=placement,
        memory=memory,
        cache_bytes=feature_size(inputs.facts, inputs.tokens, last_hidden=soft).bytes
        if cached
        else 0,
        checkpoint_bytes=checkpoint,
        # The new one is complete before the oldest goes.
        disk_bytes=checkpoint * (config.train.keep_checkpoints + 1),
    )
    check_memory(memory, config, inputs, placement, available)
    _check_host(plan.heldout)
    _check_disk(plan, Path(config.run.dir))
    return plan


def _anchored_pct(config: Config, inputs: Inputs, packs: PackPlan) -> float:
    """Blocks of 100 positions that could begin one, over the first packs."""
    anchored = possible = 0
    for pack in packs.packs[:_PADDED_PACKS]:
        here = 0
        for member in pack.members:
            sample = inputs.samples[member]
            mask = anchor_mask(sample.loss_mask, sample.truncated, config.block_size)
            here += int(np.count_nonzero(mask))
        anchored += min(here, config.anchors)
        possible += here
    return 100 * anchored / max(possible, 1)


def _padding_pct(config: Config, inputs: Inputs, packs: PackPlan) -> float:
    """Padding in the target's forwards over the first packs, of 100 computed tokens."""
    lengths = token_lengths(inputs.samples)
    table = batch_table(config, inputs.samples)
    real = computed = 0
    for pack in packs.packs[:_PADDED_PACKS]:
        real += pack.tokens
        batches = table.split([lengths[member] for member in pack.members])
        computed += sum(batch.shape[0] * batch.shape[1] for batch in batches)
    return 100 * (computed - real) / computed


def _hours(
    config: Config,
    inputs: Inputs,
    placement: Placement,
    memory: Sequence[DeviceMemory],
    packs: float,
    computed: float,
    rate: float | None,
) -> Hours:
    """The time for `packs` packs on this machine; in the mean a target computes `computed` times
    the tokens of a full pack."""
    names = [row.name for row in memory]
    known = [flops for key, flops in _KNOWN_FLOPS.items() if all(key in name for name in names)]
    work = pack_work(config, inputs.facts, inputs.shape)
    fed = 0.0
    if known and config.features.source == "online":
        fed = work.target * computed / known[0]
    if rate is not None:
        drafted = config.anchors * config.block_size / rate
        basis = f"at {rate:g} rows/s per drafter; "
        basis += "target estimated, not measured" if fed else "if no drafter waits for a target"
    elif known:
        drafted = work.drafter / known[0]
        basis = "estimated from matrix work, not measured"
    else:
        return Hours(
            None,
            "unknown here; draftline plan --time measures a step, --rate takes what bench step did",
        )
    return Hours(packs * placement.pack_time(fed, drafted) / 3600, basis)


def _check_host(heldout: HeldOutCost | None) -> None:
    free = free_host_bytes()
    if heldout is not None and free is not None and heldout.host_bytes > free:
        raise ConfigError(
            f"the held-out features need {sized(heldout.host_bytes)} of host memory and "
            f"{sized(free)} are free; lower data.heldout, or null measures on none"
        )


def _check_disk(plan: Plan, directory: Path) -> None:
    there = directory
    try:
        while not there.exists():
            there = there.parent
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise ConfigError(
            f"run.dir={str(directory)[:200]} cannot be used: {error.strerror}"
        ) from None
    if plan.disk_bytes > free:
        raise ConfigError(
            f"checkpoints need {sized(plan.disk_bytes)} and {sized(free)} are free "
            f"at {there}; choose another run.dir or lower train.keep_checkpoints"
        )
