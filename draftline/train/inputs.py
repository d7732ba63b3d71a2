"""From a configuration to everything a run computes with: target, samples, drafter shape."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.choices import Choices
from draftline.config import Config
from draftline.data.conversations import Reject, read_conversations
from draftline.data.tokens import Sample, token_counts, tokenize
from draftline.demo import resolve_data
from draftline.model.drafter import DrafterShape
from draftline.model.init import build_shape
from draftline.model.target import Target, load_target
from draftline.model.vocabulary import choose_draft_vocabulary, choose_mask_token
from draftline.runtime.devices import pick_device

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """`token_ids [draft_vocab]` int64 on the device, or None for the whole vocabulary. `cut_turns`
    answers begin behind data.max_length. `key` is the same exactly when the features would be."""

    device: torch.device
    target: Target
    samples: tuple[Sample, ...]
    rejects: tuple[Reject, ...]
    rows: int
    supervised_tokens: int
    cut_turns: int
    shape: DrafterShape
    token_ids: Tensor | None
    key: str

    @property
    def tokens(self) -> int:
        return sum(len(s.input_ids) for s in self.samples)

    def summary(self) -> str:
        """One line about the data, rejected rows by reason included."""
        text = (
            f"data: {len(self.samples)} samples of {self.rows} rows, {self.tokens} tokens, "
            f"{self.supervised_tokens} supervised"
        )
        if cut := sum(s.truncated for s in self.samples):
            text += f"; {cut} samples end early (data.max_length, or cut by their generator)"
        if self.cut_turns:
            text += f"; {self.cut_turns} answers lie behind data.max_length"
        if self.rejects:
            counts = Counter(r.reason for r in self.rejects)
            text += "; left out " + ", ".join(f"{n} {reason}" for reason, n in counts.items())
        return text


def open_target(config: Config, choices: Choices) -> Target:
    """The target of `config` on its device."""
    return load_target(
        config.target.path,
        device=pick_device(config.run.device, choices),
        dtype=config.target.dtype,
        taps=config.target.tap_layers,
        num_taps=config.target.num_taps,
        trust_remote_code=config.target.trust_remote_code,
        choices=choices,
    )


def prepare(config: Config, choices: Choices) -> Inputs:
    """Loads the target, reads and tokenises the data, and settles the drafter's shape."""
    reading = read_conversations([p for name in config.data.train for p in resolve_data(name)])
    for note, count in reading.notes.items():
        log.info("data: %d x %s", count, note)
    target = open_target(config, choices)
    tokenized = tokenize(
        reading.conversations,
        target.tokenizer,
        max_length=config.data.max_length,
        block_size=config.block_size,
        template_kwargs=config.data.template,
    )
    rejects = (*reading.rejects, *tokenized.rejects)
    rows = max(target.vocab_size, int(target.embedding.shape[0]))
    used = np.zeros(rows, np.int64)
    for sample in tokenized.samples:
        np.add.at(used, sample.input_ids, 1)
    mask_token = choose_mask_token(target, config.drafter.mask_token_id, used, choices)
    token_ids = None
    if config.drafter.vocab_size is not None:
        token_ids = _draft_vocabulary(config.drafter.vocab_size, tokenized.samples, target, choices)
    return Inputs(
        device=target.device,
        target=target,
        samples=tokenized.samples,
        rejects=rejects,
        rows=reading.rows,
        supervised_tokens=tokenized.supervised_tokens,
        cut_turns=tokenized.cut_turns,
        shape=build_shape(config, target, mask_token),
        token_ids=token_ids,
        key=_key(config, tokenized.samples, target),
    )


def _draft_vocabulary(
    size: int, samples: Sequence[Sample], target: Target, choices: Choices
) -> Tensor:
    counts: NDArray[np.int64] = token_counts(samples, target.vocab_size)
    ids = choose_draft_vocabulary(counts, size, target.stop_ids)
    covered = 100 * counts[ids.numpy()].sum() / max(1, counts.sum())
    choices.record(
        "drafter.vocab_size",
        wanted=str(size),
        got=f"{size} tokens covering {covered:.2f} % of the training answers",
        reason="most frequent answer tokens and the stop tokens",
    )
    return ids.to(target.device)


def _key(config: Config, samples: Sequence[Sample], target: Target) -> str:
    digest = hashlib.sha256()
    soft = config.loss.soft_labels > 0
    digest.update(f"{target.dtype} {target.taps} {soft}".encode())
    # Of the target its weights count, not its path: files may move, or change behind a name. Some
    # values of every tensor are enough, since any further training moves nearly all of them.
    some = [p.detach().flatten()[:: max(1, p.numel() // 64)].float() for p in target.parameters()]
    digest.update(torch.cat(some).cpu().numpy().tobytes())
    for sample in samples:
        digest.update(sample.input_ids.tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:16]
