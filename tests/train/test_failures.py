"""Whatever fails in whichever worker: one error with its place, no thread left, nothing lost.

Every case continues a run of two steps, so that a fault at a worker's first call of anything lies
behind a checkpoint, and compares what can be continued after it with a run in which nothing failed.
"""

from __future__ import annotations

import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline import environment
from draftline.checkpoint import store as checkpoint
from draftline.checkpoint.store import checkpoint_paths, load_checkpoint
from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.errors import ConfigError, DraftlineError, RunError
from draftline.runtime import workers as crew
from draftline.runtime.reduce import Reducer
from draftline.runtime.ring import Ring
from draftline.train import run as program
from draftline.train.features.forwards import TargetForwards
from draftline.train.loop import train
from draftline.train.plan.inputs import Inputs, prepare
from draftline.train.report.memory_watch import MemoryWatch
from draftline.train.save.snapshot import Snapshot
from draftline.train.step.step import TrainStep
from draftline.train.step.totals import Totals
from tests.support.runs import (
    WAIT_S,
    assert_same,
    before,
    configured,
    events,
    worker_threads,
    workers,
    write_talks,
)

TARGETS = ("target-0", "target-1")
DRAFTERS = ("drafter-0", "drafter-1")


@dataclass(frozen=True)
class Place:
    """A method, at which of the worker's calls of it the fault is, and what the message says."""

    owner: Any
    method: str
    call: int
    says: str


GRADIENTS, CHECKSUMS = "the other drafters' gradients", "the other drafters' checksums"
TARGET_PLACES = {
    "warm-up": Place(TargetForwards, "warm", 1, "step 2, warm-up"),
    "target forward": Place(TargetForwards, "run", 1, "step 3, target forward"),
    "hand-over": Place(Ring, "publish", 1, "step 3, hand-over"),
}
DRAFTER_PLACES = {
    "warm-up": Place(TrainStep, "capture", 1, "step 2, warm-up"),
    "first gradient sum": Place(Reducer, "reduce", 1, f"step 2, {GRADIENTS}"),
    "first comparison": Place(Reducer, "check_replicas", 1, f"step 2, {CHECKSUMS}"),
    "taking a pack": Place(Ring, "take", 1, "step 3, taking a pack"),
    "forward and backward": Place(TrainStep, "gradients", 2, "step 4, forward and backward"),
    "gradient sum": Place(Reducer, "reduce", 3, f"step 4, {GRADIENTS}"),
    "update": Place(TrainStep, "update", 2, "step 4, update"),
    "comparison": Place(Reducer, "check_replicas", 2, f"step 3, {CHECKSUMS}"),
    "report": Place(Totals, "finish_read", 1, "step 3, report"),
}
CHECKPOINT = Place(Snapshot, "begin", 1, "step 4, checkpoint")
CASES = [(worker, TARGET_PLACES[name], name) for worker in TARGETS for name in TARGET_PLACES]
CASES += [(worker, DRAFTER_PLACES[name], name) for worker in DRAFTERS for name in DRAFTER_PLACES]
CASES += [("drafter-0", CHECKPOINT, "checkpoint")]
CASES += [("drafter-0", Place(MemoryWatch, "step", 1, "step 3, step boundary"), "boundary")]


@dataclass
class Base:
    """A run of two steps, and what all runs after it share."""

    folder: Path
    config: Callable[..., Config]
    inputs: Inputs

    def train(self, name: str, *overrides: str, resume: bool = True) -> Any:
        config = self.config(name, *overrides)
        return train(config, resume=resume, inputs=self.inputs, choices=Choices())

    def copy(self, name: str) -> Path:
        """A run directory of its own that goes on from the two steps."""
        shutil.copytree(self.folder / "base", self.folder / name)
        return self.folder / name


