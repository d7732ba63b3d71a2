"""From a configuration to what a run is about, before a weight is loaded: facts, samples, shape."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.amounts import counted
from draftline.choices import Choices
from draftline.config.schema import Config
from draftline.data.builtin import resolve_data
from draftline.data.conversations import NOTES, Reading, Reject, read_conversations
from draftline.data.dates import pinned, writes_date
from draftline.data.heldout import Split, count_conversations, hold_out, leave_out
from draftline.data.packing import PackPlan, plan_packs
from draftline.data.store import Sample, Samples, token_lengths
from draftline.data.tokens import Tokenized, token_counts, tokenize
from draftline.errors import DataError, TargetError
from draftline.model.drafter.backbone import DrafterShape
from draftline.model.drafter.init import build_shape
from draftline.model.drafter.vocabulary import choose_draft_vocabulary, choose_mask_token
from draftline.model.target.facts import TargetFacts, read_facts
from draftline.model.target.identity import some_values, target_digest
from draftline.model.target.outline import TargetOutline, read_outline
from draftline.model.target.target import Target, load_target
from draftline.progress import doing
from draftline.runtime.devices import DeviceFacts, pick_device, visible_devices
from draftline.train.plan.placement import device_type, target_spans

log = logging.getLogger(__name__)

# English in the vocabularies of today; code and other languages take more tokens.
_CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is known before a weight is loaded. `token_ids [draft_vocab]` int64 on the CPU, or None
    for the whole vocabulary; `cut_turns` answers begin behind data.max_length; `estimated` says
    that lengths are guessed and the samples' ids mean nothing: fit for a plan, not for a run;
    `heldout` are samples that no step trains on. `notes` counts what was changed in rows that are
    kept, or not used of them, by the words of `conversations.NOTES`; `date` is the day that the chat
    template wrote, None where it writes none."""

    facts: TargetFacts
    samples: Samples
    rejects: tuple[Reject, ...]
    rows: int
    supervised_tokens: int
    cut_turns: int
    shape: DrafterShape
    token_ids: Tensor | None
    estimated: bool = False
    heldout: Samples = field(default_factory=lambda: Samples.of(()))
    notes: Mapping[str, int] = field(default_factory=dict)
    date: datetime.date | None = None

    @property
    def tokens(self) -> int:
        return int(self.samples.lengths.sum())

    def summary(self) -> str:
        """One line about the data, rejected rows by reason included."""
        about = "about " if self.estimated else ""
        text = (
            f"data: {counted(len(self.samples), 'sample')} of {counted(self.rows, 'row')}, "
            f"{about}{self.tokens} tokens, "
            f"{self.supervised_tokens} supervised"
        )
        if self.heldout:
            text += f"; {counted(count_conversations(self.heldout), 'conversation')} held out"
        if cut := sum(s.truncated for s in self.samples):
            ends = counted(cut, "sample ends", "samples end")
            text += f"; {ends} early (data.max_length, or cut by their generator)"
        if self.cut_turns:
            lie = counted(self.cut_turns, "answer lies", "answers lie")
            text += f"; {lie} behind data.max_length"
        if self.rejects:
            counts = Counter(r.reason for r in self.rejects)
            text += "; left out " + ", ".join(f"{n} {reason}" for reason, n in counts.items())
        if self.notes:
            text += "; noted " + ", ".join(f"{n} {note}" for note, n in self.notes.items())
        return text


def open_facts(config: Config, device_type: str, choices: Choices | None = None) -> TargetFacts:
    """The facts of the target of `config`, for workers on `device_type`; loads no weight."""
    return read_facts(
        config.target.path,
        dtype=config.target.dtype,
        taps=config.target.tap_layers,
        num_taps=config.target.num_taps,
        trust_remote_code=config.target.trust_remote_code,
        device_type=device_type,
        choices=choices,
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
            context=config.data.max_length,
            choices=choices,
        )


def evaluation_devices(config: Config, choices: Choices) -> tuple[torch.device, ...]:
    """Where the target of `config` decodes: on run.device, and where that is auto, over the devices that
    topology.targets lets its first worker span, or over as many GPUs as its weights need."""
    if config.run.device == "auto":
        spans = target_spans(config, visible_devices(choices), lambda: open_facts(config, "cuda"))
        if len(spans) > 1:
            choices.record(
                "run.device",
                wanted="auto",
                got="+".join(map(str, spans)),
                reason="the target spans them, as in training",
            )
            return spans
    return (pick_device(config.run.device, choices),)


