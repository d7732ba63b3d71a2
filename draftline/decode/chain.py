"""Chain speculative decoding: draft a block, verify it in one target call, commit, repeat.

All rows of a batch decode together, each at its own position, in buffers of fixed size: a round has
the same shapes whatever was accepted, makes no host decision, and on CUDA is a captured graph, one
for each window of cache slots.
Without a drafter the same loop decodes plainly, one token a target call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.decode.verify import (
    Verdict,
    accept_greedy,
    accept_sampled,
    draw,
    probabilities,
)
from draftline.errors import DataError
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.masks import draft_masks
from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target
from draftline.runtime.devices import synchronize
from draftline.runtime.graphs import Replayed

# Rounds between two looks at the rows' progress; a look costs a host synchronisation.
_ROUNDS_PER_LOOK = 8
# A round attends to a leading window of the slots, grown in steps of this many.
_WINDOW = 128


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A drafter ready to decode: its module and the tokens it can draft.

    `token_ids [draft_vocab]` maps draft ids to target ids; None drafts the whole vocabulary.
    """

    drafter: Drafter
    token_ids: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one batch produced, and its speculative statistics.

    `tokens`: new tokens a prompt, the stop token included. `committed_counts[n]`: rounds that
    committed n tokens (n = 1..block). `slot_accepted[j]`: rounds in which slot j + 1 was accepted.
    `rounds`: target calls after the prefill, over all rows. `seconds`: decoding without prefill.
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