@pytest.fixture(scope="module", autouse=True)
def no_git() -> Iterator[None]:
    """Provenance asks git several times a run, which would take most of this file's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_git", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def base(
    tmp_path_factory: pytest.TempPathFactory, target_dir: Callable[[str], Path], no_git: None
) -> Base:
    folder = tmp_path_factory.mktemp("failures")
    data = write_talks(folder / "talks.jsonl")

    def config(name: str, *overrides: str) -> Config:
        return configured(
            folder / name,
            target_dir("llama"),
            data,
            *workers(2, 2),
            "train.steps=6",
            "train.packs_per_step=2",
            "train.checkpoint_every=2",
            "train.log_every=1",
            "topology.check_every=1",
            *overrides,
        )

    made = Base(folder, config, prepare(config("base"), Choices()))
    # The base is itself the rest of a run that failed, behind its first checkpoint.
    with pytest.MonkeyPatch.context() as patch:
        updates = 0

        def count(name: str, *_: Any) -> None:
            nonlocal updates
            updates += name == "drafter-0"
            if name == "drafter-0" and updates == 4:
                raise ValueError("stop here")

        before(patch, TrainStep, "update", count)
        with pytest.raises(RunError):
            made.train("base", resume=False)
    join_writers()
    assert [p.name for p in checkpoint_paths(folder / "base" / "checkpoints")] == ["step-00000002"]
    return made


@pytest.fixture(scope="module")
def whole(base: Base) -> Path:
    """The checkpoint of a run in which nothing fails."""
    path: Path = base.train("whole", resume=False).checkpoint
    return path


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join(WAIT_S)


class Fault:
    """Runs `act()` at the `call`-th call of a method by one worker.

    Other targets keep their first pack until then: which of them gets a second one is a matter of
    who comes first, and so all of them get one.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        worker: str,
        place: Place,
        act: Callable[[], None],
    ) -> None:
        self.fired = threading.Event()
        calls = 0

        def check(name: str, *_: Any) -> None:
            nonlocal calls
            if name == worker:
                calls += 1
                if calls == place.call:
                    self.fired.set()
                    act()

        def keep(name: str, *_: Any) -> None:
            # Outside of its turn on the device, which the one that fails needs.
            if worker in TARGETS and name != worker:
                assert self.fired.wait(WAIT_S)

        before(monkeypatch, place.owner, place.method, check)
        before(monkeypatch, Ring, "acquire", keep)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def check_intact(run: Path) -> None:
    paths = checkpoint_paths(run / "checkpoints")
    assert "step-00000002" in [p.name for p in paths]
    for path in paths:
        load_checkpoint(path)
    assert not worker_threads()


@pytest.mark.parametrize(
    ("worker", "place"), [case[:2] for case in CASES], ids=[f"{c[0]}-{c[2]}" for c in CASES]
)
@pytest.mark.parametrize("kind", ["error", "memory"])
def test_a_fault_ends_the_run_with_its_place_and_its_cause(
    base: Base,
    monkeypatch: pytest.MonkeyPatch,
    worker: str,
    place: Place,
    kind: str,
) -> None:
    run = base.copy(f"{worker}-{place.method}-{place.call}-{kind}")
    text = "the cause of it"
    error = ValueError(text) if kind == "error" else torch.OutOfMemoryError(f"{text}\nmore")
    with monkeypatch.context() as patch:
        Fault(patch, worker, place, raising(error))
        with pytest.raises(RunError) as caught:
            base.train(run.name)
    message = str(caught.value)
    assert message.startswith(f"{worker} on cpu, {place.says}")
    assert message.count(text) == 1
    assert "\n" not in message
    assert ("out of memory" in message and "max_anchors" in message) is (kind == "memory")
    assert caught.value.__cause__ is error
    join_writers()
    check_intact(run)


@pytest.mark.parametrize(
    ("worker", "place"),
    [
        ("target-1", TARGET_PLACES["target forward"]),
        ("target-0", TARGET_PLACES["warm-up"]),
        ("drafter-1", DRAFTER_PLACES["forward and backward"]),
        ("drafter-0", DRAFTER_PLACES["gradient sum"]),
        ("drafter-0", CHECKPOINT),
    ],
)
def test_what_failed_is_continued_bit_for_bit(
    base: Base, whole: Path, monkeypatch: pytest.MonkeyPatch, worker: str, place: Place
) -> None:
    run = base.copy(f"continued-{worker}-{place.method}")
    with monkeypatch.context() as patch:
        Fault(patch, worker, place, raising(ValueError("cause")))
        with pytest.raises(RunError):
            base.train(run.name)
    join_writers()
    done = base.train(run.name)
    assert (done.step, done.interrupted) == (6, False)
    assert_same(whole, done.checkpoint)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends whoever hangs in a test, when it is over."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("drafter-", "target-")):
            thread.join(WAIT_S)


