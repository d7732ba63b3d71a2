"""The state of one run: what it computes with, where it is, and what it leaves behind."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from draftline.checkpoint.state import RunState
from draftline.checkpoint.store import Checkpoint
from draftline.choices import Choices
from draftline.config.schema import Config
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
from draftline.train.pipeline.boundary import Duties
from draftline.train.pipeline.pipeline import Pipeline
from draftline.train.plan.inputs import Inputs, epoch_packs
from draftline.train.plan.placement import place
from draftline.train.plan.plan import plan_run
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.report.reporter import Reporter, Scale
from draftline.train.report.trackers import Trackers
from draftline.train.save.resume import check_state, check_weights, share_state
from draftline.train.save.saver import Saver
from draftline.train.save.snapshot import load_state
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


class Run:
    """One run: its parts, its steps, and its end."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        choices: Choices,
        runlog: RunLog,
        gate: CompileGate,
        nodes: Nodes | None,
        target: Target | None,
        watch: MemoryWatch,
    ) -> None:
        self._created = time.perf_counter()
        self.config, self.inputs, self.runlog = config, inputs, runlog
        self.gate, self.nodes, self.watch = gate, nodes, watch
        machines = 1 if nodes is None else nodes.count
        available = visible_devices()
        placement = place(config, inputs.facts, available, choices, nodes=machines)
        # The first epoch's packs are needed twice, by the plan and by the feed.
        self.packs_of = lru_cache(maxsize=2)(partial(epoch_packs, config, inputs.samples))
        self.plan = plan_run(config, inputs, self.packs_of(0), placement, available, nodes=machines)
        for line in self.plan.lines():
            log.info(line)
        for device in placement.devices:
            log.info("%s: %s", device, describe_device(device))
            runlog.event("device", {"device": str(device), "what": describe_device(device)})
        self.parts = assemble(
            config,
            inputs,
            self.plan,
            choices,
            gate,
            runlog.directory,
            target=target,
            machines=machines,
            measures=nodes is None or nodes.is_first,
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
        if nodes is None or nodes.is_first:
            # The drafters are equal on all machines; one writes.
            self.saver = Saver(
                config,
                inputs,
                self.parts.steps[0],
                runlog,
                features=self.parts.key,
                packs_per_step=self.share.packs_per_step,
                total_steps=self.plan.steps,
            )
        self.start = Position(0, 0, 0)
        self.first_step = self.done_steps = 0
        self.score: HeldOutScore | None = None
        self._spent_before = 0.0
        self._looked_for_news = time.monotonic()

    def load(self, checkpoint: Checkpoint | None, accept_changes: bool) -> None:
        """Takes up the state that a checkpoint holds, and machine 0's on the other machines."""
        state: RunState | None = None
        if checkpoint is not None:
            state = checkpoint.state
            check_state(
                checkpoint,
                features=self.parts.key,
                packs_per_step=self.share.packs_per_step,
                accept_changes=accept_changes,
            )
            check_weights(checkpoint, self.parts.steps[0].drafter)
            for step in self.parts.steps:
                scale = checkpoint.tensors["drafter"]["feature_scale"]
                step.drafter.feature_scale.copy_(scale)
                load_state(step.optimizer, checkpoint.tensors)
            log.info("resumed %s", checkpoint.path)
        if self.nodes is not None:
            state = self.nodes.broadcast_object(state)
            share_state(self.nodes, self.parts.steps)
        if state is not None:
            self.start = Position(state.next_number, state.epoch, state.next_pack)
            self.first_step = self.done_steps = state.step
            self._spent_before = state.seconds

    def go(self, interrupted: threading.Event) -> Trained:
        """Runs to the last step, or to the next step boundary after `interrupted` is set."""
        config, total = self.config, self.plan.steps
        feed = Feed(
            lambda epoch: self.packs_of(epoch).packs,
            self.share,
            self.start,
            first_step=self.first_step,
            total_steps=total,
        )
        optimizer, share = self.parts.steps[0].optimizer, self.share
        reporter = Reporter(
            Scale(self.plan.rows, config.token_budget * share.packs_per_step, total),
            # Worked out on the host: reading the device's would wait for the step just queued.
            rate_at=lambda step: float(optimizer.rate_at(torch.tensor(step))),
            epoch_at=lambda step: feed.position(self._number(step)).epoch,
            spent_before_s=self._spent_before,
            first_step=self.first_step,
        )
        trackers = Trackers(
            self.runlog,
            config.train.trackers if self.saver is not None else (),
            config.model_dump(mode="json"),
            total,
            quiet=self.saver is None,
        )
        with (
            trackers,
            self.saver or contextlib.nullcontext(),
            Crew(config.topology.deadline_s) as crew,
        ):
            duties = self._duties(feed, reporter, interrupted)
            pipeline = self._pipeline(crew, feed, duties)

            running = False

            def look() -> None:
                reporter.drain(trackers)
                if running:
                    trackers.reached(self.done_steps)
                self.watch.look()
                self._hear_news()

            def sealed() -> None:
                nonlocal running
                waits = {"targets": pipeline.target_waits, "drafters": pipeline.drafter_waits}
                captured = all(step.captured for step in self.parts.steps)
                launched = (
                    f"{self.gate.compiles} graphs compiled, every drafter's step captured"
                    if captured
                    else "neither compiled nor captured, as on any CPU"
                )
                reporter.begin(MemoryBaseline(self.plan.placement.devices), waits)
                self.watch.sealed(launched, replays=lambda: self.parts.steps[0].replays)
                facts = {
                    "compiled": [asdict(graph) for graph in self.gate.graphs],
                    "warmed": [asdict(row) for row in self.gate.rows],
                    "seconds": round(time.perf_counter() - self._created, 2),
                }
                self.runlog.event("sealed", facts)
                running = True

            self.watch.phase("warm")
            self.watch.may_stop(interrupted.set)
            pipeline.run(look, sealed)
            self.watch.close()
        reporter.say_memory(self.runlog)
        trained = self._finish(feed, reporter)
        if self.watch.stopped is not None:
            raise self.watch.stopped
        return trained

    def _duties(self, feed: Feed, reporter: Reporter, interrupted: threading.Event) -> Duties:
        train, total = self.config.train, self.plan.steps
        tokens = self.config.token_budget * self.share.packs_per_step
        queued: dict[int, float] = {}
        scores: dict[int, HeldOutScore] = {}

        def go_on(step: int) -> bool:
            stop = interrupted.is_set()
            if self.nodes is not None:
                stop = self.nodes.agree(stop)
            return step < total and not stop

        def measures(step: int) -> bool:
            return bool(self.inputs.heldout) and (step % train.eval_every == 0 or step == total)

        def reports(step: int) -> bool:
            return step % train.log_every == 0 or step == total or measures(step)

        def measured(step: int, score: HeldOutScore) -> None:
            self.score = scores[step] = score

        def finished(step: int) -> None:
            self.done_steps = step
            self.watch.step(step, tokens)
            if step == self.first_step + 1:
                seconds = round(time.perf_counter() - self._created, 2)
                self.runlog.event("first_step", {"seconds": seconds})
            if reports(step):
                queued[step] = time.perf_counter()
            if self.saver is not None and step % train.checkpoint_every == 0:
                with self.watch.phase("checkpoint"):
                    self.saver.save(step, self._position(feed), reporter.seconds)

        def report(step: int, sums: list[float]) -> None:
            self.gate.check()
            if self.nodes is not None:
                machines = self.nodes.gather(sums)
                sums = [sum(column) for column in zip(*machines, strict=True)]
            reporter.put(step, sums, queued.pop(step), scores.pop(step, None))

        return Duties(
            go_on=go_on,
            finished=finished,
            report=report,
            reports=reports,
            compares=lambda step: step % self.config.topology.check_every == 0,
            measures=measures,
            measured=measured,
        )

    def _pipeline(self, crew: Crew, feed: Feed, duties: Duties) -> Pipeline:
        return Pipeline(
            crew,
            self.gate,
            steps=self.parts.steps,
            features=self.parts.features,
            feature_devices=self.plan.placement.targets,
            slots=self.plan.placement.slots,
            samples=self.inputs.samples,
            token_budget=self.config.token_budget,
            block_size=self.config.block_size,
            feed=feed,
            reducer=self.reducer,
            accumulate=self.share.accumulate,
            first_step=self.first_step,
            duties=duties,
            heldout=self.parts.heldout,
        )

    def _hear_news(self) -> None:
        """Raises RunError when another machine failed."""
        now = time.monotonic()
        if self.nodes is not None and now - self._looked_for_news > _NEWS_S:
            self._looked_for_news = now
            if (news := self.nodes.poll_failure()) is not None:
                raise RunError(news)

    def _number(self, step: int) -> int:
        """The number of the first pack of 0-based `step`."""
        return self.start.number + (step - self.first_step) * self.share.packs_per_step

    def _finish(self, feed: Feed, reporter: Reporter) -> Trained:
        seconds, interrupted = reporter.seconds, self.done_steps < self.plan.steps
        last = None
        if self.saver is not None:
            with doing(f"writing the checkpoint of step {self.done_steps}"):
                last = self.saver.finish(self.done_steps, self._position(feed), seconds)
        self.runlog.event(
            "end", {"step": self.done_steps, "interrupted": interrupted, "seconds": seconds}
        )
        return Trained(
            run_dir=self.runlog.directory,
            checkpoint=last,
            step=self.done_steps,
            total=self.plan.steps,
            interrupted=interrupted,
            seconds=seconds,
            heldout=self.score,
        )

    def _position(self, feed: Feed) -> Position:
        """Where the next step begins."""
        return feed.position(self._number(self.done_steps))
