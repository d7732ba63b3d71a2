"""Speculative output is the target's own: token for token when greedy, in distribution when not."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from draftline.decode.propose import DraftModel
from draftline.decode.session import Decoded, DecodeSession
from draftline.errors import DataError, TargetError
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.heads import ParallelHead
from draftline.model.target.target import Target
from tests.support.tiny import (
    build_drafter,
    build_model,
    build_samples,
    build_shape,
    build_target,
    chi_square_p,
    teach,
)

PROMPTS = [s.input_ids.tolist() for s in build_samples((5, 17, 1, 9, 30), seed=1)]


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target(stop=())


def decoder(target: Target, draft: DraftModel | None, **changes: Any) -> DecodeSession:
    return DecodeSession(target, draft, **({"rows": 5, "slots": 100} | changes))


def check_counts(decoded: Decoded, block: int) -> None:
    """What every result must satisfy, whatever was drafted."""
    counts = decoded.committed_counts
    assert len(counts) == block + 1
    assert counts[0] == 0, "a round of a row that goes on commits something"
    assert sum(counts) == decoded.rounds
    assert decoded.committed == sum(n * c for n, c in enumerate(counts))
    assert decoded.committed == decoded.new_tokens - len(decoded.tokens)
    assert decoded.slot_accepted == sorted(decoded.slot_accepted, reverse=True)
    assert all(hits <= decoded.rounds for hits in decoded.slot_accepted)
    assert decoded.seconds >= 0


@pytest.fixture(scope="module")
def trained(target: Target) -> Drafter:
    shape = build_shape(target, block_size=6, sliding_layers=1, sliding_window=8)
    return teach(target, build_drafter(shape), PROMPTS, steps=80)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    decoded = decoder(target, None).decode(PROMPTS, 40)
    check_counts(decoded, 1)
    assert decoded.rounds == 39 * 5
    assert decoded.slot_accepted == []
    return decoded.tokens


def test_plain_decoding_is_greedy_generate(target: Target, plain: list[list[int]]) -> None:
    model = build_model()
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor(prompt)[None]
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=-1,
        )
        assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"block_size": 2},
        {"block_size": 7, "num_layers": 1},
        {"block_size": 5, "sliding_layers": 2, "sliding_window": 3},
        {"block_size": 8, "sliding_layers": 1, "sliding_window": 100, "num_layers": 3},
    ],
    ids=lambda v: "-".join(f"{k}{n}" for k, n in v.items()) or "plain",
)
@pytest.mark.parametrize("new", [1, 2, 40])
def test_greedy_output_is_plain_decoding_token_for_token(
    target: Target, plain: list[list[int]], shape: dict[str, int], new: int
) -> None:
    drafter = build_drafter(build_shape(target, **shape))
    decoded = decoder(target, DraftModel(drafter)).decode(PROMPTS, new)
    assert decoded.tokens == [tokens[:new] for tokens in plain]
    check_counts(decoded, drafter.shape.block_size)


@pytest.mark.parametrize("block_size", [None, 1, 2, 4, 6, 99])
def test_a_trained_drafter_changes_the_rounds_and_nothing_else(
    target: Target, plain: list[list[int]], trained: Drafter, block_size: int | None
) -> None:
    decoded = decoder(target, DraftModel(trained), block_size=block_size).decode(PROMPTS, 40)
    assert decoded.tokens == plain
    block = min(block_size or 6, 6)
    check_counts(decoded, block)
    if block > 1:
        # Long and short rounds both occur, so the caches were rewound by every amount.
        assert decoded.rounds < 39 * 5 / 1.4
        assert all(decoded.committed_counts[1:])
    else:
        assert decoded.rounds == 39 * 5


def test_a_batch_is_its_rows_alone(
    target: Target, plain: list[list[int]], trained: Drafter
) -> None:
    whole = decoder(target, DraftModel(trained)).decode(PROMPTS, 40)
    alone = decoder(target, DraftModel(trained), rows=1, slots=80)
    single = [alone.decode([prompt], 40) for prompt in PROMPTS]
    assert [d.tokens[0] for d in single] == whole.tokens == plain
    for mine, theirs in zip(
        zip(*(d.committed_counts for d in single), strict=True), whole.committed_counts, strict=True
    ):
        assert sum(mine) == theirs


def test_buffers_can_be_used_again(
    target: Target, plain: list[list[int]], trained: Drafter
) -> None:
    reused = decoder(target, DraftModel(trained))
    first = reused.decode(PROMPTS, 40)
    assert reused.decode([PROMPTS[2], PROMPTS[0]], 9).tokens == [plain[2][:9], plain[0][:9]]
    again = reused.decode(PROMPTS, 40)
    assert (again.tokens, again.committed_counts) == (first.tokens, first.committed_counts)


def test_rows_may_outgrow_the_window_of_slots(target: Target) -> None:
    """Rounds attend to 128, then 256 slots; prompts end on either side of the border."""
    prompts = [s.input_ids.tolist() for s in build_samples((118, 125, 3, 130), seed=2)]
    wanted = decoder(target, None, slots=300).decode(prompts, 150)
    model = build_model()
    for prompt, tokens in zip(prompts, wanted.tokens, strict=True):
        logits = model(input_ids=torch.tensor(prompt + tokens)[None]).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    drafter = build_drafter(build_shape(target, block_size=6))
    decoded = decoder(target, DraftModel(drafter), slots=300).decode(prompts, 150)
    assert decoded.tokens == wanted.tokens
    check_counts(decoded, 6)


class Oracle(nn.Module):
    """Drafts the tokens it is told, by row and position, through a head with rows of equal norm."""

    def __init__(self, target: Target, block: int, told: Tensor) -> None:
        super().__init__()
        self.shape = build_shape(target, block_size=block)
        self.weight = target.head.weight
        self.told = told
        self.head = ParallelHead()

    def context(self, *_: object) -> None:
        pass

    def draft(self, _block: Tensor, positions: Tensor, *_: object) -> Tensor:
        return 10 * self.weight[self.told.gather(1, positions)]


def simulate(
    length: int, told: list[int], truth: list[int], new: int, block: int, stop: set[int]
) -> tuple[list[int], list[int], list[int]]:
    """One row in plain Python: its tokens, rounds by tokens committed, and accepted slots."""
    counts, hits = [0] * (block + 1), [0] * (block - 1)
    start, out = length, [truth[length]]
    while len(out) < new and out[-1] not in stop:
        accepted = 0
        while accepted < block - 1 and told[start + 1 + accepted] == truth[start + 1 + accepted]:
            accepted += 1
        for slot in range(accepted):
            hits[slot] += 1
        committed = 0
        for token in truth[start + 1 : start + 2 + accepted]:
            if len(out) == new:
                break
            out.append(token)
            committed += 1
            if token in stop:
                break
        counts[committed] += 1
        start += committed
    return out, counts, hits


@pytest.fixture(scope="module")
def long(target: Target) -> list[list[int]]:
    """What the target would go on with behind every end that a test sets."""
    return decoder(target, None, slots=200).decode(PROMPTS, 80).tokens


@pytest.mark.parametrize("block", [2, 5, 8])
@pytest.mark.parametrize("new", [1, 2, 13, 40])
@pytest.mark.parametrize("stops", [0, 1, 4])
def test_rounds_commit_exactly_what_the_rules_say(
    target: Target,
    plain: list[list[int]],
    long: list[list[int]],
    block: int,
    new: int,
    stops: int,
) -> None:
    random = torch.Generator().manual_seed(block + 10 * new)
    truth = torch.zeros(5, 200, dtype=torch.long)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, long, strict=True)):
        truth[row, : len(prompt) + 80] = torch.tensor(prompt + tokens)
    wrong = torch.rand(5, 200, generator=random) < torch.tensor([0, 0.1, 0.3, 0.6, 1])[:, None]
    told = torch.where(wrong, (truth + 1) % 64, truth)
    # Tokens of the middle of the outputs end them, inside blocks and at their ends.
    stop = tuple({long[row][9 + 3 * row] for row in range(stops)})
    stopping = copy.copy(target)
    stopping.stop_ids = stop
    oracle: Any = Oracle(target, block, told)
    decoded = decoder(stopping, DraftModel(oracle)).decode(PROMPTS, new)
    counts, hits = [0] * (block + 1), [0] * (block - 1)
    for row, prompt in enumerate(PROMPTS):
        out, mine, accepted = simulate(
            len(prompt), told[row].tolist(), truth[row].tolist(), new, block, set(stop)
        )
        assert decoded.tokens[row] == out
        assert out == plain[row][: len(out)]
        counts = [a + b for a, b in zip(counts, mine, strict=True)]
        hits = [a + b for a, b in zip(hits, accepted, strict=True)]
    assert decoded.committed_counts == counts
    assert decoded.slot_accepted == hits
    check_counts(decoded, block)


def test_a_first_token_that_stops_ends_the_row(target: Target, plain: list[list[int]]) -> None:
    stopping = copy.copy(target)
    stopping.stop_ids = (plain[1][0],)
    drafter = build_drafter(build_shape(target))
    decoded = decoder(stopping, DraftModel(drafter)).decode([PROMPTS[1]], 20)
    assert decoded.tokens == [[plain[1][0]]]
    assert decoded.rounds == decoded.committed == 0
    check_counts(decoded, 4)


def test_a_sub_vocabulary_drafts_only_its_own_tokens(
    target: Target, plain: list[list[int]], trained: Drafter
) -> None:
    everyday = sorted({token for tokens in plain for token in tokens})
    for ids in (everyday, everyday[::2], list(range(64))):
        draft = DraftModel(trained, torch.tensor(ids))
        decoded = decoder(target, draft).decode(PROMPTS, 40)
        assert decoded.tokens == plain
        check_counts(decoded, 6)
        if ids != everyday[::2]:
            assert decoded.rounds < 39 * 5 / 1.4
    useless = DraftModel(trained, torch.tensor([i for i in range(64) if i not in everyday]))
    assert decoder(target, useless).decode(PROMPTS, 40).rounds == 39 * 5


def test_what_does_not_fit_is_refused(target: Target) -> None:
    drafter = build_drafter(build_shape(target))
    small = decoder(target, DraftModel(drafter), rows=2, slots=20)
    longest = small.slots - 6 - 4  # new tokens, and a block
    assert longest >= 10
    assert len(small.decode([[9] * longest], 6).tokens[0]) == 6
    needed = rf"a prompt of {longest + 1} tokens.*{small.slots + 1} slots, .* {small.slots}$"
    with pytest.raises(DataError, match=needed):
        small.decode([[9] * (longest + 1)], 6)
    with pytest.raises(DataError, match="empty prompt"):
        small.decode([[9], []], 6)
    for prompts in ([], [[9]] * 3):
        with pytest.raises(DataError, match="2 rows"):
            small.decode(prompts, 6)


def test_a_target_whose_state_cannot_be_rewound_is_refused(target: Target) -> None:
    other = copy.copy(target)
    other.text_config = copy.copy(target.text_config)
    other.text_config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(TargetError, match="linear_attention"):
        decoder(other, None)


# Sampling. A vocabulary of 6 makes every pair and triple of tokens common enough to count.
ROWS = 8_000


@pytest.fixture(scope="module")
def small() -> tuple[Target, LlamaForCausalLM]:
    settings = {"vocab": 8, "hidden": 16, "layers": 2, "sharpness": 1.2}
    target = build_target(taps=(0,), stop=(), **settings)
    return target, build_model(**settings)


def continuations(
    model: LlamaForCausalLM,
    prompt: list[int],
    length: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 8,
) -> Tensor:
    """Probability of every continuation of `length` tokens, `[8] * length`."""
    probability = torch.ones(())
    for known in range(length):
        ids = torch.tensor([[*prompt, *more] for more in itertools.product(range(8), repeat=known)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1]
        share, order = torch.softmax(logits / temperature, -1).sort(-1, descending=True)
        share[:, top_k:] = 0
        share /= share.sum(-1, keepdim=True)
        share[share.cumsum(-1) - share >= top_p] = 0
        share /= share.sum(-1, keepdim=True)
        step = torch.zeros_like(share).scatter(1, order, share).view(*[8] * known, 8)
        probability = probability[..., None] * step
    return probability


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [("plain", 0.6), ("random", 1.0), ("random", 0.6), ("sub-vocabulary", 0.6), ("sliding", 1.0)],
)
def test_sampled_output_is_distributed_as_the_target(
    small: tuple[Target, LlamaForCausalLM], kind: str, temperature: float
) -> None:
    target, model = small
    draft = None
    if kind != "plain":
        changes: dict[str, Any] = {"block_size": 3, "mask_token_id": 7, "num_layers": 1}
        if kind == "sliding":
            changes |= {"sliding_layers": 1, "sliding_window": 2}
        drafter = build_drafter(build_shape(target, **changes), seed=3)
        ids = torch.tensor([0, 2, 3, 7]) if kind == "sub-vocabulary" else None
        draft = DraftModel(drafter, ids)
    prompt = [4, 1, 6]
    sampling = DecodeSession(target, draft, rows=ROWS, slots=10, temperature=temperature, seed=5)
    decoded = sampling.decode([prompt] * ROWS, 3)
    if draft is not None:
        check_counts(decoded, 3)
        assert all(decoded.committed_counts[1:3])
        assert decoded.slot_accepted[0] > 0
    tokens = torch.tensor(decoded.tokens)
    # The first token is the prefill's, the second the first slot's, the third whoever's turn it is.
    for length in (1, 2, 3):
        place = torch.zeros(ROWS, dtype=torch.long)
        for column in range(length):
            place = place * 8 + tokens[:, column]
        seen = torch.bincount(place, minlength=8**length)
        wanted = ROWS * continuations(model, prompt, length, temperature)
        assert chi_square_p(seen, wanted) > 1e-3


@pytest.mark.parametrize("kind", ["plain", "random", "sub-vocabulary"])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, None), (None, 3), (0.7, 5)])
def test_truncated_sampling_is_distributed_as_the_truncated_target(
    small: tuple[Target, LlamaForCausalLM], kind: str, top_p: float | None, top_k: int | None
) -> None:
    target, model = small
    draft = None
    if kind != "plain":
        shape = build_shape(target, block_size=3, mask_token_id=7, num_layers=1)
        ids = torch.tensor([0, 2, 3, 7]) if kind == "sub-vocabulary" else None
        draft = DraftModel(build_drafter(shape, seed=3), ids)
    prompt = [4, 1, 6]
    sampling = DecodeSession(
        target, draft, rows=ROWS, slots=10, temperature=0.9, top_p=top_p, top_k=top_k, seed=5
    )
    tokens = torch.tensor(sampling.decode([prompt] * ROWS, 3).tokens)
    for length in (1, 2, 3):
        place = torch.zeros(ROWS, dtype=torch.long)
        for column in range(length):
            place = place * 8 + tokens[:, column]
        seen = torch.bincount(place, minlength=8**length)
        wanted = ROWS * continuations(model, prompt, length, 0.9, top_p or 1.0, top_k or 8)
        assert int((wanted.flatten() == 0).sum()) > 0, "the fixture no longer truncates"
        assert chi_square_p(seen, wanted) > 1e-3


def test_a_seed_for_a_batch_makes_its_noise_its_own(
    small: tuple[Target, LlamaForCausalLM],
) -> None:
    """Whatever was decoded before, and whoever its neighbours are."""
    target, _ = small
    reused = DecodeSession(target, None, rows=3, slots=40, temperature=1.0, seed=1)
    prompts = [[1, 2], [3], [4, 5, 6]]
    first = reused.decode(prompts, 20, seed=9).tokens
    assert reused.decode(prompts, 20, seed=8).tokens != first
    assert reused.decode(prompts, 20, seed=9).tokens == first
    fresh = DecodeSession(target, None, rows=3, slots=40, temperature=1.0, seed=2)
    assert fresh.decode([[1, 2], [7, 7]], 20, seed=9).tokens[0] == first[0]


def test_progress_counts_new_tokens_at_every_look(target: Target, trained: Drafter) -> None:
    for draft in (None, DraftModel(trained)):
        seen: list[int] = []
        decoded = decoder(target, draft).decode(PROMPTS[:3], 40, progress=seen.append)
        assert len(seen) > 5
        assert seen == sorted(seen)
        assert seen[0] > 3, "the first look already has more than the prefill's tokens"
        assert seen[-1] == decoded.new_tokens


def test_sampling_follows_the_seed(small: tuple[Target, LlamaForCausalLM]) -> None:
    target, _ = small
    shape = build_shape(target, block_size=3, mask_token_id=7, num_layers=1)
    draft = DraftModel(build_drafter(shape))

    def tokens(seed: int) -> list[list[int]]:
        made = DecodeSession(target, draft, rows=4, slots=40, temperature=1.0, seed=seed)
        return made.decode([[1, 2], [3], [4, 5, 6], [1]], 20).tokens

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
