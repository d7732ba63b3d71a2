"""The bytes that a run takes on every device, and the refusal when they are more than it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from draftline.amounts import sized
from draftline.config.schema import Config
from draftline.errors import DeviceError
from draftline.runtime.devices import DeviceFacts, free_host_bytes
from draftline.train.features.cache import feature_size
from draftline.train.plan.heldout_cost import heldout_bytes
from draftline.train.plan.inputs import Inputs
from draftline.train.plan.placement import Placement
from draftline.train.step.pack_tensors import PACK_BYTES_A_TOKEN

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one device will hold: `parts` in bytes by name, against `free_bytes` (None: not known).

    `target` is its weights (with a feature cache, what filling it takes beyond all else) and
    `features` its workers' row buffers; `weights`, `gradients`,
    `masters`, `moments` and `average` are the drafters'; `ends` the copies that they make of the
    target's embedding and head; `ring` the packs that wait or are staged; `held-out` the packs on
    which a run on the CPU measures itself; `step` the activations, which is a lower bound, since a
    compiler decides what it keeps; so is the total.
    """

    device: torch.device
    name: str
    parts: dict[str, int]
    free_bytes: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def device_memory(
    config: Config, inputs: Inputs, placement: Placement, available: Sequence[DeviceFacts]
) -> tuple[DeviceMemory, ...]:
    """One entry per device of `placement`, by index; `available` are the machine's GPUs."""
    facts = inputs.facts
    # Embedding, head and rows of a target that spans devices are on its first.
    firsts = [span[0] for span in placement.targets]
    soft = config.loss.soft_labels > 0
    pack = feature_size(facts, config.token_budget, last_hidden=soft).bytes
    cached = config.features.source != "online"
    rows = []
    for device in placement.devices:
        spans = [span for span in placement.targets if device in span]
        # Workers on one device share its weights; one that spans devices shares with nobody.
        once = [span for i, span in enumerate(spans) if len(span) > 1 or span not in spans[:i]]
        mine = [s for d, s in zip(placement.drafters, placement.slots, strict=True) if d == device]
        parts = {
            "target": 0 if cached else sum(facts.total_bytes // len(s) for s in once),
            "features": firsts.count(device) * pack,
        }
        for name, size in _drafter_bytes(config, inputs).items():
            parts[name] = len(mine) * size
        copied = cached or device not in firsts
        parts["ends"] = _end_bytes(inputs, copied=copied) if mine else 0
        staged = pack + PACK_BYTES_A_TOKEN * config.token_budget
        parts["ring"] = sum(slots + 1 for slots in mine) * staged
        parts["step"] = len(mine) * _step_bytes(config, inputs, device)
        if cached and device in placement.targets[0]:
            # One target fills the cache and goes before the drafters come: of the two what is more.
            filling = facts.total_bytes // len(placement.targets[0]) + pack
            parts["target"] = max(0, filling - sum(parts.values()))
        if device.type == "cpu":
            parts["held-out"] = heldout_bytes(config, inputs)
        name, free = "CPU", free_host_bytes()
        if device.type == "cuda":
            gpu = available[device.index]
            name, free = gpu.name, gpu.free_bytes
        elif config.features.source == "memory":
            parts["cache"] = feature_size(facts, inputs.tokens, last_hidden=soft).bytes
        rows.append(DeviceMemory(device, name, parts, free))
    return tuple(rows)


def memory_table(rows: Sequence[DeviceMemory]) -> list[str]:
    """Aligned lines in GiB; devices that hold the same share one, parts of nothing are left out."""
    parts = [part for part in rows[0].parts if any(row.parts[part] for row in rows)]
    lines = [["GiB per device", *parts, "total", "free"]]
    for _, group in groupby(rows, key=lambda row: (row.name, row.parts, row.free_bytes)):
        alike = list(group)
        row, last = alike[0], alike[-1]
        name = str(row.device) if last is row else f"{row.device} to {last.device.index}"
        sizes = [*(row.parts[part] for part in parts), row.total, row.free_bytes]
        lines.append([name, *("?" if n is None else f"{n / _GIB:.2f}" for n in sizes)])
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in lines
    ]


