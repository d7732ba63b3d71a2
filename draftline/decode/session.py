"""Speculative decoding: draft a tree of tokens, verify it in one target call, commit a path, repeat.

All rows of a batch decode together, each at its own position, in buffers of fixed size: a round has
the same shapes whatever was accepted, makes no host decision, and on CUDA is a captured graph, one
for each window of cache slots.
Without a drafter the same loop decodes plainly, one token per target call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.decode.propose import BlockDraft, DraftModel, NoDraft
from draftline.decode.verify import Judge, Verdict
from draftline.errors import DataError
from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target
from draftline.runtime.devices import synchronize
from draftline.runtime.graphs import Replayed

# Rounds between two looks at the rows' progress; a look costs a host synchronisation.
_ROUNDS_PER_LOOK = 8
# A round attends to a leading window of the slots, grown in steps of this many.
_WINDOW = 128


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch produced, and its speculative statistics.

    `tokens`: new tokens per prompt, the stop token included. `committed_counts[n]`: rounds that
    committed n tokens (n = 1..block). `slot_accepted[j]`: rounds in which a draft j + 1 behind the
    anchor was accepted. `rounds`: target calls after the prefill, over all rows. `seconds`: decoding
    without prefill.
    """

    tokens: list[list[int]]
    committed_counts: list[int]
    slot_accepted: list[int]
    rounds: int
    prefill_s: float
    seconds: float

    @property
    def new_tokens(self) -> int:
        return sum(len(t) for t in self.tokens)

    @property
    def committed(self) -> int:
        """Tokens committed by the rounds; the first token of a prompt comes from its prefill."""
        return sum(n * count for n, count in enumerate(self.committed_counts))


