"""The life of one run: planned, put together, taken up where it was, warmed, trained, ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from draftline.checkpoint.store import Checkpoint
from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.data.packing import PackPlan
from draftline.errors import RunError
from draftline.model.target.target import Target
from draftline.progress import doing
from draftline.runlog import RunLog
from draftline.runtime.compile.gate import CompileGate
from draftline.runtime.devices import describe_device, visible_devices
from draftline.runtime.memory import MemoryBaseline
from draftline.runtime.nodes import Nodes
from draftline.runtime.reduce import Reducer
from draftline.runtime.workers import Crew
from draftline.train.assemble import assemble
from draftline.train.features.feed import Feed, Position, Share
from draftline.train.pipeline.lead import Lead, Schedule
from draftline.train.pipeline.pipeline import Pipeline
from draftline.train.plan.inputs import Inputs, epoch_packs
from draftline.train.plan.placement import place
from draftline.train.plan.plan import Plan, plan_run
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.report.reporter import Reporter, Scale
from draftline.train.report.trackers import Trackers
from draftline.train.save.resume import BEGINNING, take_up
from draftline.train.save.saver import Saver
from draftline.train.step.heldout import HeldOutScore

log = logging.getLogger(__name__)

# Seconds between two looks at whether another machine failed.
_NEWS_S = 1.0


@dataclass(frozen=True, slots=True)
class Trained:
    """How a run ended: `step` of `total`, whether it was interrupted, and its last checkpoint, which
    the first machine alone has. `heldout` is the last measurement of this process."""

    run_dir: Path
    checkpoint: Path | None
    step: int
    total: int
    interrupted: bool
    seconds: float
    heldout: HeldOutScore | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A run's plan, the packs of each of its epochs, and when planning `began` (perf_counter)."""

    plan: Plan
    packs_of: Callable[[int], PackPlan]
    began: float


def plan_here(
    config: Config, inputs: Inputs, choices: Choices, runlog: RunLog, nodes: Nodes | None
) -> Planned:
    """The plan of a run on this machine, said line by line; raises what refuses it."""
    began = time.perf_counter()
    machines = 1 if nodes is None else nodes.count
    available = visible_devices(choices)
    placement = place(config, inputs.facts, available, choices, nodes=machines)
    # The first epoch's packs are needed twice, by the plan and by the feed.
    packs_of = lru_cache(maxsize=2)(partial(epoch_packs, config, inputs.samples))
    plan = plan_run(config, inputs, packs_of(0), placement, available, nodes=machines)
    for line in plan.lines():
        log.info(line)
    for device in placement.devices:
        log.info("%s: %s", device, describe_device(device))
        runlog.event("device", {"device": str(device), "what": describe_device(device)})
    return Planned(plan, packs_of, began)


