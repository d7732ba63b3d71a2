"""The chunked loss against float64 autograd over whole logits, and its statistics against loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.model.head import Head
from draftline.model.losses import LossResult, LossSpec, build_chunk_loss, head_loss

BLOCKS, SLOTS, HIDDEN, VOCAB = 7, 5, 12, 23


class Case:
    """Blocks of 5 slots with every kind of supervision: full, short, none; some labels unknown."""

    def __init__(self, *, unknown: bool, multiplier: float, softcap: float | None) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=random)
        self.target_hidden = torch.randn(BLOCKS, SLOTS - 1, HIDDEN, generator=random)
        self.head = Head(
            torch.randn(VOCAB, HIDDEN, generator=random) / 2, multiplier=multiplier, softcap=softcap
        )
        self.labels = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=random)
        # Some labels are the drafter's own choice, so that there are matches to count.
        best = self.head.logits(self.hidden).argmax(-1)
        agree = torch.rand(BLOCKS, SLOTS, generator=random) < 0.6
        self.labels = torch.where(agree, best, self.labels)
        self.known = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
        if unknown:
            self.known = torch.rand(BLOCKS, SLOTS, generator=random) < 0.7
            # An unknown label may hold any row, here the one that would count as a match.
            self.labels = torch.where(self.known, self.labels, best)
        lengths = torch.tensor([4, 4, 3, 1, 0, 2, 4])
        slot = torch.arange(SLOTS)
        self.supervised = (slot >= 1) & (slot <= lengths[:, None])

    def run(self, spec: LossSpec, hidden: Tensor, chunk: Any = None) -> LossResult:
        return head_loss(
            hidden,
            self.target_hidden if spec.soft_labels else None,
            self.head,
            self.labels,
            self.known,
            self.supervised,
            spec,
            chunk or build_chunk_loss(spec, self.head),
        )

    def reference(self, spec: LossSpec, hidden: Tensor) -> Tensor:
        """The definition, slot by slot, in float64."""

        def logits_of(states: Tensor) -> Tensor:
            raw = states @ self.head.weight.double().t() * self.head.multiplier
            cap = self.head.softcap
            return raw if cap is None else torch.tanh(raw / cap) * cap

        total, norm = torch.zeros((), dtype=torch.float64), 0.0
        for n in range(BLOCKS):
            log_probs = torch.log_softmax(logits_of(hidden[n, 1:]), -1)
            wanted = torch.log_softmax(logits_of(self.target_hidden[n].double()), -1)
            supervised = [int(j) for j in range(1, SLOTS) if self.supervised[n, j]]
            ce = {j: -log_probs[j - 1, self.labels[n, j]] for j in supervised}
            for j in supervised:
                if spec.kind == "decay":
                    weight = float(torch.exp(torch.tensor(-(j - 1) / spec.gamma).double()))
                else:
                    reach, weight = 1.0, 0.0
                    for m in supervised:
                        q = float(torch.exp(-ce[m].detach())) if self.known[n, m] else 0.0
                        reach *= (1 - spec.alpha) * q + spec.alpha
                        weight += reach if m >= j else 0.0
                p, log_p = wanted[j - 1].exp(), wanted[j - 1]
                divergence = (p * (log_p - log_probs[j - 1])).sum()
                hard = (1 - spec.soft_labels) if self.known[n, j] else 0.0
                total = total + weight * (hard * ce[j] + spec.soft_labels * divergence)
                norm += weight * (hard + spec.soft_labels)
        return total / norm


SPECS = [
    LossSpec(kind, gamma=2.5, alpha=0.3, soft_labels=soft, chunk_rows=chunk)
    for kind, soft, chunk in product(("decay", "dpace"), (0.0, 0.7, 1.0), (1, 9, 10_000))
]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.6])
@pytest.mark.parametrize("unknown", [False, True])
def test_loss_and_gradient_equal_autograd_in_float64(
    softcap: float | None, multiplier: float, unknown: bool
) -> None:
    case = Case(unknown=unknown, multiplier=multiplier, softcap=softcap)
    for spec in SPECS:
        exact = case.hidden.double().requires_grad_()
        wanted = case.reference(spec, exact)
        (3.0 * wanted).backward()
        hidden = case.hidden.clone().requires_grad_()
        loss = case.run(spec, hidden).loss
        (3.0 * loss).backward()
        assert exact.grad is not None
        assert hidden.grad is not None
        assert hidden.grad.dtype == torch.float32
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
        assert not hidden.grad[:, 0].any(), "slot 0 is not predicted"


@pytest.mark.parametrize("soft", [0.0, 0.7])
def test_a_bfloat16_head_gives_the_gradient_in_bfloat16(soft: float) -> None:
    case = Case(unknown=False, multiplier=1.0, softcap=None)
    spec = LossSpec("decay", 2.5, 0.5, soft, 8)
    case.head = replace(case.head, weight=case.head.weight.bfloat16())
    case.target_hidden = case.target_hidden.bfloat16()
    exact = case.hidden.bfloat16().double().requires_grad_()
    case_wanted = case.reference(spec, exact)
    case_wanted.backward()
    hidden = case.hidden.bfloat16().requires_grad_()
    loss = case.run(spec, hidden).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert exact.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(case_wanted.item(), rel=0.01)
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 0.02


def test_statistics_are_those_of_a_loop() -> None:
    for unknown in (False, True):
        case = Case(unknown=unknown, multiplier=1.0, softcap=None)
        choice = case.head.logits(case.hidden).argmax(-1)
        hits, totals, accepted, blocks = [0] * (SLOTS - 1), [0] * (SLOTS - 1), 0, 0
        for n in range(BLOCKS):
            standing = True
            blocks += bool(case.supervised[n].any())
            for j in range(1, SLOTS):
                ok = bool(case.supervised[n, j] & case.known[n, j])
                ok = ok and int(choice[n, j]) == int(case.labels[n, j])
                standing = standing and ok
                hits[j - 1] += ok
                totals[j - 1] += bool(case.supervised[n, j])
                accepted += standing
        assert 0 < accepted < sum(hits) < sum(totals)
        for chunk_rows in (1, 9, 10_000):
            result = case.run(LossSpec("decay", 2.0, 0.5, 0.0, chunk_rows), case.hidden)
            assert result.slot_correct.tolist() == hits
            assert result.slot_total.tolist() == totals
            assert int(result.accepted) == accepted
            assert int(result.blocks) == blocks


@pytest.mark.parametrize(("chunk_rows", "most"), [(1, 4), (4, 4), (9, 8), (12, 12), (10_000, 28)])
def test_only_a_chunk_of_logits_ever_exists(
    chunk_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    plain = Head.logits

    def counted(head: Head, states: Tensor) -> Tensor:
        rows.append(states.shape[:-1].numel())
        return plain(head, states)

    case = Case(unknown=False, multiplier=1.0, softcap=None)
    monkeypatch.setattr(Head, "logits", counted)
    hidden = case.hidden.clone().requires_grad_()
    case.run(LossSpec("dpace", 2.0, 0.5, 0.5, chunk_rows), hidden).loss.backward()
    # The drafter's and the target's logits of a chunk, each once; the backward computes none.
    assert max(rows) == most
    assert sum(rows) == 2 * BLOCKS * (SLOTS - 1)


@pytest.mark.parametrize("kind", ["decay", "dpace"])
def test_nothing_supervised_is_a_loss_of_zero(kind: str) -> None:
    case = Case(unknown=False, multiplier=1.0, softcap=None)
    case.supervised = torch.zeros_like(case.supervised)
    hidden = case.hidden.clone().requires_grad_()
    result = case.run(LossSpec(kind, 2.0, 0.5, 0.7, 8), hidden)
    result.loss.backward()
    assert result.loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert int(result.blocks) == int(result.accepted) == int(result.slot_total.sum()) == 0


def test_unsupervised_slots_do_not_matter() -> None:
    case = Case(unknown=False, multiplier=1.0, softcap=None)
    other = Case(unknown=False, multiplier=1.0, softcap=None)
    off = ~case.supervised
    other.hidden = torch.where(off[..., None], 9.0, case.hidden)
    other.labels = torch.where(off, 1, case.labels)
    for kind in ("decay", "dpace"):
        spec = LossSpec(kind, 2.0, 0.5, 0.0, 8)
        assert torch.equal(case.run(spec, case.hidden).loss, other.run(spec, other.hidden).loss)


def test_equal_distributions_have_no_divergence() -> None:
    case = Case(unknown=False, multiplier=1.0, softcap=3.0)
    case.target_hidden = case.hidden[:, 1:].clone()
    hidden = case.hidden.clone().requires_grad_()
    loss = case.run(LossSpec("decay", 2.0, 0.5, 1.0, 8), hidden).loss
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) < 1e-6
