"""N targets and M drafters against one of each on the same packs, to the last bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.checkpoint.store import load_checkpoint
from draftline.errors import RunError
from draftline.runtime.reduce import Reducer
from draftline.runtime.ring import Ring
from draftline.train.features.forwards import TargetForwards
from draftline.train.loop import train as train_run
from draftline.train.step.step import TrainStep
from tests.support.runs import (
    CtrlC,
    after,
    assert_same,
    before,
    configured,
    events,
    metrics,
    tensors,
    worker_threads,
    workers,
    write_talks,
)

Run = Callable[..., Any]
# Everything that could depend on who computes a pack: noise is on already, and so is the average.
RICH = ("loss.soft_labels=0.5", "drafter.vocab_size=24", "drafter.feature_scale=true")
SETTINGS = {"plain": (), "rich": RICH}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write_talks(folder / "talks.jsonl", 24)
    return folder


@pytest.fixture(scope="module")
def run(place: Path, target_dir: Callable[[str], Path]) -> Run:
    """Trains with the overrides in a directory called `name`; the same name is trained once."""
    done: dict[str, Any] = {}

    def train(name: str, *overrides: str, resume: bool = False) -> Any:
        if resume or name not in done:
            config = configured(
                place / name, target_dir("llama"), place / "talks.jsonl", *overrides
            )
            done[name] = train_run(config, resume=resume)
            assert not worker_threads()
        return done[name]

    return train


@pytest.fixture
def one(run: Run) -> Callable[[str, int], Path]:
    """The checkpoint of one target and one drafter that takes `packs` packs a step."""

    def checkpoint(settings: str, packs: int) -> Path:
        overrides = (*SETTINGS[settings], *workers(1, 1), f"train.packs_per_step={packs}")
        path: Path = run(f"one-{settings}-{packs}", *overrides).checkpoint
        return path

    return checkpoint


@pytest.mark.parametrize(
    ("settings", "targets", "drafters", "packs"),
    [
        ("plain", 2, 1, 1),
        ("plain", 3, 1, 3),
        ("plain", 1, 2, 2),
        ("plain", 3, 3, 3),
        ("rich", 3, 3, 3),
        ("rich", 2, 1, 2),
    ],
)
def test_any_workers_train_the_same_drafter_bit_for_bit(
    run: Run,
    one: Callable[[str, int], Path],
    settings: str,
    targets: int,
    drafters: int,
    packs: int,
) -> None:
    many = run(
        f"{settings}-{targets}-{drafters}-{packs}",
        *SETTINGS[settings],
        *workers(targets, drafters),
        f"train.packs_per_step={packs}",
    )
    assert many.step == 8
    assert_same(one(settings, packs), many.checkpoint)


def test_packs_a_step_change_the_drafter(one: Callable[[str, int], Path]) -> None:
    """The comparisons above compare something."""
    two, three = (tensors(one("plain", packs)) for packs in (2, 3))
    assert not torch.equal(two["masters/fc.weight"], three["masters/fc.weight"])
    assert int(two["optimizer/step_count"]) == 8


def test_drafters_that_accumulate_add_in_another_order_and_no_more(
    run: Run, one: Callable[[str, int], Path]
) -> None:
    """Two drafters of two packs: (0 + 2) + (1 + 3), where one drafter has ((0 + 1) + 2) + 3."""
    many = run("two-by-two", *workers(2, 2), "train.packs_per_step=4")
    assert_same(one("plain", 4), many.checkpoint, most=1e-6)


def test_the_numbers_of_a_run_are_those_of_all_its_drafters(
    run: Run, one: Callable[[str, int], Path]
) -> None:
    one("plain", 3)
    many = run("plain-3-3-3", *SETTINGS["plain"], *workers(3, 3), "train.packs_per_step=3")
    alone = metrics(many.run_dir.parent / "one-plain-3")
    together = metrics(many.run_dir)
    assert [line["step"] for line in together] == [2, 4, 6, 8]
    for mine, theirs in zip(together, alone, strict=True):
        for key in ("accepted", "blocks", "anchors", "epoch", "learning_rate", "bad_packs"):
            assert mine[key] == theirs[key], key
        for key in ("loss", "grad_norm", "accept_length_forced", "slot_accuracy"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key


@pytest.mark.parametrize(
    ("first", "then"),
    [((3, 3), (1, 1)), ((1, 1), (3, 3)), ((2, 1), (1, 3))],
)
def test_other_workers_continue_a_run_bit_for_bit(
    run: Run,
    one: Callable[[str, int], Path],
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[int, int],
    then: tuple[int, int],
) -> None:
    name = f"continued-{first}-{then}"
    with monkeypatch.context() as patch:
        press = CtrlC(patch)
        steps = 0

        def updated(thread: str, *_: Any) -> None:
            nonlocal steps
            if thread == "drafter-0":
                steps += 1
                if steps == 5:
                    press()

        after(patch, TrainStep, "update", updated)
        stopped = run(name, *RICH, *workers(*first), "train.packs_per_step=3")
    assert (stopped.interrupted, stopped.step) == (True, 5)
    done = run(name, *RICH, *workers(*then), "train.packs_per_step=3", resume=True)
    assert (done.interrupted, done.step) == (False, 8)
    assert_same(one("rich", 3), done.checkpoint)


def test_every_pack_is_computed_once_and_trained_on_by_the_drafter_it_was_dealt_to(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []
    before(monkeypatch, TrainStep, "gradients", lambda name, _, n: trained.append((name, n)))
    computed: list[str] = []
    before(monkeypatch, TargetForwards, "run", lambda name, *_: computed.append(name))
    run("counted", *workers(2, 3))
    assert sorted(number for _, number in trained) == list(range(24))
    assert all(name == f"drafter-{number % 3}" for name, number in trained)
    assert len(computed) == 24
    assert set(computed) <= {"target-0", "target-1"}


def test_a_slow_target_is_overtaken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """While target-0 holds pack 0 the other one fills every other slot; the order stays."""
    holds, others = threading.Event(), threading.Event()
    published = 0

    def computing(name: str, *_: Any) -> None:
        if name == "target-0" and not holds.is_set():
            holds.set()
            assert others.wait(30), "target-1 does not get on"
        elif name == "target-1":
            assert holds.wait(30)

    def handed_over(name: str, *_: Any) -> None:
        nonlocal published
        published += 1
        # Of six slots one is target-0's; it is not the first, so everybody behind it waits.
        if published == 5:
            others.set()

    with monkeypatch.context() as patch:
        # The two of a device take turns; a held turn would hold both.
        before(patch, Ring, "acquire", computing)
        after(patch, Ring, "publish", handed_over)
        slow = run("slow", *workers(2, 3), "topology.slots=2")
    assert_same(run("plain-1-3", *workers(1, 3)).checkpoint, slow.checkpoint)


def test_drafters_that_differ_end_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of drafter-2's weights changes after the third step."""
    updates = 0

    def flip(name: str, step: TrainStep) -> None:
        nonlocal updates
        if name == "drafter-2":
            updates += 1
            if updates == 3:
                weights = step.optimizer.working.view(torch.int32)
                weights[5] ^= 1

    after(monkeypatch, TrainStep, "update", flip)
    expected = r"drafter-0 on cpu, step \d.*step 4: .*drafter 2 has .*2 of 3 have"
    with pytest.raises(RunError, match=expected):
        run("flipped", *workers(1, 3), "topology.check_every=2")
    assert not worker_threads()


