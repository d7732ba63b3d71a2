"""Trees of drafts: acceptance against plain Python, and a session that decodes through them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.decode.propose import BlockDraft, Draft, DraftModel
from draftline.decode.session import DecodeSession
from draftline.decode.tree import Tree
from draftline.decode.verify import accept_greedy, accept_sampled, draw
from draftline.model.target.target import Target
from tests.support.architectures import build_model
from tests.support.fakes import VOCAB_SIZE
from tests.support.tiny import (
    TinyTokenizer,
    build_drafter,
    build_samples,
    build_shape,
    chi_square_p,
)

# The anchor has three children, of which the first two have children of their own.
PARENTS = [0, 0, 0, 0, 1, 1, 2, 4, 4, 6]
OTHER = [0, 0, 1, 1, 0, 4, 5, 2, 2, 5]
CHAIN = [0, 0, 1, 2, 3]


def tree_of(*parents: list[int]) -> Tree:
    height = max(max(map(len, paths(row))) for row in parents) - 1
    branching = max(max(row[1:].count(n) for n in range(len(row))) for row in parents)
    return Tree.of(torch.tensor(parents), branching=branching, height=height)


def paths(parents: list[int]) -> list[list[int]]:
    """The nodes from the anchor to each node."""
    found: list[list[int]] = [[0]]
    for node, parent in enumerate(parents[1:], start=1):
        found.append([*found[parent], node])
    return found


@pytest.mark.parametrize("parents", [PARENTS, CHAIN, [0], [0, 0, 0]])
def test_a_tree_knows_its_paths(parents: list[int]) -> None:
    tree, wanted = tree_of(parents), paths(parents)
    assert tree.nodes == len(parents)
    assert tree.depth[0].tolist() == [len(path) - 1 for path in wanted]
    assert [row.nonzero()[:, 0].tolist() for row in tree.ancestors[0]] == wanted
    assert tree.rank[0, 1:].tolist() == [
        parents[1:n].count(parents[n]) for n in range(1, tree.nodes)
    ]
    last = torch.arange(tree.nodes)
    for path, nodes in zip(tree.path(last).tolist(), wanted, strict=True):
        assert path[: len(nodes)] == nodes
    assert tree.is_chain == (parents in (CHAIN, [0]))


def test_a_chain_is_the_tree_whose_every_node_has_one_child() -> None:
    """What a chain leaves out is what the general rule would have said."""
    chain, general = Tree.chain(5, torch.device("cpu")), tree_of(CHAIN)
    general = Tree.of(general.parents, branching=2, height=4)
    assert chain.is_chain
    assert not general.is_chain
    slots = torch.tensor([[3], [6]]) + torch.arange(5)
    keys = torch.arange(16)
    values = torch.rand(2, 5, 3)
    last = torch.tensor([2, 4])
    for mine, theirs in (
        (chain.positions(slots), general.positions(slots)),
        (chain.visible(slots, keys), general.visible(slots, keys)),
    ):
        assert torch.equal(mine, theirs)
    whole, part = chain.path(last), general.path(last)
    for row, depth in enumerate(last.tolist()):
        assert whole[row, : depth + 1].tolist() == part[row, : depth + 1].tolist()
        assert torch.equal(
            chain.along(whole, values)[row, : depth + 1],
            general.along(part, values)[row, : depth + 1],
        )


def test_greedy_takes_the_longest_path_of_every_row_s_own_tree() -> None:
    random = torch.Generator().manual_seed(0)
    rows, nodes, vocab = 400, len(PARENTS), 4
    shapes = []
    for _ in range(rows):
        shapes.append([0] + [int(torch.randint(n, (), generator=random)) for n in range(1, nodes)])
    drafts = torch.randint(vocab, (rows, nodes - 1), generator=random)
    logits = torch.randn(rows, nodes, vocab, generator=random)
    verdict = accept_greedy(tree_of(*shapes), drafts, logits)
    choice = logits.argmax(-1)
    for row, parents in enumerate(shapes):
        standing = [
            path
            for path in paths(parents)
            if all(drafts[row, n - 1] == choice[row, parents[n]] for n in path[1:])
        ]
        longest = max(map(len, standing))
        assert int(verdict.accepted[row]) == longest - 1
        last = int(verdict.last[row])
        assert last in [path[-1] for path in standing if len(path) == longest]
        assert int(verdict.bonus[row]) == int(choice[row, last])
    assert set(verdict.accepted.tolist()) >= {0, 1, 2, 3}


@pytest.mark.parametrize("drawn", ["apart", "without repeating", "the likeliest"])
def test_sampled_paths_are_distributed_as_the_target(drawn: str) -> None:
    """The first two tokens behind an anchor with two drafts of the first and two behind the first of
    these, each draft given by every rule whose q is known, against the target's own chances."""
    rows, vocab = 60_000, 4
    random = torch.Generator().manual_seed(3)
    tree = tree_of([0, 0, 0, 1, 1])
    # The target's tokens depend on the one before, the drafter's do not.
    first_p = torch.softmax(1.5 * torch.randn(vocab, generator=random), -1)
    then_p = torch.softmax(1.5 * torch.randn(vocab, vocab, generator=random), -1)
    q = torch.softmax(torch.randn(2, vocab, generator=random), -1)
    probs = torch.zeros(rows, 4, vocab)
    drafts = torch.zeros(rows, 4, dtype=torch.long)
    for level, pair in ((0, (0, 1)), (1, (2, 3))):
        weights = q[level].expand(rows, vocab).clone()
        for node in pair:
            if drawn == "the likeliest":
                weights = torch.nn.functional.one_hot(q[level].argsort(descending=True), vocab)
                weights = weights[node - pair[0]].float().expand(rows, vocab)
            probs[:, node] = weights / weights.sum(-1, keepdim=True)
            drafts[:, node] = draw(probs[:, node].contiguous(), random)
            if drawn == "without repeating":
                weights = weights.scatter(1, drafts[:, node : node + 1], 0.0)
    target_probs = torch.cat([first_p.expand(rows, 1, vocab), then_p[drafts]], dim=1)
    verdict = accept_sampled(tree, drafts, probs, target_probs, random)
    token = torch.cat([torch.full((rows, 1), -1), drafts], dim=1)
    path = tree.path(verdict.last)
    along = tree.along(path, token)
    first = torch.where(verdict.accepted >= 1, along[:, 1], verdict.bonus)
    assert chi_square_p(torch.bincount(first, minlength=vocab), rows * first_p) > 1e-3
    second = torch.where(verdict.accepted == 2, along[:, 2], verdict.bonus)
    reached = verdict.accepted >= 1
    assert set(verdict.last.tolist()) == {0, 1, 2, 3, 4}
    for before in range(vocab):
        here = second[reached & (first == before)]
        if len(here):
            counts = torch.bincount(here, minlength=vocab)
            assert chi_square_p(counts, len(here) * then_p[before]) > 1e-3
    # Two drafts are accepted more often than one of them would be.
    alone = accept_sampled(
        tree_of([0, 0, 1, 2, 3]), drafts, probs, target_probs, torch.Generator().manual_seed(9)
    )
    if drawn != "apart":
        assert int((verdict.accepted > 0).sum()) > int((alone.accepted > 0).sum())