class ChainDecoder:
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
        width). `width`: a target call computes at least so many tokens a row; with the block size of
        another decoder, both run the same kernels and agree to the last bit. `top_p` and `top_k`
        truncate the distribution that is sampled from (see `probabilities`).
        """
        target.check_decodable(slots)
        self.target = target
        self.draft = draft
        # Whole windows: kernels want aligned rows of keys.
        slots = -(-slots // _WINDOW) * _WINDOW
        self.rows, self.slots, self.temperature = rows, slots, temperature
        self._top_p, self._top_k = top_p, top_k
        trained = draft.drafter.shape.block_size if draft is not None else 1
        self.block = min(block_size or trained, trained)
        self.width = max(self.block, width)
        device = target.device
        self.device = device
        # A graph holds what happens on one device.
        self._captures = device.type == "cuda" and len(target.devices) == 1
        self._generator = torch.Generator(device).manual_seed(seed)
        self._target_cache = StaticKV(rows, slots, device)
        self._draft_cache = StaticKV(rows, slots, device) if draft else None
        self._head = target.head
        if draft is not None and draft.token_ids is not None:
            self._draft_head = target.head.restricted(draft.token_ids)
        else:
            self._draft_head = target.head
        self._stop = torch.tensor(target.stop_ids, device=device, dtype=torch.long)
        self._ahead = torch.arange(self.width, device=device)
        self._offset = self._ahead[: self.block]
        self._slot = torch.arange(slots, device=device)
        self._row = torch.arange(rows, device=device)[:, None]

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self._tokens = buffer(rows, slots)
        self._start, self._limit, self._drafted_from = buffer(rows), buffer(rows), buffer(rows)
        self._committed, self._slot_hits = buffer(self.block + 1), buffer(max(self.block - 1, 1))
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        channels = len(target.taps) * target.hidden_size
        self._features = torch.zeros(rows, self.block, channels, dtype=target.dtype, device=device)
        self._window = slots
        self._rounds: dict[int, Replayed] = {}

    def __enter__(self) -> ChainDecoder:
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

            def run() -> None:
                self._window = window
                self._decode_round()

            self._rounds[window] = Replayed(run, self.device, generators=[self._generator])
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
        self._target_cache.begin_prefill(longest)
        positions = self._slot[:longest].expand(self.rows, longest)
        hidden, features = self.target.extend(padded, positions, self._target_cache, None)
        last = hidden[self._row[:, 0], length - 1]
        first = self._choose(self._head.logits(last))
        if self.draft is not None and self._draft_cache is not None:
            self._draft_cache.begin_prefill(longest)
            self.draft.drafter.context(features, positions, self._draft_extend)
        self._tokens.zero_()
        self._tokens[:, :longest] = padded
        self._tokens[self._row[:, 0], length] = first
        self._start.copy_(length)
        self._drafted_from.copy_(length)
        self._limit.copy_(length + max_new_tokens)
        self._features.zero_()
        self._committed.zero_()
        self._slot_hits.zero_()
        present = torch.arange(self.rows, device=self.device) < len(lengths)
        self._done.copy_(~present | torch.isin(first, self._stop) | (max_new_tokens == 1))
        return lengths

    def _draft_extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert self._draft_cache is not None, "only called with a drafter"
        return self._draft_cache.update(keys, values, layer)

    @torch.no_grad()
    def _decode_round(self) -> None:
        positions = self._start[:, None] + self._ahead
        anchor = self._tokens.gather(1, self._start[:, None])
        drafts = anchor[:, :0]
        draft_probs: Tensor | None = None
        if self.draft is not None:
            drafts, draft_probs = self._propose(self.draft, anchor, positions[:, : self.block])
        spare = anchor.expand(-1, self.width - self.block)  # overwritten before anything sees them
        block = torch.cat([anchor, drafts, spare], dim=1)
        self._target_cache.begin(positions, self._window)
        mask = self._slot[None, None, None, : self._window] <= positions[:, None, :, None]
        hidden, features = self.target.extend(block, positions, self._target_cache, mask)
        logits = self._head.logits(hidden)[:, : self.block]
        verdict = self._verify(drafts, draft_probs, logits)
        self._commit(verdict, drafts, features[:, : self.block])

    def _propose(
        self, draft: DraftModel, anchor: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        drafter, cache = draft.drafter, self._draft_cache
        assert cache is not None, "a drafter always has a cache"
        context_positions = self._drafted_from[:, None] + self._offset
        cache.begin(context_positions, self._window)
        drafter.context(self._features, context_positions, self._draft_extend)
        masked = torch.full_like(anchor, drafter.shape.mask_token_id).expand(-1, self.block - 1)
        embedded = self.target.embed(torch.cat([anchor, masked], dim=1))
        cache.begin(positions, self._window)
        full, sliding = draft_masks(
            self._start, positions, self._slot[: self._window], drafter.shape.sliding_window
        )
        hidden = drafter.draft(embedded, positions, self._draft_extend, full, sliding)
        logits = self._draft_head.logits(hidden[:, 1:])
        if self.temperature == 0:
            return self._target_ids(draft, logits.argmax(-1)), None
        probs = self._probabilities(logits)
        chosen = draw(probs, self._generator)
        if draft.token_ids is not None:
            whole = probs.new_zeros(*probs.shape[:2], self.target.vocab_size)
            probs = whole.index_copy_(2, draft.token_ids, probs)
        return self._target_ids(draft, chosen), probs

    @staticmethod
    def _target_ids(draft: DraftModel, ids: Tensor) -> Tensor:
        return ids if draft.token_ids is None else draft.token_ids[ids]

    def _choose(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        return draw(self._probabilities(logits), self._generator)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.temperature, self._top_p, self._top_k)

    def _verify(self, drafts: Tensor, draft_probs: Tensor | None, logits: Tensor) -> Verdict:
        if drafts.shape[1] == 0:
            return Verdict(torch.zeros_like(self._start), self._choose(logits[:, 0]))
        if draft_probs is None:
            return accept_greedy(drafts, logits)
        return accept_sampled(drafts, draft_probs, self._probabilities(logits), self._generator)

    def _commit(self, verdict: Verdict, drafts: Tensor, features: Tensor) -> None:
        accepted = verdict.accepted[:, None]
        padded = torch.cat([drafts, drafts.new_zeros(self.rows, 1)], dim=1)
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
        self._features.copy_(features)
        self._drafted_from.copy_(self._start)
        self._start.add_(count)
        finished = (first_stop < self.block) & (count > first_stop)
        self._done.logical_or_(finished | (self._start + 1 >= self._limit))