class DecodeSession:
    """Decodes batches of at most `rows` prompts, with buffers and graph reused between batches."""

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None,
        *,
        rows: int,
        slots: int,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        block_size: int | None = None,
        width: int = 1,
    ) -> None:
        """`slots`: positions a row can hold (longest prompt + new tokens + the larger of block and
        width). `width`: a target call computes at least so many tokens per row; with the block size of
        another decoder, both run the same kernels and agree to the last bit. `top_p` and `top_k`
        truncate the distribution that is sampled from (see `probabilities`).
        """
        target.check_decodable(slots)
        self.target = target
        # Whole windows: kernels want aligned rows of keys.
        slots = -(-slots // _WINDOW) * _WINDOW
        self.rows, self.slots = rows, slots
        device = target.device
        self.device = device
        # A graph holds what happens on one device.
        self._captures = device.type == "cuda" and len(target.devices) == 1
        self._generator = torch.Generator(device).manual_seed(seed)
        self._judge = Judge(temperature, top_p, top_k, self._generator)
        self._draft = self._drafting(draft, block_size)
        self.block = self._draft.height + 1
        self.width = max(self._draft.nodes, width)
        self._cache = StaticKV(rows, slots, device)
        self._stop = torch.tensor(target.stop_ids, device=device, dtype=torch.long)
        self._ahead = torch.arange(self.width, device=device)
        self._offset = self._ahead[: self.block]
        self._slot = torch.arange(slots, device=device)
        self._row = torch.arange(rows, device=device)

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self._tokens = buffer(rows, slots)
        self._start, self._limit = buffer(rows), buffer(rows)
        self._committed, self._slot_hits = buffer(self.block + 1), buffer(max(self.block - 1, 1))
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        self._rounds: dict[int, Replayed] = {}

    def _drafting(self, draft: DraftModel | None, block_size: int | None) -> NoDraft | BlockDraft:
        if draft is None:
            return NoDraft(self.device)
        trained = draft.drafter.shape.block_size
        return BlockDraft(
            self.target,
            draft,
            rows=self.rows,
            slots=self.slots,
            block=min(block_size or trained, trained),
            choose=self._judge.choose,
        )

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees graphs and caches now rather than when the collector finds the cycle."""
        self._rounds.clear()

    @torch.no_grad()
    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> Decoded:
        """Decodes up to `rows` prompts; raises DataError when one does not fit the buffers.

        `seed` starts the noise anew, so that it does not depend on what was decoded before.
        `progress` gets the number of new tokens at every look at the rows, the first one included.
        """
        if not 0 < len(prompts) <= self.rows:
            raise DataError(f"{len(prompts)} prompts for a decoder of {self.rows} rows")
        longest = max(len(p) for p in prompts)
        if min(len(p) for p in prompts) == 0:
            raise DataError("an empty prompt cannot be decoded; render it with the chat template")
        if longest + max_new_tokens + self.width > self.slots:
            raise DataError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones need "
                f"{longest + max_new_tokens + self.width} slots, the decoder has {self.slots}"
            )
        looks = _ROUNDS_PER_LOOK if self.device.type == "cuda" else 1
        windows = self._windows(longest, max_new_tokens, looks)
        if self._captures and not all(w in self._rounds for w in windows):
            self._prefill(prompts, longest, max_new_tokens)  # allocates the caches
            for window in windows:  # advances the rows, so the real prefill starts them anew
                self._replayed(window).warm()
        if seed is not None:
            self._generator.manual_seed(seed)
        began = time.perf_counter()
        lengths = self._prefill(prompts, longest, max_new_tokens)
        synchronize(self.device)
        middle = time.perf_counter()
        reached = longest
        # Of a row: its prompt, the token of the prefill, and what the rounds committed.
        known = sum(lengths) - len(lengths)
        done = False
        while not done:
            replayed = self._replayed(self._window_for(reached, looks))
            for _ in range(looks):
                replayed()
            starts = self._start.tolist()
            reached = max(starts)
            progress(sum(starts[: len(lengths)]) - known)
            done = bool(self._done.all())
        ended = time.perf_counter()
        ends = (self._start + 1).tolist()
        produced = self._tokens.tolist()
        counts = self._committed.tolist()
        return Decoded(
            tokens=[produced[i][n : ends[i]] for i, n in enumerate(lengths)],
            committed_counts=counts,
            slot_accepted=self._slot_hits.tolist() if self.block > 1 else [],
            rounds=sum(counts),
            prefill_s=middle - began,
            seconds=ended - middle,
        )

    def _window_for(self, reached: int, rounds: int) -> int:
        """Slots that `rounds` rounds can need when the foremost row's anchor is at `reached`."""
        needed = reached + rounds * self.block + self.width
        return min(self.slots, -(-needed // _WINDOW) * _WINDOW)

    def _windows(self, longest: int, max_new_tokens: int, rounds: int) -> list[int]:
        first = self._window_for(longest, rounds)
        last = self._window_for(longest + max_new_tokens, rounds)
        return [min(w, self.slots) for w in range(first, last + _WINDOW, _WINDOW)]

    def _replayed(self, window: int) -> Replayed:
        if window not in self._rounds:
            self._rounds[window] = Replayed(
                lambda: self._decode_round(window), self.device, generators=[self._generator]
            )
        return self._rounds[window]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], longest: int, max_new_tokens: int
    ) -> list[int]:
        lengths = [len(p) for p in prompts]
        padded = torch.zeros(self.rows, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        padded = padded.to(self.device)
        length = torch.ones(self.rows, dtype=torch.long)
        length[: len(lengths)] = torch.tensor(lengths)
        length = length.to(self.device)
        self._cache.begin_prefill(longest)
        positions = self._slot[:longest].expand(self.rows, longest)
        hidden, features = self.target.extend(padded, positions, self._cache, None)
        last = hidden[self._row, length - 1]
        first, _ = self._judge.choose(self.target.head.logits(last))
        self._draft.prefill(features, positions, length)
        self._tokens.zero_()
        self._tokens[:, :longest] = padded
        self._tokens[self._row, length] = first
        self._start.copy_(length)
        self._limit.copy_(length + max_new_tokens)
        self._committed.zero_()
        self._slot_hits.zero_()
        present = torch.arange(self.rows, device=self.device) < len(lengths)
        self._done.copy_(~present | torch.isin(first, self._stop) | (max_new_tokens == 1))
        return lengths

    @torch.no_grad()
    def _decode_round(self, window: int) -> None:
        anchor = self._tokens.gather(1, self._start[:, None])
        draft = self._draft.propose(anchor, self._start, window)
        tree = draft.tree
        spare = anchor.expand(-1, self.width - tree.nodes)  # overwritten before anything sees them
        tried = torch.cat([anchor, draft.tokens, spare], dim=1)
        slots = self._start[:, None] + self._ahead
        positions = tree.positions(slots)
        self._cache.begin(slots, window, None if tree.is_chain else positions)
        mask = tree.visible(slots, self._slot[:window])
        hidden, features = self.target.extend(tried, positions, self._cache, mask)
        logits = self.target.head.logits(hidden)[:, : tree.nodes]
        verdict = self._judge.verify(tree, draft.tokens, draft.probs, logits)
        path = tree.path(verdict.last)
        if not tree.is_chain:
            self._cache.move(slots.gather(1, path), slots[:, : self.block])
        self._draft.remember(tree.along(path, features[:, : tree.nodes]), self._start)
        self._commit(verdict, tree.along(path, tried[:, : tree.nodes]))

    def _commit(self, verdict: Verdict, path: Tensor) -> None:
        """Of the tokens `path [rows, block]`, the anchor's first, adds what stands, and the bonus."""
        accepted = verdict.accepted[:, None]
        padded = torch.cat([path[:, 1:], path.new_zeros(self.rows, 1)], dim=1)
        new = torch.where(self._offset == accepted, verdict.bonus[:, None], padded)
        room = (self._limit - self._start - 1).clamp_min(0)
        count = torch.minimum(verdict.accepted + 1, room)
        stops = torch.isin(new, self._stop) & (self._offset < count[:, None])
        first_stop = torch.where(stops, self._offset, self.block).amin(1)
        count = torch.minimum(count, first_stop + 1)
        count = torch.where(self._done, 0, count)
        slots = (self._start[:, None] + 1 + self._offset).clamp_max(self.slots - 1)
        kept = self._tokens.gather(1, slots)
        self._tokens.scatter_(1, slots, torch.where(self._offset < count[:, None], new, kept))
        active = (~self._done).long()
        self._committed.scatter_add_(0, count, active)
        if self.block > 1:
            hits = (self._offset[:-1] < verdict.accepted[:, None]) & ~self._done[:, None]
            self._slot_hits.add_(hits.sum(0))
        self._start.add_(count)
        finished = (first_stop < self.block) & (count > first_stop)
        self._done.logical_or_(finished | (self._start + 1 >= self._limit))
