"""Evaluation by real decoding: how many tokens a target call commits, how fast, and whether the
output is the target's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from draftline.config.running import EvaluateSection
from draftline.data.builtin import resolve_data
from draftline.data.chat import REFUSALS, served_prompt
from draftline.data.conversations import read_conversations
from draftline.decode.differences import Difference, first_differences
from draftline.decode.propose import DraftModel
from draftline.decode.session import Decoded, DecodeSession
from draftline.errors import DataError
from draftline.model.drafter.backbone import Drafter
from draftline.model.target.target import Target
from draftline.progress import doing

log = logging.getLogger(__name__)

Prompts = list[list[int]]

# Rows of a matrix product that a GPU computes in the time of one, that of reading the weights.
_FREE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Score:
    """One prompt set at one temperature.

    `accept_length`: the acceptance length, committed tokens over target calls, pooled over the set,
    the bonus included and what lies behind a stop token left out. `committed_counts[n]`: rounds that
    committed n tokens.
    `slot_acceptance[j]`: share of rounds in which slot j + 1 was accepted. Speeds are tokens over
    decoding seconds without prefill, at `batch_size`. `identical` of `compared` prompts gave exactly
    the plain greedy output, computed with the kernels of verification where that is cheap;
    `differences` has those that are not the output of plain decoding one token at a time;
    `reference_width` is how many tokens per row the plain output of `identical` was computed with. What
    was not measured is nan.
    """

    name: str
    temperature: float
    prompts: int
    batch_size: int
    new_tokens: int
    rounds: int
    committed: int
    accept_length: float
    committed_counts: list[int]
    slot_acceptance: list[float]
    tokens_per_s: float
    plain_tokens_per_s: float
    identical: int
    compared: int
    differences: tuple[Difference, ...] = ()
    reference_width: int = 1

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-clean: nan becomes None, in lists as well."""
        return {key: _without_nan(value) for key, value in asdict(self).items()}


def read_prompts(
    names: Mapping[str, str], target: Target, *, limit: int | None, template: Mapping[str, Any]
) -> dict[str, Prompts]:
    """Token ids of every prompt of every set, rendered with the generation prompt.

    A conversation is used up to its last user turn. Raises DataError for an unusable file.
    """
    rendered: dict[str, Prompts] = {}
    for name, source in names.items():
        reading = read_conversations(resolve_data(source), need_answer=False)
        for reason, count in reading.counts().items():
            log.warning("%s: left out %d prompts: %s", name, count, reason)
        prompts: Prompts = []
        for conversation in reading.conversations[:limit]:
            turns = list(conversation.messages)
            while turns and turns[-1].role == "assistant":
                turns.pop()
            try:
                text = served_prompt(target.tokenizer, turns, conversation.tools, template)
            except REFUSALS as error:
                raise DataError(
                    f"{conversation.origin}: the target's chat template refuses this prompt: {error}; "
                    f"leave it out of evaluate.prompts.{name} or set data.template"
                ) from None
            ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            if max(ids, default=0) >= (rows := target.embedding.shape[0]):
                log.warning(
                    "%s: left out %s: token %d, the target's embedding has %d rows",
                    name,
                    conversation.origin,
                    max(ids),
                    rows,
                )
                continue
            prompts.append(ids)
        rendered[name] = prompts
    if not rendered:
        raise DataError("no prompts to evaluate on; set evaluate.prompts.NAME=FILE")
    return rendered