class Bushy(BlockDraft):
    """Drafts trees in the place of the block, not the same in every row: the target's own tokens
    among wrong ones, in nodes that change from round to round."""

    told: Tensor  # [rows, positions]
    vocab: int

    def __init__(self, target: Target, draft: DraftModel, **settings: Any) -> None:
        super().__init__(target, draft, **settings)
        self.nodes, self.height = len(PARENTS), 3
        self._offset = self._offset[:4]
        self._features = self._features[:, :4].clone()
        self._random = torch.Generator().manual_seed(1)
        self._bushy = tree_of(PARENTS, OTHER, OTHER, PARENTS)

    def propose(self, anchor: Tensor, start: Tensor, window: int) -> Draft:
        before = self._start[:, None] + self._offset
        self._cache.begin(before, window)
        self._drafter.context(self._features, before, self._extend)
        rows = len(start)
        tokens = torch.randint(self.vocab, (rows, self.nodes - 1), generator=self._random)
        for row in range(rows):
            end = int(torch.randint(self.nodes, (), generator=self._random))
            parents = self._bushy.parents[row].tolist()
            for depth, node in enumerate(paths(parents)[end][1:], start=1):
                tokens[row, node - 1] = self.told[row, int(start[row]) + depth]
        return Draft(self._bushy, tokens, None)


@pytest.mark.parametrize("width", [1, 12])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_session_through_trees_says_what_plain_decoding_says(
    width: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings share positions, and what stands is moved to the slots of a chain: in layers that see
    all and in layers that see a window of 2, which slots taken for positions would miss."""
    window = {} if family == "llama" else {"sliding_window": 2}
    target = Target(build_model(family, **window), TinyTokenizer(VOCAB_SIZE), taps=(0, 2))
    target.stop_ids = ()
    prompts = [s.input_ids.tolist() for s in build_samples((5, 17, 1, 9), seed=1)]
    plain = DecodeSession(target, None, rows=4, slots=100).decode(prompts, 44).tokens
    told = torch.zeros(4, 128, dtype=torch.long)
    for row, (prompt, tokens) in enumerate(zip(prompts, plain, strict=True)):
        told[row, : len(prompt) + 44] = torch.tensor(prompt + tokens)
    monkeypatch.setattr("draftline.decode.session.BlockDraft", Bushy)
    monkeypatch.setattr(Bushy, "told", told, raising=False)
    monkeypatch.setattr(Bushy, "vocab", VOCAB_SIZE, raising=False)
    drafter = build_drafter(build_shape(target, block_size=10))
    session = DecodeSession(target, DraftModel(drafter), rows=4, slots=100, width=width)
    assert (session.block, session.width) == (4, max(10, width))
    decoded = session.decode(prompts, 40)
    assert decoded.tokens == [tokens[:40] for tokens in plain]
    assert all(decoded.committed_counts[1:]), "rounds of every length"
    assert decoded.rounds < 39 * 4 / 1.5
