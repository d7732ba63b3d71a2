"""Conversations that training never sees, chosen by their prompts and by nothing else.

Who is held out depends neither on a seed, nor on the order or the names of files, nor on ids: the
prompts with the smallest hashes are. Conversations that open with the same prompt, such as several
answers to one question, are on the same side.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftline.data.store import Sample, Samples

# More conversations would make the mean little surer and every measurement dearer.
MOST_CONVERSATIONS = 64


@dataclass(frozen=True, slots=True)
class Split:
    """Samples to train on and samples held out, each in their order; `conversations` were split."""

    train: Samples
    heldout: Samples
    conversations: int


def hold_out(samples: Samples, share: float) -> Split:
    """Holds out at most `share` of the conversations, and at most `MOST_CONVERSATIONS`.

    Conversations of one prompt go together, or stay where they are more than there is room for.
    """
    prompts = _prompts(samples)
    together: dict[bytes, list[str]] = {}
    for conversation, prompt in prompts.items():
        together.setdefault(prompt, []).append(conversation)
    room = min(int(share * len(prompts)), MOST_CONVERSATIONS)
    chosen: set[str] = set()
    for prompt in sorted(together):
        if len(chosen) + len(together[prompt]) <= room:
            chosen.update(together[prompt])
    held = [_conversation(sample) in chosen for sample in samples]
    return Split(
        samples.take(i for i, out in enumerate(held) if not out),
        samples.take(i for i, out in enumerate(held) if out),
        len(prompts),
    )


def leave_out(samples: Samples, heldout: Samples) -> Split:
    """Takes from `samples` every conversation that opens with the prompt of a held-out one."""
    seen = set(_prompts(heldout).values())
    prompts = _prompts(samples)
    kept = (i for i, s in enumerate(samples) if prompts[_conversation(s)] not in seen)
    return Split(samples.take(kept), heldout, len(prompts))


def count_conversations(samples: Sequence[Sample]) -> int:
    """Conversations that the samples are of; one may have several."""
    return len({_conversation(sample) for sample in samples})


def _prompts(samples: Sequence[Sample]) -> dict[str, bytes]:
    """The hash of what precedes the first answer, by conversation; of all where nothing does."""
    found: dict[str, bytes] = {}
    for sample in samples:
        # The samples of a conversation follow each other, the one with the first answer first.
        name = _conversation(sample)
        if name not in found:
            prompt = sample.input_ids[: int(np.argmax(sample.loss_mask))]
            text = prompt if len(prompt) else sample.input_ids
            found[name] = hashlib.sha256(text.astype("<i4").tobytes()).digest()
    return found


def _conversation(sample: Sample) -> str:
    """The id of the conversation that a sample is of."""
    return re.sub(r"#turn\d+$", "", sample.id)
