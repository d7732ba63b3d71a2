"""Damage to the files of a recording, and comparisons of what was read of them."""

from __future__ import annotations

import random

import numpy as np

from draftline.signal.trace import Trace


def mutated(data: bytes, seed: int) -> bytes:
    """The data with some bytes flipped and chunks left out, repeated or moved, or cut off."""
    dice = random.Random(seed)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(data) or 1), dice.randint(1, max(len(data) // 4, 1))
        chunk, kind = data[at : at + length], dice.randrange(6)
        if kind == 0:
            changed = bytearray(data)
            for _ in range(dice.randint(1, 8)):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            data = bytes(changed)
        elif kind == 1:
            data = data[:at] + data[at + length :]
        elif kind == 2:
            data = data[:at]
        elif kind == 3:
            data = data[:at] + chunk + data[at:]
        elif kind == 4:
            lines = data.splitlines(keepends=True)
            dice.shuffle(lines)
            data = b"".join(lines)
        else:
            rest = data[:at] + data[at + length :]
            to = dice.randrange(len(rest) + 1)
            data = rest[:to] + chunk + rest[to:]
        data = data or b"\n"
    return data


def assert_sound(trace: Trace) -> None:
    """What every Trace holds to: columns of one length, times that are finite and rise."""
    for series in (*trace.samples, *trace.steps):
        assert np.isfinite(series.time_s).all()
        assert (np.diff(series.time_s) > 0).all()
    for samples in trace.samples:
        columns = [samples.used_bytes, samples.util_pct, *samples.by_process.values()]
        assert all(len(column) == len(samples.time_s) > 0 for column in columns)
        assert all(np.isnan(c[~(c >= 0)]).all() for c in columns)
    for steps in trace.steps:
        columns = [steps.number, steps.wall_ms, *steps.values.values()]
        assert all(len(column) == len(steps.time_s) > 0 for column in columns)
        assert (np.diff(steps.number) > 0).all()
    times = [event.time_s for event in trace.events]
    assert times == sorted(times)


def assert_same(left: Trace, right: Trace) -> None:
    """Both tell the same, notes and sources aside."""
    assert left.devices == right.devices
    for a, b in zip(left.samples, right.samples, strict=True):
        assert (a.device, a.total_bytes, a.dated) == (b.device, b.total_bytes, b.dated)
        assert a.by_process.keys() == b.by_process.keys()
        columns = [(a.time_s, b.time_s), (a.used_bytes, b.used_bytes), (a.util_pct, b.util_pct)]
        columns += [(a.by_process[pid], b.by_process[pid]) for pid in a.by_process]
        for one, other in columns:
            np.testing.assert_array_equal(one, other)
    for c, d in zip(left.steps, right.steps, strict=True):
        assert (c.device, c.values.keys()) == (d.device, d.values.keys())
        columns = [(c.time_s, d.time_s), (c.number, d.number), (c.wall_ms, d.wall_ms)]
        columns += [(c.values[name], d.values[name]) for name in c.values]
        for one, other in columns:
            np.testing.assert_array_equal(one, other)
    assert left.events == right.events
    assert left.program == right.program