def open_outline(config: Config, choices: Choices, *, with_head: bool) -> Target | TargetOutline:
    """What an export says of the target of `config`: read from its files, or of the loaded target where
    these do not tell, which is recorded."""
    with doing(f"reading {config.target.path}: configuration and shapes"):
        outline = read_outline(config.target, with_head=with_head)
    if outline is not None:
        return outline
    choices.record(
        "export.target",
        wanted="its shapes alone",
        got="loaded whole",
        reason="its classes do not run without their layers, or its head is not stored as plain numbers",
    )
    return open_target(config, choices)


def epoch_packs(config: Config, samples: Sequence[Sample], epoch: int) -> PackPlan:
    """The packs of one epoch, in their order."""
    return plan_packs(
        token_lengths(samples),
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
    today: datetime.date | None = None,
) -> Inputs:
    """Reads the target's facts and the data, tokenises, and settles the drafter's shape.

    No weight is loaded. `available` are the GPUs, by default those that are visible. A target
    directory without a tokenizer is a TargetError, unless `estimate` allows guessed lengths. `today`
    is the date of a chat template that writes one, where data.date gives none; by default the clock's.
    """
    kind = device_type(config, visible_devices(choices) if available is None else available)
    with doing("reading data.train"):
        reading = read_conversations([p for name in config.data.train for p in resolve_data(name)])
    with doing(f"reading {config.target.path}: configuration and tokenizer"):
        facts = open_facts(config, kind, choices)
    estimated = facts.tokenizer is None
    date = None
    if not estimated:
        date = settle_date(config, facts.tokenizer, choices, today)
        with doing(f"tokenizing {counted(len(reading.conversations), 'conversation')}"):
            tokenized = _tokenized(config, reading, facts, date)
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
    notes = Counter(reading.notes)
    notes.update(tokenized.notes)
    for note, count in notes.items():
        log.info("data: %d x %s: %s", count, note, NOTES[note])
    if hint := _others_words(config, reading):
        log.info("data: %s", hint)
    split = _hold_out(config, tokenized.samples, facts, date, choices)
    if config.max_anchors is None:
        choices.record(
            "max_anchors",
            wanted="auto",
            got=str(config.anchors),
            reason="a sixth of token_budget, as 512 for 3,072 tokens, in whole tiles and loss chunks",
        )
    token_ids = None
    if config.drafter.vocab_size is not None:
        token_ids = _draft_vocabulary(config.drafter.vocab_size, split.train, facts, choices)
    return Inputs(
        facts=facts,
        samples=split.train,
        rejects=(*reading.rejects, *tokenized.rejects),
        rows=reading.rows,
        supervised_tokens=sum(int(sample.loss_mask.sum()) for sample in split.train),
        cut_turns=tokenized.cut_turns,
        shape=build_shape(config, facts, mask_token, choices),
        token_ids=token_ids,
        estimated=estimated,
        heldout=split.heldout,
        notes=notes,
        date=date,
    )


def _others_words(config: Config, reading: Reading) -> str:
    """What to expect of answers that may not be the target's own, "" where few are."""
    if all(name.startswith("builtin:") for name in config.data.train):
        return ""  # made with the embedded target
    texts = sum(not c.generated and c.tokens is None for c in reading.conversations)
    if 2 * texts <= len(reading.conversations):
        return ""
    return (
        f"{texts} of {len(reading.conversations)} conversations are text, not this target's own words: "
        "the acceptance length on its real answers may be far lower; `draftline regenerate` writes those"
    )


def _tokenized(
    config: Config, reading: Reading, facts: TargetFacts, date: datetime.date | None
) -> Tokenized:
    """The conversations as samples for the target's tokenizer, on that day if there is one."""
    return tokenize(
        reading.conversations,
        facts.tokenizer,
        max_length=config.data.max_length,
        block_size=config.block_size,
        template_kwargs=template_arguments(config, date),
        stop_ids=facts.stop_ids,
        embedding_rows=facts.embedding_rows,
        vocab_size=facts.vocab_size,
        asked_template=config.data.template,
    )


