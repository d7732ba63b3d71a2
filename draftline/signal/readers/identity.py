"""Which column says of what device a row is: several rows of one moment for one device prove that it
does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftline.signal.trace import Column

_SOME = 0.02  # of the rows: a list is cut off, a clock is set
_NUMBERED = re.compile(r"(?:cuda:|gpu ?)?(\d{1,4})", re.IGNORECASE)


def read_index(cell: str) -> int | None:
    """The number of a device written as 3, cuda:3 or GPU 3; None for anything else."""
    found = _NUMBERED.fullmatch(cell)
    return None if found is None else int(found[1])


def instants(time_s: Column) -> npt.NDArray[np.intp]:
    """[n] of which query each row is, in file order, judged by the time between rows."""
    between = np.diff(time_s)
    if not len(between):
        return np.zeros(len(time_s), np.intp)
    starts = np.abs(between) > np.quantile(np.abs(between), 0.95) / 4
    return np.concatenate(([0], np.cumsum(starts))).astype(np.intp)


def collisions(ids: npt.NDArray[np.generic], moment: npt.NDArray[np.intp]) -> float:
    """The share of rows whose id stands in an earlier row of the same moment."""
    _, codes = np.unique(ids, return_inverse=True)
    pairs = np.unique(np.stack([moment, codes.reshape(-1)]), axis=1)
    return 1.0 - float(pairs.shape[1]) / max(len(moment), 1)


def unsteadiness(ids: npt.NDArray[np.generic], moment: npt.NDArray[np.intp]) -> float:
    """The share of the moments of several rows whose ids are not those of most such moments."""
    sets: dict[frozenset[str], int] = {}
    for rows in np.split(np.asarray(ids, dtype=str), np.flatnonzero(np.diff(moment)) + 1):
        if len(rows) > 1:
            own = frozenset(rows.tolist())
            sets[own] = sets.get(own, 0) + 1
    return 1.0 - max(sets.values()) / sum(sets.values()) if sets else 0.0


def one_to_one(names: npt.NDArray[np.generic], ids: npt.NDArray[np.generic]) -> bool:
    """Whether each name goes with one id alone, and each id with one name."""
    _, a = np.unique(names, return_inverse=True)
    _, b = np.unique(ids, return_inverse=True)
    pairs = np.unique(np.stack([a.reshape(-1), b.reshape(-1)]), axis=1).shape[1]
    return bool(pairs == a.max() + 1 == b.max() + 1)


def choose(columns: Sequence[Sequence[str]], time_s: Column | None) -> int:
    """The column, of those given in the order of their say, that names the device: of those that
    contradict themselves least, the first."""
    if time_s is None or not np.isfinite(time_s).all() or len(time_s) < 2:
        return 0
    moment = instants(time_s)
    faults = [
        collisions(np.asarray(ids, dtype=str), moment) + unsteadiness(np.asarray(ids), moment)
        for ids in columns
    ]
    least = min(faults)
    return next(n for n, fault in enumerate(faults) if fault <= least + _SOME)
