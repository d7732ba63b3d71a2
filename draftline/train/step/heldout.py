"""How much of held-out answers a drafter in training would get accepted, position by position.

Blocks are drafted from every position of every held-out answer, and what is correct of each is
counted. Two means follow. The uniform one takes every position alike, as the training metric does.
The chain one walks each answer as greedy decoding would: the next block starts behind what was
accepted and the token that the target adds. Where the answers are the target's own greedy ones it
is, in float32, decoding's acceptance length (`accept_length`) itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.data.packing import Pack, PackArrays, build_pack
from draftline.data.store import Sample
from draftline.model.drafter.anchors import Anchors
from draftline.runtime.graphs import GraphPool, Replayed
from draftline.train.features.cache import FeatureWorker
from draftline.train.step.pack_tensors import PackTensors
from draftline.train.step.step import TrainStep


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """`loss_heldout`, and tokens per target call, bonus included: `accept_length_heldout` over all
    `heldout_positions` where training may anchor a block, `accept_length_chain` over the
    `heldout_rounds` that decoding would take. `heldout_s` is what the measurement took."""

    loss_heldout: float
    accept_length_heldout: float
    accept_length_chain: float
    heldout_positions: int
    heldout_rounds: int
    heldout_s: float

    def metrics(self) -> dict[str, float]:
        return asdict(self)


def drafted_positions(arrays: PackArrays) -> NDArray[np.bool_]:
    """Where a block is drafted, bool [tokens]: on this token of an answer and with one to follow."""
    mask = np.zeros_like(arrays.loss_mask)
    same = arrays.conversation[1:] == arrays.conversation[:-1]
    mask[:-1] = arrays.loss_mask[:-1] & arrays.loss_mask[1:] & same
    return mask


def walk(accepted: NDArray[np.int64], drafted: NDArray[np.bool_]) -> Iterator[int]:
    """The tokens that each round of greedy decoding commits, answer after answer.

    `accepted [tokens]` is the correct prefix of the block at each of the `drafted` positions. An
    answer's first token comes from the prefill and its last ends the decoding, whoever drafted it.
    """
    # The last token of an answer is the one behind its last drafted position.
    edges = np.flatnonzero(np.diff(drafted.astype(np.int8), prepend=0, append=0))
    for first, last in edges.reshape(-1, 2).tolist():
        at = first
        while at < last:
            committed = min(int(accepted[at]) + 1, last - at)
            yield committed
            at += committed


def compute_packs(
    worker: FeatureWorker,
    samples: Sequence[Sample],
    packs: Sequence[Pack],
    block_size: int,
) -> list[tuple[PackArrays, PackTensors]]:
    """The packs with their features on the host, pinned where `worker` is on a CUDA device."""
    pin = worker.row.is_cuda
    found = []
    for pack in packs:
        arrays = build_pack(samples, pack, len(worker.row), block_size)
        worker.run(samples, pack)
        row = torch.empty(worker.row.shape, dtype=worker.row.dtype, pin_memory=pin)
        tensors = PackTensors.build(arrays, row.copy_(worker.row))
        if pin:
            small = {k: t.pin_memory() for k, t in tensors.tensors().items() if k != "features"}
            tensors = PackTensors(**small, features=row)
        found.append((arrays, tensors))
    return found


class HeldOut:
    """Measures one drafter, in the shapes and buffers of its step and with the step's functions."""

    def __init__(
        self,
        step: TrainStep,
        packs: Sequence[tuple[PackArrays, PackTensors]],
        max_anchors: int,
        *,
        pool: GraphPool | None = None,
    ) -> None:
        """Everything that a measurement uses on the device is allocated here."""
        self._step = step
        self._packs = list(packs)
        self._drafted = [drafted_positions(arrays) for arrays, _ in packs]
        rows = [_rows(np.flatnonzero(mask), max_anchors) for mask in self._drafted]
        self._passes = [len(row) for row in rows]
        table = torch.from_numpy(np.concatenate(rows))
        device = step.device
        self._kept = (table >= 0).to(device)
        self._positions = table.clamp_min(0).to(device)
        self._found = torch.zeros(table.shape, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(
            table.shape, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._chosen = (self._positions[0].clone(), self._kept[0].clone())
        self._accepted = torch.zeros(max_anchors, dtype=torch.int64, device=device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._replayed = Replayed(self._run, device, pool=pool)

    def compile(self) -> None:
        """Runs one pass, so that what only a measurement calls is compiled; changes no state."""
        self._run()

    def capture(self) -> None:
        """Captures a pass on CUDA; changes no state."""
        self._replayed.warm()

    def measure(
        self, turn: Callable[[], AbstractContextManager[None]], progress: Callable[[], None]
    ) -> HeldOutScore:
        """The drafter's score as it is now, its averaged weights where it has them.

        Nothing that training depends on is changed and nothing drawn at random. `turn` is entered
        for each pack's work on the device, before which `progress` is called. Waits for the device.
        """
        if self._step.device.type == "cuda":
            # Steps that are still queued are not part of it.
            torch.cuda.current_stream(self._step.device).synchronize()
        began = time.perf_counter()
        self._sums.zero_()
        row = 0
        with self._step.optimizer.averaged():
            for (_, pack), passes in zip(self._packs, self._passes, strict=True):
                progress()
                with turn():
                    self._step.stage(pack.tensors())
                    for _ in range(passes):
                        for buffer, table in zip(
                            self._chosen, (self._positions, self._kept), strict=True
                        ):
                            buffer.copy_(table[row])
                        self._replayed()
                        self._found[row].copy_(self._accepted)
                        row += 1
        self._on_host.copy_(self._found, non_blocking=True)
        loss, weight = self._sums.tolist()  # waits for the copy before it too
        return self._score(loss / max(weight, 1e-9), began)

    def _score(self, loss: float, began: float) -> HeldOutScore:
        found, row = self._on_host.numpy(), 0
        accepted = anchors = rounds = committed = 0
        for (arrays, _), drafted, passes in zip(
            self._packs, self._drafted, self._passes, strict=True
        ):
            counts = np.zeros(len(drafted), np.int64)
            counts[drafted] = found[row : row + passes].reshape(-1)[: int(drafted.sum())]
            row += passes
            accepted += int(counts[arrays.anchor_mask].sum())
            anchors += int(arrays.anchor_mask.sum())
            steps = list(walk(counts, drafted))
            rounds += len(steps)
            committed += sum(steps)
        return HeldOutScore(
            loss_heldout=loss,
            accept_length_heldout=1 + accepted / anchors,
            accept_length_chain=committed / rounds,
            heldout_positions=anchors,
            heldout_rounds=rounds,
            heldout_s=time.perf_counter() - began,
        )

    def _run(self) -> None:
        position, keep = self._chosen
        pack = self._step.inputs
        scores = self._step.scores(pack, Anchors(position, pack.start[position].long(), keep))
        self._accepted.copy_(scores.accepted)
        self._sums += torch.stack([scores.total, scores.weight]).double()


def _rows(positions: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """`positions` in rows of `width`, int64; the places that are left over hold -1."""
    rows = np.full((max(1, -(-len(positions) // width)), width), -1, np.int64)
    rows.reshape(-1)[: len(positions)] = positions
    return rows
