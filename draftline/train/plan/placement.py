"""Which device runs which worker: decided from facts and estimates, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import ConfigError, DeviceError
from draftline.model.drafter.init import build_shape
from draftline.model.target.facts import TargetFacts
from draftline.runtime.devices import DeviceFacts
from draftline.train.plan.work import PackWork, pack_work

_CPU = torch.device("cpu")
# Of a GPU's memory, what a part of a target may take.
_TARGET_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Placement:
    """One entry per worker: a target's devices (several where it spans them), a drafter's device, and
    a drafter's ring slots."""

    targets: tuple[tuple[torch.device, ...], ...]
    drafters: tuple[torch.device, ...]
    slots: tuple[int, ...]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that is used, once, by index."""
        named = {device for target in self.targets for device in target} | set(self.drafters)
        return tuple(sorted(named, key=lambda device: device.index or 0))

    @property
    def shared(self) -> tuple[torch.device, ...]:
        """Devices that hold both a target, or a part of one, and a drafter: they take turns."""
        held = {device for target in self.targets for device in target}
        return tuple(device for device in self.devices if device in held & set(self.drafters))

    def pack_time(self, target: float, drafter: float) -> float:
        """Time a pack once all workers are busy, from a pack's time in one target and one drafter.

        Workers of a side share the packs; whatever is busy longest sets the pace.
        """
        fed, drafted = target / len(self.targets), drafter / len(self.drafters)
        busy = dict.fromkeys(self.devices, 0.0)
        for span in self.targets:
            for device in span:
                busy[device] += fed / len(span)
        for device in self.drafters:
            busy[device] += drafted
        return max(fed, drafted, *busy.values())

    def lines(self) -> list[str]:
        """What a person reads before the run starts."""
        targets = ", ".join("+".join(map(str, span)) for span in self.targets)
        drafters = ", ".join(map(str, self.drafters))
        slots = sorted(set(self.slots))
        lines = [
            f"placement: {len(self.targets)} target(s) on {targets}; {len(self.drafters)} "
            f"drafter(s) on {drafters}, {' or '.join(map(str, slots))} slot(s) each"
        ]
        used = [device for span in self.targets for device in set(span)] + list(self.drafters)
        crowded = [device for device in self.devices if used.count(device) > 1]
        if crowded:
            names = ", ".join(map(str, crowded))
            lines.append(f"placement: on {names} the workers take turns")
        return lines


def device_type(config: Config, available: Sequence[DeviceFacts]) -> str:
    """`cpu` or `cuda`, which all workers of a run share; raises ConfigError where they would not, and
    DeviceError for a GPU that is not there."""
    lists = (config.topology.targets, config.topology.drafters)
    named = {"topology.targets": lists[0], "topology.drafters": lists[1]}
    if lists == ("auto", "auto") and config.run.device != "auto":
        named = {"run.device": [config.run.device]}
    kinds = {
        _device(part, key, available).type
        for key, some in named.items()
        if some != "auto"
        for name in some
        for part in name.split("+")
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"topology.targets={lists[0]} and topology.drafters={lists[1]} mix cpu and cuda; all "
            "workers of a run compute in one place: name only one kind"
        )
    return kinds.pop() if kinds else ("cuda" if available else "cpu")


def place(
    config: Config,
    facts: TargetFacts,
    available: Sequence[DeviceFacts],
    choices: Choices,
    *,
    nodes: int = 1,
) -> Placement:
    """The devices of every worker of this machine; an automatic choice is recorded with numbers.

    `available` are the machine's GPUs by index. Raises DeviceError for a GPU that is not there and
    ConfigError for workers that cannot work together.
    """
    wanted = config.topology
    kind = device_type(config, available)
    targets = None if wanted.targets == "auto" else _parse(wanted.targets, "targets", available)
    drafters = None if wanted.drafters == "auto" else _parse(wanted.drafters, "drafters", available)
    reason = ""
    if targets is None and drafters is None:
        targets, drafters, reason = _choose(config, facts, available, kind, nodes)
    elif targets is None or drafters is None:
        named = targets or drafters
        assert named is not None
        other = _rest(config, named, available, kind)
        reason = "the devices that the other side does not name, or all of its own"
        if targets is None:
            targets = _spans(other, _span(facts, available)) if kind == "cuda" else other
        else:
            drafters = other
    assert targets is not None
    assert drafters is not None
    flat = tuple(span[0] for span in drafters)
    if (
        wanted.reduction == "nccl"
        and len(flat) > 1
        and (kind == "cpu" or len(set(flat)) < len(flat))
    ):
        raise ConfigError(
            f"topology.reduction=nccl needs a GPU for each drafter, and the drafters are on "
            f"{', '.join(map(str, flat))}; use topology.reduction=ordered or auto"
        )
    everywhere = {device for span in targets for device in span}
    slots = tuple(wanted.slots or (1 if everywhere == {device} else 2) for device in flat)
    placement = Placement(tuple(targets), flat, slots)
    if reason:
        got = placement.lines()[0].removeprefix("placement: ")
        choices.record("topology", wanted="auto", got=got, reason=reason)
    return placement


def target_spans(
    config: Config, available: Sequence[DeviceFacts], facts: Callable[[], TargetFacts]
) -> tuple[torch.device, ...]:
    """The devices that one target spans, or one device or none where it need not span any: those of the
    first worker of topology.targets, else as many GPUs as its weights need. `facts` are asked for where
    there are several GPUs."""
    wanted = config.topology.targets
    if wanted != "auto":
        # A single device may be another one here than in training.
        return _parse(wanted[:1], "targets", available)[0] if "+" in wanted[0] else ()
    if len(available) < 2:
        return ()
    every = [(torch.device("cuda", index),) for index in range(len(available))]
    return _spans(every, _span(facts(), available))[0]


def accumulation(config: Config, drafters: int, nodes: int = 1) -> int:
    """Packs that each of `drafters` per machine takes in one step, on `nodes` machines.

    Raises ConfigError when train.packs_per_step cannot be shared out evenly.
    """
    workers = drafters * nodes
    packs = config.train.packs_per_step or workers
    if packs % workers:
        near = max(1, packs // workers) * workers
        raise ConfigError(
            f"train.packs_per_step={packs} is no multiple of the {workers} drafters ({drafters} per "
            f"machine, {nodes} machine(s)), which all take as many; use {near} or {near + workers}, "
            "null for one each, or another topology.drafters"
        )
    return packs // workers


Spans = Sequence[tuple[torch.device, ...]]


def _parse(names: Sequence[str], key: str, available: Sequence[DeviceFacts]) -> Spans:
    spans = []
    for name in names:
        span = tuple(_device(part, f"topology.{key}", available) for part in name.split("+"))
        if len(set(span)) < len(span):
            raise ConfigError(
                f"topology.{key}: {name} names a device twice; a span names each once"
            )
        spans.append(span)
    return spans


def _device(name: str, key: str, available: Sequence[DeviceFacts]) -> torch.device:
    if name == "cpu":
        return _CPU
    device = torch.device("cuda", int(name.partition(":")[2] or 0))
    if device.index >= len(available):
        seen = ", ".join(f"cuda:{i} {gpu.name}" for i, gpu in enumerate(available))
        raise DeviceError(
            f"{key}={name}: no such GPU; visible: {seen}"
            if available
            else f"{key}={name}: no CUDA device is visible (driver, container, or "
            "CUDA_VISIBLE_DEVICES); use cpu"
        )
    return device


def _rest(
    config: Config, named: Spans, available: Sequence[DeviceFacts], kind: str
) -> list[tuple[torch.device, ...]]:
    """Devices for the side that is left open when the other one names its own."""
    if kind == "cpu":
        return [(_CPU,)]
    if config.run.device != "auto":
        return [(_device(config.run.device, "run.device", available),)]
    taken = dict.fromkeys(device for span in named for device in span)
    every = [torch.device("cuda", index) for index in range(len(available))]
    return [(device,) for device in every if device not in taken] or [(d,) for d in taken]


def _span(facts: TargetFacts, available: Sequence[DeviceFacts]) -> int:
    """GPUs that one target needs for its weights."""
    room = _TARGET_SHARE * min(gpu.free_bytes for gpu in available)
    return max(1, math.ceil(facts.total_bytes / max(room, 1.0)))


def _spans(devices: Spans, span: int) -> list[tuple[torch.device, ...]]:
    """`devices` in groups of `span`; those left over stay free, but one group there always is."""
    flat = [device for some in devices for device in some]
    span = min(span, len(flat))
    return [tuple(flat[i : i + span]) for i in range(0, len(flat) - span + 1, span)]


def _choose(
    config: Config, facts: TargetFacts, available: Sequence[DeviceFacts], kind: str, nodes: int
) -> tuple[Spans, Spans, str]:
    """Targets, drafters and the reason, when the configuration names neither."""
    if config.run.device != "auto" or kind == "cpu":
        one = _CPU if kind == "cpu" else _device(config.run.device, "run.device", available)
        told = config.run.device != "auto"
        return [(one,)], [(one,)], f"run.device={one}" if told else "no CUDA device is visible"
    every = [(torch.device("cuda", index),) for index in range(len(available))]
    if len(every) == 1:
        return every, every, "one GPU is visible"
    span = _span(facts, available)
    if config.features.source != "online":
        reason = f"features.source={config.features.source}: after the fill every GPU drafts"
        return _spans(every, span), every, reason
    work = pack_work(config, facts, build_shape(config, facts, 0))
    targets, drafters = _split(work, len(every), span, config.train.packs_per_step, nodes)
    pace = min(targets / work.target, drafters / work.drafter)
    used = targets * min(span, len(every) - 1)
    reason = (
        f"a pack is {work.target / 1e12:.3g} TFLOP for a target and {work.drafter / 1e12:.3g} for a "
        f"drafter: of the time targets would be busy {100 * pace * work.target / targets:.0f} %, "
        f"drafters {100 * pace * work.drafter / drafters:.0f} %"
    )
    return _spans(every[:used], span), every[used : used + drafters], reason


def _split(work: PackWork, gpus: int, span: int, packs: int | None, nodes: int) -> tuple[int, int]:
    """Targets (of `span` GPUs each) and drafters that finish most packs, then use fewest GPUs.

    Only numbers of drafters that share out `packs` per step evenly, where there are any.
    """
    span = min(span, gpus - 1)
    pairs = [(n, m) for n in range(1, gpus) for m in range(1, gpus - n * span + 1)]
    even = [(n, m) for n, m in pairs if packs is None or packs % (m * nodes) == 0]
    return max(
        even or pairs,
        key=lambda pair: (
            min(pair[0] / work.target, pair[1] / work.drafter),
            -pair[0] * span - pair[1],
        ),
    )
