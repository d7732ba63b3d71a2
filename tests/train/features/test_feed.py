"""The order of packs: a partition of every step over machines and drafters, and its resume."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice

import pytest

from draftline.data.packing import Pack
from draftline.train.features.feed import Feed, Job, Position, Share

START = Position(0, 0, 0)
# Epochs of different numbers of packs; none divides the others.
SIZES = (5, 3, 7, 1, 4)


def packs_of(epoch: int) -> Sequence[Pack]:
    """A pack's members name its epoch and place."""
    return [Pack((epoch, place), 1) for place in range(SIZES[epoch % len(SIZES)])]


def sequence(count: int) -> list[Pack]:
    return list(islice(chain.from_iterable(packs_of(e) for e in range(100)), count))


def jobs(
    share: Share, steps: int, *, first: int = 0, start: Position = START
) -> tuple[Feed, list[Job]]:
    feed = Feed(packs_of, share, start, first_step=first, total_steps=steps)
    found = []
    while (job := feed.next()) is not None:
        found.append(job)
    return feed, found


def test_one_worker_gets_every_pack_in_order() -> None:
    _, found = jobs(Share(1), 20)
    assert [job.pack for job in found] == sequence(20)
    assert [(job.step, job.number, job.drafter, job.sequence) for job in found] == [
        (n, n, 0, n) for n in range(20)
    ]


def test_every_pack_comes_once_an_epoch() -> None:
    _, found = jobs(Share(2, accumulate=5), 2)
    assert sum(SIZES) == len(found) == 20
    counts = Counter(job.pack.members for job in found)
    assert set(counts.values()) == {1}
    assert Counter(epoch for epoch, _ in counts) == dict(enumerate(SIZES))


@pytest.mark.parametrize("drafters", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("machines", [1, 2, 3])
def test_machines_take_their_stretch_of_each_step_and_deal_it_in_turn(
    drafters: int, accumulate: int, machines: int
) -> None:
    steps, local = 6, drafters * accumulate
    together = local * machines
    everything: list[Job] = []
    for rank in range(machines):
        share = Share(drafters, accumulate, machines, rank)
        assert share.packs_per_step == together
        _, found = jobs(share, steps)
        for step in range(steps):
            mine = [job for job in found if job.step == step]
            first = step * together + rank * local
            assert [job.number for job in mine] == list(range(first, first + local))
            assert [job.drafter for job in mine] == [n % drafters for n in range(local)]
        for drafter in range(drafters):
            assert [job.sequence for job in found if job.drafter == drafter] == list(
                range(steps * accumulate)
            )
        everything += found
    everything.sort(key=lambda job: job.number)
    assert [job.number for job in everything] == list(range(steps * together))
    assert [job.pack for job in everything] == sequence(steps * together)


def test_a_position_is_where_the_pack_lies() -> None:
    feed, found = jobs(Share(1, accumulate=2), 13)
    for job in found:
        epoch, place = job.pack.members
        assert feed.position(job.number) == Position(job.number, epoch, place)


def test_the_position_behind_the_last_dealt_pack_is_known() -> None:
    """A run that ends at the end of an epoch is saved before the next one is begun."""
    feed, found = jobs(Share(1), SIZES[0])
    end = feed.position(len(found))
    assert end.number == SIZES[0]
    _, more = jobs(Share(1), 12, first=SIZES[0], start=end)
    assert [job.pack for job in more] == sequence(12)[SIZES[0] :]


@pytest.mark.parametrize("done", range(10))
@pytest.mark.parametrize("share", [Share(1), Share(3), Share(1, accumulate=2), Share(2, 1, 2, 1)])
def test_a_feed_goes_on_where_another_stopped(share: Share, done: int) -> None:
    """`done` steps with another division of the same packs, then the rest."""
    total = 10
    _, whole = jobs(share, total)
    before, _ = jobs(Share(1, accumulate=share.packs_per_step), done)
    start = before.position(done * share.packs_per_step)
    after, rest = jobs(share, total, first=done, start=start)
    expected = [job for job in whole if job.step >= done]
    assert [(j.step, j.number, j.drafter, j.pack) for j in rest] == [
        (j.step, j.number, j.drafter, j.pack) for j in expected
    ]
    for drafter in range(share.drafters):
        mine = [job.sequence for job in rest if job.drafter == drafter]
        assert mine == list(range(len(mine)))
    for job in rest:
        assert after.position(job.number).place == job.pack.members[1]


def test_the_packs_of_an_epoch_are_asked_for_when_they_are_needed() -> None:
    asked: list[int] = []

    def count(epoch: int) -> Sequence[Pack]:
        asked.append(epoch)
        return packs_of(epoch)

    feed = Feed(count, Share(1), START, first_step=0, total_steps=9)
    assert asked == []
    for _ in range(SIZES[0]):
        feed.next()
    assert asked == [0]
    feed.next()
    assert asked == [0, 1]


def test_who_asks_while_an_epoch_is_planned_waits_for_it() -> None:
    planning, planned = threading.Event(), threading.Event()

    def slowly(epoch: int) -> Sequence[Pack]:
        planning.set()
        assert planned.wait(30)
        return packs_of(epoch)

    feed = Feed(slowly, Share(1), START, first_step=0, total_steps=4)
    got: list[Job | None] = []
    threads = [threading.Thread(target=lambda: got.append(feed.next())) for _ in range(2)]
    threads[0].start()
    assert planning.wait(30)
    threads[1].start()
    threads[1].join(0.1)  # where it does not wait it has ended by now, with an error
    planned.set()
    for thread in threads:
        thread.join(30)
    assert sorted(job.number for job in got if job is not None) == [0, 1]


def test_threads_that_ask_together_get_every_job_once() -> None:
    feed = Feed(packs_of, Share(2, accumulate=2), START, first_step=0, total_steps=200)
    found: list[list[Job]] = [[] for _ in range(4)]
    together = threading.Barrier(4)

    def ask(into: list[Job], call: Callable[[], Job | None]) -> None:
        together.wait(10)
        while (job := call()) is not None:
            into.append(job)

    threads = [threading.Thread(target=ask, args=(into, feed.next)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(job.number for jobs in found for job in jobs) == list(range(800))
