from draftline.signal.live.alerts import Alerts
from draftline.signal.trace import Event


def recompile(now_s: float, length: int, rank: int = 0) -> Event:
    text = f"`loss` (a.py:4): length of `seen` keeps growing: {length}, now another [rank {rank}]"
    return Event(now_s, "recompile", text)


def test_the_same_trouble_is_said_at_first_and_then_now_and_again() -> None:
    alerts = Alerts()
    said = [alerts.take(recompile(100.0 * n, n, rank=n % 2)) for n in range(40)]

    assert [bool(lines) for lines in said].count(True) == 5  # 1, 2, 3, 10, 30
    [alert] = alerts.known.values()
    assert alert.count == 40
    assert alert.words.endswith("39, now another [rank 1] (40 times)")


def test_different_functions_arguments_and_devices_are_told_apart() -> None:
    alerts = Alerts()
    alerts.take(Event(1.0, "recompile", "`a` (x.py:1): value of `k` changed from 1 to another"))
    alerts.take(Event(1.0, "recompile", "`b` (x.py:1): value of `k` changed from 1 to another"))
    alerts.take(Event(1.0, "recompile", "`a` (x.py:1): value of `m` changed from 1 to another"))
    alerts.take(Event(1.0, "oom", "tried to allocate", "3"))
    [line] = alerts.take(Event(1.0, "oom", "tried to allocate", "4"))

    assert len(alerts.known) == 5
    assert line.endswith("out of memory: GPU 4: tried to allocate")


def test_what_is_no_trouble_is_not_said() -> None:
    alerts = Alerts()

    assert alerts.take(Event(1.0, "compile", "loss")) == []
    assert alerts.take(Event(1.0, "phase", "run")) == []
    assert not alerts.known


def test_many_recompiles_close_together_are_a_storm_said_once_in_a_while() -> None:
    alerts = Alerts()
    lines = [line for n in range(20) for line in alerts.take(recompile(float(n), n))]
    assert sum("compile storm: 5 recompiles within 4 s" in line for line in lines) == 1

    slow = Alerts()
    lines = [line for n in range(20) for line in slow.take(recompile(n * 20.0, n))]
    assert not any("storm" in line for line in lines)


def test_a_flood_of_different_troubles_is_held_in_bounds() -> None:
    alerts = Alerts()
    for n in range(2000):
        alerts.take(Event(1.0, "error", f"trouble {n}"))

    assert len(alerts.known) == 500
    assert len(alerts.latest) <= 8
