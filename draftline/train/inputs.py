"""From a configuration to what a run is about, before a weight is loaded: facts, samples, shape."""

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
from draftline.data.conversations import Reading, Reject, read_conversations
from draftline.data.packing import PackPlan, plan_packs
from draftline.data.tokens import Sample, Tokenized, token_counts, tokenize
from draftline.demo import resolve_data
from draftline.errors import TargetError
from draftline.model.drafter import DrafterShape
from draftline.model.facts import TargetFacts, read_facts
from draftline.model.init import build_shape
from draftline.model.target import Target, load_target
from draftline.model.vocabulary import choose_draft_vocabulary, choose_mask_token
from draftline.progress import doing
from draftline.runtime.devices import DeviceFacts, pick_device, visible_devices
from draftline.train.placement import device_type

log = logging.getLogger(__name__)

# English in the vocabularies of today; code and other languages take more tokens.
_CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is known before a weight is loaded. `token_ids [draft_vocab]` int64 on the CPU, or None
    for the whole vocabulary; `cut_turns` answers begin behind data.max_length; `estimated` says
    that lengths are guessed and the samples' ids mean nothing: fit for a plan, not for a run."""

    facts: TargetFacts
    samples: tuple[Sample, ...]
    rejects: tuple[Reject, ...]
    rows: int
    supervised_tokens: int
    cut_turns: int
    shape: DrafterShape
    token_ids: Tensor | None
    estimated: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(s.input_ids) for s in self.samples)

    def summary(self) -> str:
        """One line about the data, rejected rows by reason included."""
        about = "about " if self.estimated else ""
        text = (
            f"data: {len(self.samples)} samples of {self.rows} rows, {about}{self.tokens} tokens, "
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


def open_facts(config: Config, device_type: str) -> TargetFacts:
    """The facts of the target of `config`, for workers on `device_type`; loads no weight."""
    return read_facts(
        config.target.path,
        dtype=config.target.dtype,
        taps=config.target.tap_layers,
        num_taps=config.target.num_taps,
        trust_remote_code=config.target.trust_remote_code,
        device_type=device_type,
    )


def open_target(
    config: Config, choices: Choices, devices: Sequence[torch.device] | None = None
) -> Target:
    """The target of `config`, over `devices` or on the one that run.device says."""
    if devices is None:
        devices = (pick_device(config.run.device, choices),)
    with doing(f"loading the weights of {config.target.path}"):
        return load_target(
            config.target.path,
            device=devices[0] if len(devices) == 1 else devices,
            dtype=config.target.dtype,
            taps=config.target.tap_layers,
            num_taps=config.target.num_taps,
            trust_remote_code=config.target.trust_remote_code,
            choices=choices,
        )


def epoch_packs(config: Config, samples: Sequence[Sample], epoch: int) -> PackPlan:
    """The packs of one epoch, in their order."""
    return plan_packs(
        [len(sample.input_ids) for sample in samples],
        token_budget=config.token_budget,
        max_batch_size=config.max_batch_size,
        seed=config.run.seed,
        epoch=epoch,
    )


def prepare(
    config: Config,
    choices: Choices,
    available: Sequence[DeviceFacts] | None = None,
    *,
    estimate: bool = False,
) -> Inputs:
    """Reads the target's facts and the data, tokenises, and settles the drafter's shape.

    No weight is loaded. `available` are the GPUs, by default those that are visible. A target
    directory without a tokenizer is a TargetError, unless `estimate` allows guessed lengths.
    """
    with doing("reading data.train"):
        reading = read_conversations([p for name in config.data.train for p in resolve_data(name)])
    for note, count in reading.notes.items():
        log.info("data: %d x %s", count, note)
    with doing(f"reading {config.target.path}: configuration and tokenizer"):
        facts = open_facts(
            config, device_type(config, visible_devices() if available is None else available)
        )
    estimated = facts.tokenizer is None
    if not estimated:
        with doing(f"tokenizing {len(reading.conversations)} conversations"):
            tokenized = tokenize(
                reading.conversations,
                facts.tokenizer,
                max_length=config.data.max_length,
                block_size=config.block_size,
                template_kwargs=config.data.template,
            )
        used = np.zeros(max(facts.vocab_size, facts.embedding_rows), np.int64)
        for sample in tokenized.samples:
            np.add.at(used, sample.input_ids, 1)
        mask_token = choose_mask_token(facts, config.drafter.mask_token_id, used, choices)
    elif estimate:
        tokenized = _guess(config, reading, choices)
        mask_token = config.drafter.mask_token_id or 0
    else:
        raise TargetError(
            f"target.path={config.target.path} has no tokenizer (tokenizer.json, "
            "tokenizer_config.json); copy the target's into it"
        )
    token_ids = None
    if config.drafter.vocab_size is not None:
        token_ids = _draft_vocabulary(config.drafter.vocab_size, tokenized.samples, facts, choices)
    return Inputs(
        facts=facts,
        samples=tokenized.samples,
        rejects=(*reading.rejects, *tokenized.rejects),
        rows=reading.rows,
        supervised_tokens=tokenized.supervised_tokens,
        cut_turns=tokenized.cut_turns,
        shape=build_shape(config, facts, mask_token),
        token_ids=token_ids,
        estimated=estimated,
    )


def _guess(config: Config, reading: Reading, choices: Choices) -> Tokenized:
    """Samples as long as their conversations would be at so many characters a token."""
    choices.record(
        "data.tokens",
        wanted="the target's tokenizer",
        got=f"one token for {_CHARACTERS_A_TOKEN} characters",
        reason="the target's directory has no tokenizer, so lengths are guessed",
        fallback=True,
    )
    samples = []
    for conversation in reading.conversations:
        characters = sum(len(message.content) for message in conversation.messages)
        wanted = max(config.block_size, characters // _CHARACTERS_A_TOKEN)
        length = min(wanted, config.data.max_length)
        ids = np.zeros(length, np.int32)
        mask = np.ones(length, np.bool_)
        samples.append(Sample(conversation.id, ids, mask, length < wanted))
    total = sum(len(sample.input_ids) for sample in samples)
    return Tokenized(tuple(samples), (), total, total, 0)


def _draft_vocabulary(
    size: int, samples: Sequence[Sample], facts: TargetFacts, choices: Choices
) -> Tensor:
    counts: NDArray[np.int64] = token_counts(samples, facts.vocab_size)
    ids = choose_draft_vocabulary(counts, size, facts.stop_ids)
    covered = 100 * counts[ids.numpy()].sum() / max(1, counts.sum())
    choices.record(
        "drafter.vocab_size",
        wanted=str(size),
        got=f"{size} tokens covering {covered:.2f} % of the training answers",
        reason="most frequent answer tokens and the stop tokens",
    )
    return ids


def feature_key(config: Config, samples: Sequence[Sample], target: Target) -> str:
    """16 hex digits that are the same exactly when the samples' features would be."""
    digest = hashlib.sha256()
    soft = config.loss.soft_labels > 0
    digest.update(f"{target.dtype} {target.taps} {soft}".encode())
    # Of the target its weights count, not its path: files may move, or change behind a name. Some
    # values of every tensor are enough, since any further training moves nearly all of them.
    # On the host before they are joined: a target may span devices.
    some = [
        p.detach().flatten()[:: max(1, p.numel() // 64)].float().cpu() for p in target.parameters()
    ]
    digest.update(torch.cat(some).numpy().tobytes())
    for sample in samples:
        digest.update(sample.input_ids.tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:16]