@pytest.mark.parametrize(
    ("worker", "place"),
    [
        ("target-1", TARGET_PLACES["warm-up"]),
        ("target-0", TARGET_PLACES["target forward"]),
        ("drafter-0", Place(TrainStep, "gradients", 2, "step 3, forward and backward")),
    ],
)
def test_a_hang_ends_the_run_with_its_place(
    base: Base,
    monkeypatch: pytest.MonkeyPatch,
    released: threading.Event,
    worker: str,
    place: Place,
) -> None:
    """With one drafter nobody but the watcher has a deadline of its own."""
    run = base.copy(f"hang-{worker}-{place.method}")
    monkeypatch.setattr(crew, "_GRACE_S", 0.3)
    Fault(monkeypatch, worker, place, lambda: released.wait() and None)
    expected = rf"^{worker} on cpu, {place.says}: no progress for \d+ s; it hangs$"
    with pytest.raises(RunError, match=expected):
        base.train(
            run.name,
            *workers(2, 1),
            "topology.deadline_s=2",
        )
    join_writers()
    assert worker_threads() == [worker]
    assert checkpoint_paths(run / "checkpoints")


def test_a_drafter_that_hangs_is_named_also_by_those_that_wait_for_its_gradients(
    base: Base, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    """Who speaks first, the watcher or the other drafter, is a matter of milliseconds."""
    run = base.copy("hang-drafter-1")
    monkeypatch.setattr(crew, "_GRACE_S", 0.3)
    place = DRAFTER_PLACES["forward and backward"]
    Fault(monkeypatch, "drafter-1", place, lambda: released.wait() and None)
    with pytest.raises(RunError, match=r"^drafter-1 on cpu, step 4.*it hangs"):
        base.train(run.name, "topology.deadline_s=2")
    join_writers()
    assert worker_threads() == ["drafter-1"]
    assert checkpoint_paths(run / "checkpoints")


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    base: Base, whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = base.copy("no-space")
    with monkeypatch.context() as patch:

        def full(_: str, tensors: Any, path: Path) -> None:
            if "00000004" in str(path):
                raise OSError(28, "No space left on device")

        before(patch, checkpoint, "save_file", full)
        done = base.train(run.name)
    assert "No space left on device; earlier checkpoints are untouched; training goes on" in (
        caplog.text
    )
    assert_same(whole, done.checkpoint)


def test_a_slow_write_is_no_hang(
    base: Base, whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The write of step 4 outlasts the deadline; that of step 6 is put off and still made."""
    run = base.copy("slow")
    over = threading.Event()
    timer = threading.Timer(3.0, over.set)

    def slow(_: str, tensors: Any, path: Path) -> None:
        if "00000004" in str(path):
            timer.is_alive() or timer.start()
            assert over.wait(WAIT_S)

    with monkeypatch.context() as patch:
        before(patch, checkpoint, "save_file", slow)
        done = base.train(run.name, "topology.deadline_s=2")
    assert (done.step, done.interrupted) == (6, False)
    assert_same(whole, done.checkpoint)
    assert "checkpoint of step 6: the one before it is still being written" in caplog.text
    assert [e["step"] for e in events(run) if e["event"] == "checkpoint_put_off"] == [6]


def test_a_later_stop_ends_a_run_once_and_with_a_checkpoint(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = base.copy("stopped")
    ends = [e["event"] for e in events(run)].count("end")

    def stop(name: str, watch: MemoryWatch) -> None:
        if watch._steps == 3:
            watch.stopped = RunError("this run is broken: cuda:0: growth")
            watch._stop()

    def slowly(name: str, *_: Any) -> None:
        threading.Event().wait(0.1)

    before(monkeypatch, MemoryWatch, "look", stop)
    before(monkeypatch, TrainStep, "update", slowly)
    with pytest.raises(RunError, match="this run is broken"):
        base.train(run.name, "train.checkpoint_every=40", "topology.check_every=50")
    kinds = [e["event"] for e in events(run)]
    assert kinds[-1] == "failed"
    assert kinds.count("end") == ends
    assert int(checkpoint_paths(run / "checkpoints")[0].name[-8:]) >= 5


@pytest.mark.parametrize(
    ("module", "error"),
    [(None, "train.trackers names wandb"), (types.ModuleType("wandb"), "wandb cannot be started")],
)
def test_a_tracker_that_cannot_start_is_known_before_anything_is_loaded(
    base: Base, monkeypatch: pytest.MonkeyPatch, module: types.ModuleType | None, error: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    before(monkeypatch, program, "assemble", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=error):
        base.train("untracked", "train.trackers=[wandb]", resume=False)
    assert not (base.folder / "untracked").exists()


def test_provenance_is_that_of_the_start(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever commits while a run goes on does not change what its checkpoints were made by."""
    asked: list[str] = []

    def git(*arguments: str) -> str:
        asked.append(threading.current_thread().name)
        return f"answer {len(asked)}"

    monkeypatch.setattr(environment, "_git", git)
    done = base.train("made-by", resume=False)
    [start] = [e for e in events(done.run_dir) if e["event"] == "start"]
    for path in checkpoint_paths(done.run_dir / "checkpoints"):
        made_by = load_checkpoint(path).state.provenance
        assert made_by["commit"] == start["commit"]
    assert len(set(asked)) == 1, "no worker asks git"
    assert len(asked) <= 5


def test_an_unexpected_error_of_the_writer_ends_the_run(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised by the lead when it comes to write the next one."""
    run = base.copy("writer")

    def broken(name: str, tensors: Any, path: Path) -> None:
        if "00000004" in str(path):
            raise ValueError("the cause of it")

    before(monkeypatch, checkpoint, "save_file", broken)
    with pytest.raises(RunError, match=r"^drafter-0 on cpu, step [56], .*the cause of it"):
        base.train(run.name)
    check_intact(run)


def test_a_run_that_failed_leaves_no_writer_behind(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is inside its file when the drafter fails, and is waited for."""
    run = base.copy("writing")
    failed = threading.Event()

    def slow(name: str, *_: Any) -> None:
        if name == "checkpoint-writer":
            assert failed.wait(WAIT_S)
            threading.Event().wait(0.2)

    def fail(name: str, *_: Any) -> None:
        nonlocal updates
        updates += name == "drafter-0"
        if name == "drafter-0" and updates == 3:
            failed.set()
            raise ValueError("cause")

    updates = 0
    before(monkeypatch, checkpoint, "save_file", slow)
    before(monkeypatch, TrainStep, "update", fail)
    with pytest.raises(RunError):
        base.train(run.name)
    assert not worker_threads()
    assert checkpoint_paths(run / "checkpoints")[0].name == "step-00000004"


def test_an_unexpected_error_of_the_last_write_is_an_error_of_the_run(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = base.copy("last-write")

    def broken(name: str, tensors: Any, path: Path) -> None:
        if "00000006" in str(path):
            raise ValueError("the cause of it")

    before(monkeypatch, checkpoint, "save_file", broken)
    with pytest.raises(DraftlineError, match="the cause of it"):
        base.train(run.name)


@pytest.mark.parametrize("attempt", range(3))
def test_a_target_that_hangs_is_named_and_not_the_drafters_that_starve(
    base: Base, monkeypatch: pytest.MonkeyPatch, released: threading.Event, attempt: int
) -> None:
    run = base.copy(f"starve-{attempt}")
    monkeypatch.setattr(crew, "_GRACE_S", 0.3)
    Fault(monkeypatch, "target-1", TARGET_PLACES["hand-over"], lambda: released.wait() and None)
    with pytest.raises(RunError, match=r"^target-1 on cpu, step 3, hand-over: .*it hangs"):
        base.train(run.name, "topology.deadline_s=2")


@pytest.mark.parametrize("error", [ValueError("the\ncause\nof it"), torch.OutOfMemoryError("")])
def test_the_message_is_one_line(
    base: Base, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = base.copy(f"line-{type(error).__name__}")
    Fault(monkeypatch, "drafter-0", DRAFTER_PLACES["update"], raising(error))
    with pytest.raises(RunError) as caught:
        base.train(run.name)
    assert "\n" not in str(caught.value)
