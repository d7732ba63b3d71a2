"""How a round's tokens are drafted: a block by the drafter, from the features of what was committed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.decode.tree import Tree
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.heads import Choose, DraftVocabulary
from draftline.model.drafter.masks import draft_masks
from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A drafter ready to decode: its module and the tokens it can draft.

    `token_ids [draft_vocab]` maps draft ids to target ids; None drafts the whole vocabulary.
    """

    drafter: Drafter
    token_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What is proposed behind the anchors: `tokens [rows, nodes - 1]` of the tree's nodes, each drawn
    from its `probs [rows, nodes - 1, vocab]`, None where nothing was left to chance."""

    tree: Tree
    tokens: Tensor
    probs: Tensor | None


class NoDraft:
    """Proposes nothing, so that a round is plain decoding."""

    nodes = 1
    height = 0

    def __init__(self, device: torch.device) -> None:
        self._tree = Tree.chain(1, device)

    def prefill(self, features: Tensor, positions: Tensor, start: Tensor) -> None:
        """Nothing is kept."""

    def remember(self, features: Tensor, start: Tensor) -> None:
        """Nothing is kept."""

    def propose(self, anchor: Tensor, start: Tensor, window: int) -> Draft:
        """The tree of the anchors alone."""
        return Draft(self._tree, anchor[:, :0], None)


class BlockDraft:
    """Proposes the drafter's block as a chain; buffers are of fixed size, and nothing is decided on the
    host. `nodes` and `height` are those of its trees."""

    def __init__(
        self,
        target: Target,
        draft: DraftModel,
        *,
        rows: int,
        slots: int,
        block: int,
        choose: Choose,
    ) -> None:
        """`block`: the anchor and how many slots of the drafter's block are used."""
        device = target.device
        self.nodes, self.height = block, block - 1
        self._drafter, self._choose = draft.drafter, choose
        self._vocabulary = DraftVocabulary.of(target.ends(device), draft.token_ids)
        self._tree = Tree.chain(block, device)
        self._cache = StaticKV(rows, slots, device)
        self._offset = torch.arange(block, device=device)
        self._slot = torch.arange(slots, device=device)
        channels = len(target.taps) * target.hidden_size
        # Of the round before: the features of its anchor and of what was drafted, and where it began.
        self._features = torch.zeros(rows, block, channels, dtype=target.dtype, device=device)
        self._start = torch.zeros(rows, dtype=torch.long, device=device)

    def prefill(self, features: Tensor, positions: Tensor, start: Tensor) -> None:
        """Keeps what the drafter makes of prompts: `features [rows, tokens, taps * hidden]` at
        `positions [rows, tokens]`; the first anchors are at `start [rows]`."""
        self._cache.begin_prefill(positions.shape[1])
        self._drafter.context(features, positions, self._extend)
        self._features.zero_()
        self._start.copy_(start)

    def remember(self, features: Tensor, start: Tensor) -> None:
        """Keeps the `features [rows, height + 1, taps * hidden]` of the round at `start [rows]`: those
        of its anchor and of the path that stands; what follows it is any."""
        self._features.copy_(features)
        self._start.copy_(start)

    def propose(self, anchor: Tensor, start: Tensor, window: int) -> Draft:
        """A draft behind the tokens `anchor [rows, 1]` at positions `start [rows]`, in the first
        `window` slots of the cache."""
        shape = self._drafter.shape
        before = self._start[:, None] + self._offset
        self._cache.begin(before, window)
        self._drafter.context(self._features, before, self._extend)
        masked = torch.full_like(anchor, shape.mask_token_id).expand(-1, self.nodes - 1)
        embedded = self._vocabulary.ends.embed(torch.cat([anchor, masked], dim=1))
        positions = start[:, None] + self._offset
        self._cache.begin(positions, window)
        full, sliding = draft_masks(start, positions, self._slot[:window], shape.sliding_window)
        states = self._drafter.draft(embedded, positions, self._extend, full, sliding)
        head = self._drafter.head
        tokens, probs = head.propose(states[:, 1:], anchor, self._vocabulary, self._choose)
        return Draft(self._tree, tokens, probs)

    def _extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._cache.update(keys, values, layer)
