"""The chunked loss against float64 autograd over whole logits, and its statistics against loops."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from draftline.model.drafter.losses import (
    LossKernels,
    LossResult,
    LossSpec,
    build_loss_kernels,
    head_loss,
)
from draftline.model.head import Head

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

    def run(self, spec: LossSpec, hidden: Tensor, kernels: LossKernels | None = None) -> LossResult:
        return head_loss(
            hidden[:, 1:],
            self.target_hidden if spec.soft_labels else None,
            self.head,
            self.labels,
            self.known,
            self.supervised,
            kernels or build_loss_kernels(spec, self.head),
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
            assert int(result.accepted.sum()) == accepted
            assert int(result.blocks) == blocks


class Watched:
    """Kernels that note the logits they are given and what becomes of them."""

    def __init__(self, spec: LossSpec, head: Head) -> None:
        self.plain = build_loss_kernels(spec, head)
        self.scored: list[Tensor] = []
        self.replaced: list[Tensor] = []

    def score(self, raw: Tensor, target_raw: Tensor | None, *rest: Tensor) -> tuple[Tensor, ...]:
        before = raw.clone()
        result = self.plain.score(raw, target_raw, *rest)
        assert torch.equal(raw, before), "scoring only reads"
        self.scored.append(raw)
        return result

    def into_gradient(self, raw: Tensor, target_raw: Tensor | None, *rest: Tensor) -> None:
        hint = None if target_raw is None else target_raw.clone()
        self.plain.into_gradient(raw, target_raw, *rest)
        assert target_raw is None or torch.equal(target_raw, hint)  # type: ignore[arg-type]
        self.replaced.append(raw)

    def kernels(self) -> LossKernels:
        return LossKernels(self.score, self.into_gradient, self.plain.chunk_rows)


@pytest.mark.parametrize(
    ("chunk_rows", "blocks"),
    [(1, [1] * 7), (4, [1] * 7), (9, [2, 2, 2, 1]), (16, [4, 3]), (10_000, [7])],
)
def test_only_a_chunk_of_logits_ever_exists(chunk_rows: int, blocks: list[int]) -> None:
    """Chunks of whole blocks and of one size, but for the last."""
    case = Case(unknown=False, multiplier=1.0, softcap=None)
    spec = LossSpec("dpace", 2.0, 0.5, 0.5, chunk_rows)
    watched = Watched(spec, case.head)
    hidden = case.hidden.clone().requires_grad_()
    loss = case.run(spec, hidden, watched.kernels()).loss
    assert [tuple(raw.shape) for raw in watched.scored] == [(n, SLOTS - 1, VOCAB) for n in blocks]
    # The gradient takes the logits' place, so there is one buffer a chunk.
    assert all(a is b for a, b in zip(watched.scored, watched.replaced, strict=True))
    loss.backward()
    assert len(watched.scored) == len(blocks), "the backward computes no logits"


def test_without_a_gradient_its_pass_is_left_out_and_nothing_else_changes() -> None:
    case = Case(unknown=True, multiplier=0.6, softcap=3.0)
    spec = LossSpec("dpace", 2.0, 0.5, 0.5, 9)
    hidden = case.hidden.clone().requires_grad_()
    trained = case.run(spec, hidden)
    watched = Watched(spec, case.head)
    with torch.no_grad():
        scored = case.run(spec, hidden, watched.kernels())
    assert watched.scored
    assert watched.replaced == []
    for name in ("total", "weight", "slot_correct", "slot_total", "accepted", "blocks"):
        assert torch.equal(getattr(scored, name), getattr(trained, name)), name


class Coarse(Head):
    """A head of another number format: it multiplies by eighths."""

    def coarse(self) -> Tensor:
        return (self.weight * 8).round() / 8

    def product(self, hidden: Tensor, *, unrounded: bool = False) -> Tensor:
        return hidden @ self.coarse().t()

    def product_back(self, gradient: Tensor, out: Tensor) -> None:
        torch.matmul(gradient, self.coarse(), out=out)


def test_the_format_of_the_head_is_its_own_affair() -> None:
    case = Case(unknown=False, multiplier=0.6, softcap=3.0)
    spec = LossSpec("decay", 2.0, 0.5, 0.5, 9)
    coarse = Coarse(case.head.weight, 0.6, 3.0)
    found = []
    for head in (coarse, Head(coarse.coarse(), 0.6, 3.0), case.head):
        case.head = head
        hidden = case.hidden.clone().requires_grad_()
        case.run(spec, hidden).loss.backward()
        assert hidden.grad is not None
        found.append((head.logits(case.hidden), hidden.grad))
    for mine, same, other in zip(*found, strict=True):
        assert torch.equal(mine, same)
        assert not torch.allclose(mine, other)
    assert type(coarse.restricted(torch.tensor([3, 1]))) is Coarse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_replaces_the_logits_in_their_own_dtype(dtype: torch.dtype) -> None:
    """One chunk, the kernels alone, against autograd with respect to the raw products."""
    for soft, softcap, multiplier in product((0.0, 0.7), (None, 3.0), (1.0, 0.6)):
        case = Case(unknown=True, multiplier=multiplier, softcap=softcap)
        spec = LossSpec("dpace", 2.5, 0.3, soft, 1)
        kernels = build_loss_kernels(spec, case.head)
        raw = (case.hidden[:, 1:] @ case.head.weight.t()).to(dtype)
        target_raw = (case.target_hidden @ case.head.weight.t()).to(dtype) if soft else None
        labels, known = case.labels[:, 1:], case.known[:, 1:]
        exact = raw.double().requires_grad_()
        loss, weight, _, *rest = kernels.score(
            raw, target_raw, labels, known, case.supervised[:, 1:]
        )
        weights, share = rest[1].double(), rest[2].double()

        def log_probs(product: Tensor, case: Case = case) -> Tensor:
            logits = product * case.head.multiplier
            cap = case.head.softcap
            capped = logits if cap is None else torch.tanh(logits / cap) * cap
            return torch.log_softmax(capped, -1)

        mine = log_probs(exact)
        slots = -share * mine.gather(-1, labels[..., None])[..., 0]
        if target_raw is not None:
            wanted = log_probs(target_raw.double())
            slots = slots + (1 - share) * (wanted.exp() * (wanted - mine)).sum(-1)
        total = (weights * slots).sum()
        total.backward()
        torch.testing.assert_close(loss.double(), total.detach(), rtol=1e-5, atol=1e-6)
        assert float(weight) == pytest.approx(float(weights.sum()))
        pointer = raw.data_ptr()
        kernels.into_gradient(raw, target_raw, labels, *rest)
        assert (raw.data_ptr(), raw.dtype) == (pointer, dtype)
        assert exact.grad is not None
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(raw.double(), exact.grad, rtol=tolerance, atol=1e-6)


def test_of_equal_logits_the_first_is_chosen() -> None:
    """bfloat16 logits often tie; `torch.argmax` is what decoding asks, and takes the first."""
    rows = torch.eye(6)[[0, 1, 1, 2, 2, 2]]
    head = Head(rows)
    hidden = torch.randint(0, 2, (40, 4, 6), generator=torch.Generator().manual_seed(0)).float()
    choice = head.logits(hidden).argmax(-1)
    supervised = torch.ones(40, 4, dtype=torch.bool)
    supervised[:, 0] = False
    spec = LossSpec("decay", 2.0, 0.5, 0.0, 9)
    ties = 0
    for label in range(6):
        labels = torch.full((40, 4), label)
        result = head_loss(
            hidden[:, 1:],
            None,
            head,
            labels,
            torch.ones_like(supervised),
            supervised,
            build_loss_kernels(spec, head),
        )
        assert result.slot_correct.tolist() == (choice[:, 1:] == label).sum(0).tolist()
        largest = head.logits(hidden)[:, 1:] == head.logits(hidden)[:, 1:].amax(-1, keepdim=True)
        ties += int((largest[..., label] & (choice[:, 1:] != label)).sum())
    assert ties > 50


def test_a_draft_vocabulary_is_a_smaller_problem_of_its_own() -> None:
    """Labels are rows of the restricted head; unknown ones teach through the hint only."""
    ids = torch.tensor([2, 3, 5, 7, 11, 13, 17, 19])
    full = Case(unknown=False, multiplier=0.6, softcap=3.0)
    place = torch.full((VOCAB,), -1)
    place[ids] = torch.arange(len(ids))
    known = place[full.labels] >= 0
    assert 0 < int(known.sum()) < known.numel()
    full.head, full.labels, full.known = (
        full.head.restricted(ids),
        place[full.labels].clamp_min(0),
        known,
    )
    for kind, soft in product(("decay", "dpace"), (0.0, 0.7)):
        spec = LossSpec(kind, 2.5, 0.3, soft, 9)
        exact = full.hidden.double().requires_grad_()
        wanted = full.reference(spec, exact)
        wanted.backward()
        hidden = full.hidden.clone().requires_grad_()
        result = full.run(spec, hidden)
        result.loss.backward()
        torch.testing.assert_close(result.loss.double(), wanted.detach(), rtol=2e-5, atol=1e-6)
        assert hidden.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
        assert int(result.slot_correct.sum()) <= int((known & full.supervised).sum())


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
    assert int(result.blocks) == int(result.accepted.sum()) == int(result.slot_total.sum()) == 0


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
