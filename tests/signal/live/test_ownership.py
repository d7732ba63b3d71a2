from collections.abc import Mapping

from draftline.signal.live.ownership import Ownership
from draftline.signal.recorder.nvml import Reading

MIB = 2**20
ROOT, CHILD, STRANGER, UNSEEN = 100, 101, 500, 9000


def reading(
    used_mib: float | None, processes: Mapping[int, int | None] | None, device: str = "0"
) -> Reading:
    used = None if used_mib is None else int(used_mib * MIB)
    return Reading(device, 0.0, used, 143771 * MIB, None, processes)


def ownership(*, attached: bool = False, keep: int = 3) -> Ownership:
    seen = {ROOT, CHILD, STRANGER}
    return Ownership(ROOT, attached=attached, keep=keep, is_visible=seen.__contains__)


def test_a_device_is_the_programs_once_its_process_is_there() -> None:
    own = ownership()
    idle = [reading(n, {STRANGER: 5}) for n in range(5)]
    for each in idle:
        assert own.take(each, {ROOT}) == []

    passed = own.take(reading(800, {STRANGER: 5, CHILD: 700}), {ROOT, CHILD})

    assert [r.used_bytes for r in passed] == [2 * MIB, 3 * MIB, 4 * MIB, 800 * MIB]
    assert own.devices == {"0"}


def test_the_programs_processes_are_summed_under_the_root() -> None:
    own = ownership()

    [passed] = own.take(reading(9, {ROOT: 10, CHILD: 20, STRANGER: 7}), {ROOT, CHILD})

    assert passed.processes == {ROOT: 30, STRANGER: 7}
    assert own.others == {"0": {STRANGER: 7}}


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    [passed] = ownership().take(reading(9, {ROOT: None, CHILD: 20}), {ROOT, CHILD})

    assert passed.processes == {ROOT: None}


def test_a_device_stays_the_programs_after_it_left() -> None:
    own = ownership()
    own.take(reading(9, {ROOT: 10}), {ROOT})

    [passed] = own.take(reading(1, {}), {ROOT})

    assert passed.processes == {}


def test_hidden_processes_are_unknown_and_growth_tells_use() -> None:
    own = ownership()
    assert own.take(reading(5000, {UNSEEN: 900}), {ROOT}) == []
    assert own.take(reading(5040, {UNSEEN: 900}), {ROOT}) == []

    passed = own.take(reading(5100, {UNSEEN: 900}), {ROOT})

    assert len(passed) == 3
    assert all(r.processes is None for r in passed)


def test_growth_is_measured_from_the_first_reading_however_slow() -> None:
    own = ownership(keep=2)
    slow = [reading(1000 + 10 * n, None) for n in range(8)]

    passed = [own.take(each, {ROOT}) for each in slow]

    assert [bool(p) for p in passed] == [False] * 7 + [True]


def test_an_attached_program_owns_what_holds_memory_though_nobody_is_told() -> None:
    own = ownership(attached=True)

    assert own.take(reading(100, {}, "0"), {ROOT}) == []
    assert len(own.take(reading(900, {}, "1"), {ROOT})) == 1
    assert own.take(reading(None, None, "2"), {ROOT}) == []
    assert own.devices == {"1"}