def _hold_out(
    config: Config,
    samples: Samples,
    facts: TargetFacts,
    date: datetime.date | None,
    choices: Choices,
) -> Split:
    """The samples to train on and those that data.heldout keeps from it; recorded."""
    wanted = config.data.heldout
    if wanted is None:
        return Split(samples, Samples.of(()), 0)
    if isinstance(wanted, float):
        split = hold_out(samples, wanted)
        held = count_conversations(split.heldout)
        reason = "those whose prompts have the smallest hashes; training measures itself on them"
        if not held:
            reason = f"{wanted:.3g} of them is less than one; training measures itself on none"
        choices.record(
            "data.heldout",
            wanted=f"{wanted:g} of the conversations",
            got=f"{held} of {split.conversations} conversations",
            reason=reason,
        )
        return split
    if facts.tokenizer is None:
        return Split(samples, Samples.of(()), 0)
    reading = read_conversations([p for name in wanted for p in resolve_data(name)])
    tokenized = _tokenized(config, reading, facts, date)
    split = leave_out(samples, tokenized.samples)
    if not split.train:
        raise DataError(
            f"data.heldout={wanted} holds every prompt of data.train, so nothing is left to train "
            "on; give other files, a share, or null"
        )
    gone = split.conversations - count_conversations(split.train)
    choices.record(
        "data.heldout",
        wanted=", ".join(wanted),
        got=f"{count_conversations(split.heldout)} conversations, {gone} taken out of training",
        reason="what is measured on must not be trained on",
    )
    return split


def settle_date(
    config: Config, tokenizer: Any, choices: Choices, today: datetime.date | None = None
) -> datetime.date | None:
    """The day that the chat template is to write in this run, None where it writes none."""
    given = config.data.date
    writes = tokenizer.chat_template is not None and writes_date(tokenizer, config.data.template)
    if not writes:
        if given is not None:
            choices.record(
                "data.date",
                wanted=str(given),
                got="no date",
                reason="the chat template writes none",
            )
        return None
    date = given or today or datetime.date.today()
    choices.record(
        "data.date",
        wanted="null" if given is None else str(given),
        got=str(date),
        reason="the chat template writes the day into every prompt; this one is kept by --resume "
        "and eval",
    )
    return date


def template_arguments(config: Config, date: datetime.date | None) -> dict[str, Any]:
    """What the chat template is called with: `data.template`, on that day if there is one."""
    return dict(config.data.template) if date is None else pinned(config.data.template, date)


def _guess(config: Config, reading: Reading, choices: Choices) -> Tokenized:
    """Samples as long as their conversations would be at so many characters per token."""
    choices.record(
        "data.tokens",
        wanted="the target's tokenizer",
        got=f"one token for {_CHARACTERS_A_TOKEN} characters",
        reason="the target's directory has no tokenizer, so lengths are guessed",
        fallback=True,
    )
    samples = []
    for conversation in reading.conversations:
        wanted = max(config.block_size, conversation.tokens_guessed(_CHARACTERS_A_TOKEN))
        length = min(wanted, config.data.max_length)
        ids = np.zeros(length, np.int32)
        mask = np.ones(length, np.bool_)
        samples.append(Sample(conversation.id, ids, mask, length < wanted))
    total = sum(token_lengths(samples))
    return Tokenized(Samples.of(samples), (), total, total, 0)


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


# What a model's configuration says beside what it computes.
_NOT_COMPUTED = re.compile(
    r"_.*|transformers_version|architectures|(torch_)?dtype|use_cache|initializer_range"
    r"|(output|return|chunk_size)_.*|.*_token_id|quantization_config"
)


def _arithmetic(config: Any) -> str:
    """What a target's configuration says of its arithmetic, where its class says something else: a
    multiplier, a window or an epsilon is in no weight, and defaults are named otherwise in other
    versions."""
    said = config.to_dict()
    try:
        usual = type(config)().to_dict()
    except Exception:  # a class of the target's own code may want arguments
        usual = {}
    kept = {
        key: value
        for key, value in said.items()
        if not _NOT_COMPUTED.fullmatch(key) and (key not in usual or usual[key] != value)
    }
    return json.dumps({"model_type": config.model_type, **kept}, sort_keys=True, default=str)


def feature_key(config: Config, samples: Sequence[Sample], target: Target) -> str:
    """Two times 16 hex digits: of the target (`target_digest`), and of the samples' features, the same
    exactly when these would be."""
    digest = hashlib.sha256()
    soft = config.loss.soft_labels > 0
    digest.update(f"{target.dtype} {target.taps} {soft}".encode())
    if target.rope is not None:
        digest.update(str(target.rope).encode())
    digest.update(_arithmetic(target.text_config).encode())
    # Of the target its weights count, not its path: files may move, or change behind a name. Some
    # values of every tensor are enough, since any further training moves nearly all of them.
    for parameter in target.parameters():
        digest.update(some_values(parameter.detach()).numpy().tobytes())
    for sample in samples:
        digest.update(sample.input_ids.tobytes())
        digest.update(b"|")
    return f"{target_digest(target)}-{digest.hexdigest()[:16]}"