class Run:
    """One run: its parts, its steps, and its end."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        planned: Planned,
        *,
        choices: Choices,
        runlog: RunLog,
        trackers: Trackers,
        gate: CompileGate,
        watch: MemoryWatch,
        nodes: Nodes | None,
        target: Target | None,
        made_by: Mapping[str, Any],
    ) -> None:
        """Loads and allocates all that it computes with. `made_by` is the running code's provenance."""
        self.config, self.inputs, self.runlog, self.trackers = config, inputs, runlog, trackers
        self.gate, self.nodes, self.watch = gate, nodes, watch
        self.plan, self._packs_of, self._began = planned.plan, planned.packs_of, planned.began
        machines, first = (1, True) if nodes is None else (nodes.count, nodes.is_first)
        self.parts = assemble(
            config,
            inputs,
            self.plan,
            choices,
            gate,
            runlog.directory,
            target=target,
            machines=machines,
            measures=first,
        )
        optimizers = [step.optimizer for step in self.parts.steps]
        # Where nothing is added up there is no buffer, and the reducer never touches what it gets.
        self.reducer = Reducer(
            [o.working if o.grad is None else o.grad for o in optimizers],
            how=config.topology.reduction,
            choices=choices,
            nodes=nodes,
            deadline_s=config.topology.deadline_s,
        )
        self.share = Share(
            drafters=len(optimizers),
            accumulate=self.plan.accumulate,
            machines=machines,
            rank=0 if nodes is None else nodes.rank,
        )
        self.saver: Saver | None = None
        if first:
            # The drafters are equal on all machines; one writes.
            self.saver = Saver(
                config,
                inputs,
                self.parts.steps[0],
                runlog,
                features=self.parts.key,
                packs_per_step=self.share.packs_per_step,
                total_steps=self.plan.steps,
                made_by=made_by,
            )
        self._start = BEGINNING
        self._looked_for_news = time.monotonic()

    def load(self, checkpoint: Checkpoint | None, accept_changes: bool) -> None:
        """Takes up the state that a checkpoint holds, and machine 0's on the other machines."""
        self._start = take_up(
            checkpoint,
            self.parts.steps,
            self.nodes,
            features=self.parts.key,
            packs_per_step=self.share.packs_per_step,
            accept_changes=accept_changes,
        )

    def go(self, interrupted: threading.Event) -> Trained:
        """Runs to the last step, or to the next step boundary after `interrupted` is set; raises what
        stopped it."""
        feed = Feed(
            lambda epoch: self._packs_of(epoch).packs,
            self.share,
            self._start.position,
            first_step=self._start.step,
            total_steps=self.plan.steps,
        )
        reporter = self._reporter(feed)
        with (
            self.trackers.shown(),
            self.saver or contextlib.nullcontext(),
            Crew(self.config.topology.deadline_s) as crew,
        ):
            lead = Lead(
                Schedule.of(self.config, self.plan.steps, held_out=bool(self.inputs.heldout)),
                self.parts.steps,
                first_step=self._start.step,
                tokens_per_step=self.config.token_budget * self.share.packs_per_step,
                position=lambda step: feed.position(self._number(step)),
                interrupted=interrupted,
                heldout=self.parts.heldout,
                reducer=self.reducer,
                reporter=reporter,
                saver=self.saver,
                nodes=self.nodes,
                gate=self.gate,
                watch=self.watch,
                runlog=self.runlog,
                began=self._began,
                deadline_s=self.config.topology.deadline_s,
            )
            pipeline = Pipeline(
                crew,
                self.gate,
                config=self.config,
                placement=self.plan.placement,
                steps=self.parts.steps,
                features=self.parts.features,
                samples=self.inputs.samples,
                feed=feed,
                reducer=self.reducer,
                accumulate=self.share.accumulate,
                lead=lead,
            )
            running = False

            def look() -> None:
                reporter.drain(self.trackers)
                if running:
                    self.trackers.reached(lead.done)
                self.watch.look()
                self._hear_news()

            def sealed() -> None:
                nonlocal running
                waits = {"targets": pipeline.target_waits, "drafters": pipeline.drafter_waits}
                reporter.begin(MemoryBaseline(self.plan.placement.devices), waits)
                self._sealed()
                running = True

            self.watch.phase("warm")
            self.watch.may_stop(interrupted.set)
            pipeline.run(look, sealed)
            self.watch.close()
        reporter.say_memory(self.runlog)
        return self._finish(lead, feed.position(self._number(lead.done)), reporter.seconds)

    def _reporter(self, feed: Feed) -> Reporter:
        optimizer, share = self.parts.steps[0].optimizer, self.share
        tokens = self.config.token_budget * share.packs_per_step
        return Reporter(
            Scale(self.plan.rows, tokens, self.plan.steps),
            # Worked out on the host: reading the device's would wait for the step just queued.
            rate_at=lambda step: float(optimizer.rate_at(torch.tensor(step))),
            epoch_at=lambda step: feed.position(self._number(step)).epoch,
            spent_before_s=self._start.seconds,
            first_step=self._start.step,
        )

    def _sealed(self) -> None:
        """Everything is warm: from here on nothing compiles, and memory stands still."""
        launched = "neither compiled nor captured, as on any CPU"
        if all(step.captured for step in self.parts.steps):
            launched = f"{self.gate.compiles} graphs compiled, every drafter's step captured"
        self.watch.sealed(launched, replays=lambda: self.parts.steps[0].replays)
        facts = {
            "compiled": [asdict(graph) for graph in self.gate.graphs],
            "warmed": [asdict(row) for row in self.gate.rows],
            "seconds": round(time.perf_counter() - self._began, 2),
        }
        self.runlog.event("sealed", facts)

    def _hear_news(self) -> None:
        """Raises RunError when another machine failed."""
        now = time.monotonic()
        if self.nodes is not None and now - self._looked_for_news > _NEWS_S:
            self._looked_for_news = now
            if (news := self.nodes.poll_failure()) is not None:
                raise RunError(news)

    def _number(self, step: int) -> int:
        """The number of the first pack of 0-based `step`."""
        return self._start.position.number + (step - self._start.step) * self.share.packs_per_step

    def _finish(self, lead: Lead, position: Position, seconds: float) -> Trained:
        last, total = None, self.plan.steps
        if self.saver is not None:
            with doing(f"writing the checkpoint of step {lead.done}"):
                last = self.saver.finish(lead.done, position, seconds)
        if self.watch.stopped is not None:
            raise self.watch.stopped
        interrupted = lead.done < total
        self.runlog.event(
            "end", {"step": lead.done, "interrupted": interrupted, "seconds": seconds}
        )
        return Trained(
            run_dir=self.runlog.directory,
            checkpoint=last,
            step=lead.done,
            total=total,
            interrupted=interrupted,
            seconds=seconds,
            heldout=lead.score,
        )
