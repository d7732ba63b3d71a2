"""What is said of the allocators' counters, from counters made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftline.amounts import sized
from draftline.runtime.memory import MemoryBaseline, MemoryChange

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Counters of two devices, to be changed by the test; others of the allocator's are there too."""
    found = [
        {
            "reserved_bytes.all.current": 1000 * (index + 1),
            "allocation.all.allocated": 50,
            "num_device_alloc": 7,
            "num_device_free": 2,
            "num_alloc_retries": 0,
            "allocated_bytes.all.current": 600,
        }
        for index in range(2)
    ]

    def memory_stats(device: Any) -> dict[str, int]:
        return dict(found[device.index])

    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    return found


def test_nothing_happened(stats: list[dict[str, int]]) -> None:
    changes = MemoryBaseline(GPUS).changes()
    assert changes == [
        MemoryChange("cuda:0", 1000, 0, 0, 0, 0),
        MemoryChange("cuda:1", 2000, 0, 0, 0, 0),
    ]
    assert all(change.flat for change in changes)


@pytest.mark.parametrize(
    ("counter", "change", "flat"),
    [
        ("reserved_bytes.all.current", MemoryChange("cuda:1", 2003, 3, 0, 0, 0), False),
        ("allocation.all.allocated", MemoryChange("cuda:1", 2000, 0, 3, 0, 0), True),
        ("num_device_alloc", MemoryChange("cuda:1", 2000, 0, 0, 3, 0), False),
        ("num_device_free", MemoryChange("cuda:1", 2000, 0, 0, 3, 0), False),
        ("num_alloc_retries", MemoryChange("cuda:1", 2000, 0, 0, 0, 3), False),
        ("allocated_bytes.all.current", MemoryChange("cuda:1", 2000, 0, 0, 0, 0), True),
    ],
)
def test_each_counter_shows_on_its_device(
    stats: list[dict[str, int]], counter: str, change: MemoryChange, flat: bool
) -> None:
    baseline = MemoryBaseline(GPUS)
    stats[1][counter] += 3
    first, second = baseline.changes()
    assert first.flat
    assert second == change
    assert second.flat is flat


def test_memory_given_back_is_not_flat_either(stats: list[dict[str, int]]) -> None:
    baseline = MemoryBaseline(GPUS[:1])
    stats[0]["reserved_bytes.all.current"] -= 10
    [change] = baseline.changes()
    assert (change.reserved_change_bytes, change.flat) == (-10, False)


def test_what_changed_and_changed_back_between_two_looks_counts(
    stats: list[dict[str, int]],
) -> None:
    baseline = MemoryBaseline(GPUS[:1])
    stats[0]["num_device_alloc"] += 1
    stats[0]["num_device_free"] += 1
    [change] = baseline.changes()
    assert (change.device_allocations, change.flat) == (2, False)
    assert baseline.changes() == [change]


def test_devices_without_such_an_allocator_are_left_out(stats: list[dict[str, int]]) -> None:
    cpu = torch.device("cpu")
    assert MemoryBaseline([cpu]).changes() == []
    assert [c.device for c in MemoryBaseline([cpu, GPUS[1]]).changes()] == ["cuda:1"]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (32 << 20, "0.03 GiB")],
)
def test_a_size_is_said_in_the_unit_that_shows_it(count: int, said: str) -> None:
    assert sized(count) == said