class PlainOutputs:
    """Plain decoding of every prompt set, done once and compared with many drafters."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float, int], tuple[list[list[int]], float]] = {}

    def get(
        self, key: tuple[str, float, int], decode: Callable[[], list[Decoded]]
    ) -> tuple[list[list[int]], float]:
        """Outputs and tokens/s of a set at a temperature and width, decoded on first use."""
        if key not in self._known:
            decoded = decode()
            self._known[key] = ([t for d in decoded for t in d.tokens], _rate(decoded))
        return self._known[key]


def evaluate(
    target: Target,
    draft: DraftModel,
    prompts: Mapping[str, Prompts],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    plain: PlainOutputs | None,
) -> list[Score]:
    """One score per prompt set and temperature; `plain` None leaves speed-up and identity unmeasured."""
    scores = []
    longest = max(len(p) for group in prompts.values() for p in group)
    rows = min(batch_size, max(len(group) for group in prompts.values()))
    block = draft.drafter.shape.block_size
    slots = longest + max_new_tokens + block
    for temperature in temperatures:
        with ExitStack() as stack:

            def open_decoder(
                model: DraftModel | None,
                width: int = 1,
                heat: float = temperature,
                owner: ExitStack = stack,
            ) -> DecodeSession:
                return owner.enter_context(
                    DecodeSession(
                        target,
                        model,
                        rows=rows,
                        slots=slots,
                        temperature=heat,
                        seed=seed,
                        width=width,
                    )
                )

            speculative = open_decoder(draft)
            ordinary = open_decoder(None) if plain is not None else None
            # Plain speed is that of single tokens, identity is asked of equal kernels.
            wide = _shared_width(target, rows, block) if temperature == 0 else 1
            alike = open_decoder(None, wide) if plain is not None and wide > 1 else ordinary
            for name, group in prompts.items():
                decode = partial(
                    _decode,
                    what=f"{name} at temperature {temperature:g}",
                    prompts=group,
                    max_new_tokens=max_new_tokens,
                )
                decoded = decode(speculative, "speculative")
                if plain is None or ordinary is None or alike is None:
                    scores.append(_score(name, temperature, rows, decoded, None, math.nan))
                    continue
                single, plain_rate = plain.get(
                    (name, temperature, 1), partial(decode, ordinary, "plain")
                )
                reference, _ = plain.get(
                    (name, temperature, wide),
                    partial(decode, alike, f"plain, {wide} tokens per row"),
                )
                score = _score(name, temperature, rows, decoded, reference, plain_rate)
                if score.compared:
                    outputs = [tokens for d in decoded for tokens in d.tokens]
                    found = first_differences(target, group, outputs, single)
                    score = replace(score, differences=tuple(found), reference_width=wide)
                scores.append(score)
    return scores


def evaluate_drafter(
    target: Target,
    drafter: Drafter,
    token_ids: Tensor | None,
    section: EvaluateSection,
    *,
    template: Mapping[str, Any],
    seed: int,
    temperatures: Sequence[float] | None = None,
    plain: PlainOutputs | None = None,
) -> list[Score]:
    """`evaluate` as `section` asks for it, of a drafter of `token_ids` (None: the whole vocabulary).

    The chat template is called with `template`. `temperatures` instead of the section's, and `plain`
    outputs that are known from another drafter, where they are given.
    """
    prompts = read_prompts(section.prompts, target, limit=section.limit, template=template)
    return evaluate(
        target,
        DraftModel(drafter, None if token_ids is None else token_ids.to(target.device)),
        prompts,
        temperatures=section.temperatures if temperatures is None else temperatures,
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
        seed=seed,
        plain=(plain or PlainOutputs()) if section.plain else None,
    )


def _shared_width(target: Target, rows: int, block: int) -> int:
    """Tokens per row that the reference of `identical` computes: those of verification, or 1.

    A matrix product of one row adds in another order than one of `block` rows, which in bfloat16
    decides near-ties; in float32 it does not, and on a CPU or in a large batch rows cost time.
    """
    rounds = target.dtype != torch.float32 and target.device.type == "cuda"
    return block if rounds and rows * block <= _FREE_ROWS else 1


def _decode(
    decoder: DecodeSession, how: str, *, what: str, prompts: Prompts, max_new_tokens: int
) -> list[Decoded]:
    """Every batch of a set, with progress: `what` is decoded, and `how`."""
    rows, found = decoder.rows, list[Decoded]()
    with doing(f"{what}, {how}: {len(prompts)} prompts") as job:
        for first in range(0, len(prompts), rows):
            kept = sum(d.new_tokens for d in found)

            def reached(tokens: int, done: int = first, kept: int = kept) -> None:
                job.reached(done, len(prompts), "prompts", kept + tokens)

            batch = prompts[first : first + rows]
            found.append(decoder.decode(batch, max_new_tokens, progress=reached))
    return found


def _without_nan(value: object) -> object:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _rate(decoded: Sequence[Decoded]) -> float:
    """Tokens/s, nan where no round was needed: every first token was the last."""
    seconds, tokens = sum(d.seconds for d in decoded), sum(d.committed for d in decoded)
    return tokens / seconds if seconds and tokens else math.nan


def _score(
    name: str,
    temperature: float,
    rows: int,
    decoded: Sequence[Decoded],
    reference: list[list[int]] | None,
    plain_rate: float,
) -> Score:
    outputs = [tokens for d in decoded for tokens in d.tokens]
    counts = [sum(column) for column in zip(*(d.committed_counts for d in decoded), strict=True)]
    hits = [sum(column) for column in zip(*(d.slot_accepted for d in decoded), strict=True)]
    rounds, committed = sum(counts), sum(d.committed for d in decoded)
    compared = reference is not None and temperature == 0
    return Score(
        name=name,
        temperature=temperature,
        prompts=len(outputs),
        batch_size=rows,
        new_tokens=sum(d.new_tokens for d in decoded),
        rounds=rounds,
        committed=committed,
        accept_length=committed / rounds if rounds else math.nan,
        committed_counts=counts,
        slot_acceptance=[h / rounds if rounds else math.nan for h in hits],
        tokens_per_s=_rate(decoded),
        plain_tokens_per_s=plain_rate,
        identical=sum(a == b for a, b in zip(outputs, reference or [], strict=False))
        if compared
        else 0,
        compared=len(outputs) if compared else 0,
    )


def score_table(scores: Sequence[Score], title: str) -> Table:
    """The scores for a terminal."""
    table = Table(title=title)
    for heading in ("prompts", "T", "n", "accept_length", "slot 1", "tok/s", "plain tok/s",
                    "speed-up", "identical"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "prompts" else "right")
    for score in scores:
        table.add_row(
            score.name,
            f"{score.temperature:g}",
            str(score.prompts),
            _number(score.accept_length, 3),
            _number(score.slot_acceptance[0] if score.slot_acceptance else math.nan, 2),
            _number(score.tokens_per_s, 1),
            _number(score.plain_tokens_per_s, 1),
            _number(score.speedup, 2),
            f"{score.identical} of {score.compared}" if score.compared else "n/a",
        )
    return table


def score_details(score: Score) -> str:
    """Per-slot acceptance, the histogram of committed tokens, and what differs from plain decoding."""
    slots = " ".join(_number(a, 2) for a in score.slot_acceptance)
    counts = " ".join(f"{n}:{count}" for n, count in enumerate(score.committed_counts) if n)
    lines = [f"slots accepted {slots}", f"rounds by tokens committed {counts}"]
    if score.reference_width > 1:
        alike = score.compared - len(score.differences)
        lines.append(
            f"identical compares with plain decoding of {score.reference_width} tokens per row, the "
            f"kernels of verification; token by token {alike} of {score.compared} are"
        )
    lines += [f"differs from decoding token by token in {d.describe()}" for d in score.differences]
    return "\n".join(f"{score.name} T={score.temperature:g}: {line}" for line in lines)


def _number(value: float, digits: int) -> str:
    return "n/a" if math.isnan(value) else f"{value:.{digits}f}"