def check_memory(
    rows: Sequence[DeviceMemory],
    config: Config,
    inputs: Inputs,
    placement: Placement,
    available: Sequence[DeviceFacts],
) -> None:
    """Raises DeviceError for the fullest device that cannot hold its part, with the way out."""
    short = [row for row in rows if row.free_bytes is not None and row.total > row.free_bytes]
    if not short:
        return
    row = max(short, key=lambda row: row.total - (row.free_bytes or 0))
    saved = {}
    for knob, (lower, changed, slots) in _lowered(config, placement).items():
        again = device_memory(changed, inputs, replace(placement, slots=slots), available)
        total = next(other.total for other in again if other.device == row.device)
        saved[f"{knob}={lower}"] = row.total - total
    knob, saving = max(saved.items(), key=lambda item: item[1], default=("", 0))
    largest = max(row.parts, key=lambda part: row.parts[part])
    way_out = "take a smaller drafter (drafter.layers) or a device with more memory"
    if largest == "target":
        way_out = "let it span devices (topology.targets=[cuda:0+cuda:1]), or take a smaller target"
    elif saving > 0:
        enough = "enough" if row.total - saving <= (row.free_bytes or 0) else "not enough alone"
        way_out = f"{knob} would lower it most, by {sized(saving)} ({enough})"
        if not knob.startswith("topology."):
            way_out += ", which a run that is continued takes with --accept-changes"
    if row.device in placement.shared and len(available) > 1:
        way_out += "; or part the two sides with topology.targets and topology.drafters"
    raise DeviceError(
        f"{row.device} ({row.name}) needs at least {sized(row.total)} and "
        f"{sized(row.free_bytes or 0)} are free; its largest part is {largest} with "
        f"{sized(row.parts[largest])}; {way_out}"
    )


def _drafter_bytes(config: Config, inputs: Inputs) -> dict[str, int]:
    """The flat buffers of one drafter; float32 weights are their own masters."""
    element, count = inputs.facts.dtype.itemsize, inputs.shape.num_parameters
    return {
        "weights": count * element,
        "gradients": count * element,
        "masters": 0 if inputs.facts.dtype == torch.float32 else 4 * count,
        "moments": 8 * count,
        "average": 4 * count if config.train.ema is not None else 0,
    }


def _end_bytes(inputs: Inputs, *, copied: bool) -> int:
    """Embedding and head, where no target lends its own, and the head over a draft vocabulary."""
    facts = inputs.facts
    ends = facts.embedding_bytes + facts.head_bytes if copied else 0
    if inputs.token_ids is not None:
        ends += len(inputs.token_ids) * facts.hidden_size * facts.dtype.itemsize
    return ends


def _step_bytes(config: Config, inputs: Inputs, device: torch.device) -> int:
    """At least what one step holds at once: activations, and the logits of a chunk with gradient."""
    facts, shape = inputs.facts, inputs.shape
    element = facts.dtype.itemsize
    rows = config.anchors * config.block_size
    vocabulary = len(inputs.token_ids) if inputs.token_ids is not None else facts.vocab_size
    logits = 3 if config.loss.soft_labels > 0 else 2
    chunk = logits * element * min(config.loss.chunk_rows, rows) * vocabulary
    # What a layer must keep for its backward: inputs, projections, MLP halves.
    kept = 6 * shape.hidden_size + 3 * shape.intermediate_size
    activations = rows * shape.num_layers * kept * element
    if device.type == "cpu":
        activations += rows * (config.token_budget + rows)  # the dense mask
    return chunk + activations + rows * shape.hidden_size * element


def _lowered(
    config: Config, placement: Placement
) -> dict[str, tuple[int, Config, tuple[int, ...]]]:
    """Every knob on memory: its lower value, and the configuration and slots that go with it."""
    found = {}
    rows = config.anchors * config.block_size
    chunk = max(1, min(config.loss.chunk_rows, rows) // 2)
    loss = config.loss.model_copy(update={"chunk_rows": chunk})
    found["loss.chunk_rows"] = (chunk, config.model_copy(update={"loss": loss}), placement.slots)
    knobs = {
        "max_anchors": (config.anchors, 1),
        "token_budget": (config.token_budget, max(config.data.max_length, config.max_anchors or 1)),
    }
    for key, (now, floor) in knobs.items():
        half = max(floor, now // 2)
        if half < now:
            found[key] = (half, config.model_copy(update={key: half}), placement.slots)
    if max(placement.slots) > 1:
        found["topology.slots"] = (1, config, (1,) * len(placement.slots))
    return found
