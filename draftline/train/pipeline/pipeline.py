"""The threads of a run: targets compute packs into the rings of the drafters, which train on them.

Every worker warms up on its own thread and stream, one after another, before the gate is sealed and
all of them start. What happens between two steps is `lead.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from draftline.config.schema import Config
from draftline.data.store import Sample
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.devices import synchronize
from draftline.runtime.reduce import Reducer
from draftline.runtime.ring import Ring, RunAhead, Slot, Turns, WaitMeter
from draftline.runtime.workers import Crew, Worker
from draftline.train.features.cache import FeatureWorker
from draftline.train.features.feed import Feed, Job
from draftline.train.pipeline.lead import Lead, called_off
from draftline.train.plan.placement import Placement
from draftline.train.step.pack_tensors import PackStager, PackTensors
from draftline.train.step.step import TrainStep

# Steps that a host may be ahead of its device: enough to keep it busy, few enough to stop soon.
_AHEAD = 2


class Pipeline:
    """N feature workers and M drafters, from the warm-up to the last step."""

    def __init__(
        self,
        crew: Crew,
        gate: CompileGate,
        *,
        config: Config,
        placement: Placement,
        steps: Sequence[TrainStep],
        features: Sequence[FeatureWorker],
        samples: Sequence[Sample],
        feed: Feed,
        reducer: Reducer,
        accumulate: int,
        lead: Lead,
    ) -> None:
        """Allocates the rings and makes the workers; nothing runs before `run`."""
        self._crew, self._gate, self._feed, self._reducer = crew, gate, feed, reducer
        self._steps, self._features, self._samples = list(steps), list(features), samples
        self._budget, self._block_size = config.token_budget, config.block_size
        self._accumulate, self._first_step, self._lead = accumulate, lead.done, lead
        self._spans = list(placement.targets)
        # Nothing is added up: the gradients are used where the first graph left them, and no other
        # graph may run between the two.
        self._in_place = steps[0].optimizer.grad is None
        self.rings = [
            Ring(
                f"drafter-{index}",
                [
                    PackTensors.empty(self._budget, step.width, step.dtype, step.device).tensors()
                    for _ in range(count)
                ],
            )
            for index, (step, count) in enumerate(zip(steps, placement.slots, strict=True))
        ]
        drafters = [crew.worker(f"drafter-{i}", step.device) for i, step in enumerate(steps)]
        targets = [crew.worker(f"target-{i}", devices[0]) for i, devices in enumerate(self._spans)]
        self.drafter_waits = [WaitMeter() for _ in drafters]
        self.target_waits = [WaitMeter() for _ in targets]
        used = [step.device for step in steps] + [d for ds in self._spans for d in set(ds)]
        self._turns = {device: Turns() for device in set(used) if used.count(device) > 1}
        self._order = [*drafters, *targets]
        self._warm_condition = threading.Condition()
        self._warmed = self._settled = self._ended = 0
        self._sealed = False
        crew.on_stop.append(reducer.abort)

    def run(self, look: Callable[[], None], sealed: Callable[[], None]) -> None:
        """Warms, seals, trains to the step at which the lead does not go on.

        `look` is called some twenty times a second by this thread, `sealed` once, when everything is
        warm and nobody runs yet. Raises the first failure of any worker.
        """

        def watch() -> None:
            with self._warm_condition:
                ready = self._settled == len(self._order) and not self._sealed
            if ready:
                self._gate.seal()
                sealed()
                with self._warm_condition:
                    self._sealed = True
                    self._warm_condition.notify_all()
            look()

        devices = {step.device for step in self._steps} | {d for ds in self._spans for d in ds}
        for device in devices:
            # Workers' streams do not wait for what this thread queued: weights, a restored state.
            synchronize(device)
        targets = self._order[len(self._steps) :]
        for index, worker in enumerate(self._order[: len(self._steps)]):
            self._crew.start(worker, lambda w, i=index: self._draft(w, i))  # type: ignore[misc]
        for index, worker in enumerate(targets):
            self._crew.start(worker, lambda w, i=index: self._compute(w, i))  # type: ignore[misc]
        self._crew.watch(watch)
        for device in devices:
            synchronize(device)
        self._gate.check()

    # Warming

    def _warm(self, worker: Worker, name: str, call: Callable[[], None], captures: bool) -> None:
        """Runs `call` when it is the worker's turn; returns when everybody has been."""
        place = self._order.index(worker)
        condition = self._warm_condition
        with condition:
            worker.wait_until(condition, lambda: self._warmed == place, "the others' warm-up")
        worker.doing("warm-up", self._first_step)
        self._gate.warm(name, worker.device, call, captures=captures)
        synchronize(worker.device)
        with condition:
            self._warmed += 1
            condition.notify_all()
            everybody = len(self._order)
            worker.wait_until(condition, lambda: self._warmed == everybody, "the others' warm-up")

    def _settle(self, worker: Worker) -> None:
        """Says that the worker is ready; returns when the gate is sealed."""
        with self._warm_condition:
            self._settled += 1
            worker.wait_until(self._warm_condition, lambda: self._sealed, "the seal")

    # Targets

    def _compute(self, worker: Worker, index: int) -> None:
        features = self._features[index]
        stager = PackStager(
            self._budget, self._block_size, features.row, worker.device, depth=_AHEAD + 1
        )
        self._warm(worker, f"target-{index}", features.warm, captures=False)
        with self._work(worker, self._spans[index]):
            features.settle()
        # Once into every ring, so that no pair of devices meets for the first time in the run.
        for ring in self.rings:
            self._copy(stager, ring.first_slot)
        synchronize(worker.device)
        self._settle(worker)
        ahead, meter = RunAhead(_AHEAD), self.target_waits[index]
        while (job := self._feed.next()) is not None:
            worker.doing("target forward", job.step + 1)
            self._feature_pack(worker, index, features, stager, job)
            worker.doing("hand-over", job.step + 1)
            ring = self.rings[job.drafter]
            with meter.measure(worker):
                slot = ring.acquire(job.sequence, worker)
            self._copy(stager, slot)
            ring.publish(job.sequence, job.number, worker)
            ahead.mark(worker)

    @staticmethod
    def _copy(stager: PackStager, slot: Slot) -> None:
        for name, tensor in slot.tensors.items():
            tensor.copy_(stager.pack[name], non_blocking=True)

    def _feature_pack(
        self, worker: Worker, index: int, features: FeatureWorker, stager: PackStager, job: Job
    ) -> None:
        with self._work(worker, self._spans[index]):
            features.run(self._samples, job.pack)
            stager.fill(self._samples, job.pack)

    # Drafters

    def _draft(self, worker: Worker, index: int) -> None:
        step, lead, number = self._steps[index], self._lead, self._first_step
        heldout = lead.heldout if index == 0 else None

        def warm() -> None:
            step.compile()
            if heldout is not None:
                heldout.compile()
            step.capture()
            if heldout is not None:
                heldout.capture()

        self._warm(worker, f"drafter-{index} step", warm, captures=True)
        # After all captures, which give back what lies unused: this takes memory once, and for good.
        self._reduce(worker, index, number)
        lead.compare(index, worker, number)
        self._settle(worker)
        ahead = RunAhead(_AHEAD)
        while lead.goes_on(index, worker, number):
            self._step(worker, index, number)
            number += 1
            # A device's fault shows when its host next waits for it, which is here.
            worker.doing("waiting for the device", number)
            ahead.mark(worker)
            lead.cross(index, worker, number, lambda: self._work(worker))
        lead.leave(index, worker)
        with self._warm_condition:
            self._ended += 1
            last = self._ended == len(self._steps)
        if last:
            # The targets may be waiting for slots that nobody will free.
            self._crew.stop()

    def _step(self, worker: Worker, index: int, number: int) -> None:
        step, ring = self._steps[index], self.rings[index]
        for _ in range(self._accumulate):
            worker.doing("taking a pack", number + 1)
            with self.drafter_waits[index].measure(worker):
                slot = ring.take(worker)
            worker.doing("forward and backward", number + 1)
            with self._work(worker):
                step.stage(slot.tensors)
                pack = slot.number
                ring.release(worker)
                step.gradients(pack)
                if self._in_place:
                    step.update()
        if not self._in_place:
            self._reduce(worker, index, number + 1)
            worker.doing("update", number + 1)
            with self._work(worker):
                step.update()

    def _reduce(self, worker: Worker, index: int, number: int) -> None:
        worker.doing("gradient sum", number)
        with worker.waiting("the other drafters' gradients"), called_off():
            self._reducer.reduce(index)

    @contextlib.contextmanager
    def _work(self, worker: Worker, devices: Sequence[torch.device] = ()) -> Iterator[None]:
        """One unit of work on `devices`, by default the worker's own."""
        with self._turn(worker, devices or (worker.device,)), self._gate.running():
            yield

    @contextlib.contextmanager
    def _turn(self, worker: Worker, devices: Sequence[torch.device]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            # In one order everywhere, so that two workers over several devices cannot block
            # each other.
            for device in sorted(set(devices), key=str):
                if device in self._turns:
                    held.enter_context(self._turns[device].turn(worker))
            yield