def test_one_drafter_has_nothing_to_sum(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[str] = []
    before(monkeypatch, Reducer, "_sum", lambda name, _: sums.append(name))
    run("alone", *workers(2, 1))
    assert sums == []
    run("pair", *workers(1, 2))
    assert set(sums) == {"drafter-0"}
    assert len(sums) == 8 + 1  # and one in the warm-up


def test_everything_is_warm_before_anything_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    before(monkeypatch, TrainStep, "capture", lambda name, _: order.append(f"warm {name}"))
    before(monkeypatch, TargetForwards, "warm", lambda name, _: order.append(f"warm {name}"))
    before(monkeypatch, TrainStep, "gradients", lambda name, *_: order.append("run"))
    before(monkeypatch, TargetForwards, "run", lambda name, *_: order.append("run"))
    done = run("warmed", *workers(2, 2))
    names = ["drafter-0", "drafter-1", "target-0", "target-1"]
    assert order[:4] == [f"warm {name}" for name in names]
    assert set(order[4:]) == {"run"}
    [sealed] = [event for event in events(done.run_dir) if event["event"] == "sealed"]
    assert [row["name"] for row in sealed["warmed"]] == [
        "drafter-0 step",
        "drafter-1 step",
        "target-0",
        "target-1",
    ]


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_cached_features_serve_several_workers(
    run: Run, one: Callable[[str, int], Path], source: str
) -> None:
    many = run(
        f"cached-{source}",
        *RICH,
        *workers(2, 3),
        f"features.source={source}",
    )
    expected = run(
        f"cached-one-{source}",
        *RICH,
        *workers(1, 1),
        f"features.source={source}",
        "train.packs_per_step=3",
    )
    assert_same(expected.checkpoint, many.checkpoint)


def test_a_checkpoint_says_where_the_run_was(run: Run) -> None:
    done = run("plain-1-3", *workers(1, 3))
    state = load_checkpoint(done.checkpoint).state
    assert (state.step, state.next_number, state.packs_per_step) == (8, 24, 3)
    assert json.loads((done.checkpoint / "state.json").read_text())["total_steps"] == 8
