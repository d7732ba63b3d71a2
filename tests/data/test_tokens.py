"""Samples: what is supervised is what the target would generate when served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from draftline.data.conversations import Conversation, Message, read_conversations
from draftline.data.store import Sample
from draftline.data.tokens import Tokenized, anchor_mask, token_counts, tokenize
from draftline.errors import DataError

MESSY = Path(__file__).parent / "messy"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|end|>"]

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# No newline after the end of a turn, a beginning-of-text token, trimmed contents.
HEADERS = """{{ '<|begin|>' }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n'
+ m.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""
# A token closes every render that waits for no answer; no generated answer contains it.
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ '<|end|>' }}{% endif %}"
# The end of a turn takes the newline after it into its own span (rstrip).
SWALLOWED = CHATML.replace("<|im_end|>", "<|stop|>")
# Thinking stays only in answers after the last user turn, which always show a think block.
THINKING = """{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}{% for m in messages %}{% set parts = m.content.split('</think>') %}
{%- set text = parts[-1].lstrip('\n') %}{% if m.role == 'assistant' and loop.index0 > ns.last %}
{%- set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
{%- set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if no_think %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
# The prompt opens a thought, so an answer without one does not follow it.
OPEN_THOUGHT = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
STRICT = (
    """{% for m in messages %}{% if m.role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{% endfor %}"""
    + CHATML
)
# The prompt ends in a space that the first word of the answer takes into its token.
SPACED = """{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def build(template: str | None, trim: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on a few lines, with merges over leading spaces."""
    lines = ["hello there, four is the answer\n\n  indented  answer\nuser assistant system think"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    # Encoding plain text adds a first token, which templates write themselves.
    first = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 2)])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), first])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn: dict[str, Any] = {
        "vocab_size": 360,
        "initial_alphabet": alphabet,
        "special_tokens": SPECIAL,
    }
    raw.train_from_iterator(lines * 3, trainers.BpeTrainer(show_progress=False, **learn))
    raw.add_special_tokens([AddedToken("<|stop|>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def talk(*contents: str, system: str = "", name: str = "c") -> Conversation:
    messages = [Message(("user", "assistant")[n % 2], text) for n, text in enumerate(contents)]
    return Conversation(name, (*[Message("system", system)] * bool(system), *messages), "f:1")


def run(
    tokenizer: Any, *talks: Conversation, length: int = 500, block: int = 2, **extra: object
) -> Tokenized:
    return tokenize(talks, tokenizer, max_length=length, block_size=block, template_kwargs=extra)


def apply(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return tokenizer.apply_chat_template(turns, **options)


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def answers(tokenizer: Any, sample: Sample) -> list[str]:
    return [tokenizer.decode(sample.input_ids[a:b]) for a, b in runs(sample.loss_mask)]


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def assert_as_served(tokenizer: Any, sample: Sample, of: Conversation, **extra: object) -> None:
    """Every supervised run comes right after the ids that a server would have shown the target."""
    turns = [message.to_template() for message in of.messages]
    served = [
        tokenizer.apply_chat_template(
            turns[:n], tokenize=False, add_generation_prompt=True, **extra
        )
        for n in range(1, len(turns))
    ]
    shown = [encode(tokenizer, text) for text in served]
    for begin, _ in runs(sample.loss_mask):
        assert sample.input_ids[:begin].tolist() in shown


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (CLOSED, "<|im_end|>")]
)
def test_ids_are_the_prompts_and_then_the_answers(template: str, end: str, trim: bool) -> None:
    tokenizer = build(template, trim)
    first, second = "four is\n\n  the é answer", "好 👩‍👩‍👧"
    conversation = talk("hello", first, "user?", second, system="think")
    samples = run(tokenizer, conversation).samples
    assert {array.dtype.name for s in samples for array in (s.input_ids, s.loss_mask)} == {
        "int32",
        "bool",
    }
    # The end of the turn is generated; the newline or closing token after it is not.
    said = [text for sample in samples for text in answers(tokenizer, sample)]
    assert said == [f"{first}{end}", f"{second}{end}"]
    for sample in samples:
        assert not sample.truncated
        assert_as_served(tokenizer, sample, conversation)
    if template == HEADERS:
        # Newlines at the prompt's end are one token there and two before a word: not one sample.
        assert [sample.id for sample in samples] == ["c#turn2", "c#turn4"]
    else:
        (sample,) = samples
        assert sample.input_ids.tolist() == apply(tokenizer, conversation.messages)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, HEADERS, THINKING])
def test_messy_files_every_conversation_has_a_sample_or_a_reject(template: str) -> None:
    tokenizer = build(template)
    reading = read_conversations([MESSY / "damaged.jsonl", MESSY / "glaive_toolcall_en_40.json"])
    by_id = {c.id: c for c in reading.conversations if len(repr(c.messages)) < 3500}
    done = run(tokenizer, *by_id.values(), length=700, block=8)
    ids = [sample.id for sample in done.samples] + [reject.id for reject in done.rejects]
    assert {name.partition("#turn")[0] for name in ids if name not in by_id} <= set(by_id)
    assert {name if name in by_id else name.partition("#turn")[0] for name in ids} == set(by_id)
    for sample in done.samples:
        name = sample.id if sample.id in by_id else sample.id.rpartition("#turn")[0]
        assert_as_served(tokenizer, sample, by_id[name])
    # These templates write no calls, so the answers that are calls are no answers there.
    called = {c.id for c in by_id.values() if any(m.tool_calls for m in c.messages)}
    assert called
    ignored = {r.id for r in done.rejects if r.reason == "tool_calls_not_in_template"}
    assert ignored == called
    assert done.notes["tools_ignored"] == sum(bool(c.tools) for c in by_id.values())
    assert done.tokens == sum(len(sample.input_ids) for sample in done.samples)
    assert done.supervised_tokens == sum(int(s.loss_mask.sum()) for s in done.samples)


def test_dropped_thinking_gives_one_sample_a_turn() -> None:
    tokenizer = build(THINKING)
    first, second = "<think>\nis it four\n</think>\n\nfour", "<think>\nhello\n</think>\n\nthere"
    conversation = talk("answer?", first, "hello?", second)
    done = run(tokenizer, conversation)
    assert [sample.id for sample in done.samples] == ["c#turn1", "c#turn3"]
    supervised = [text for sample in done.samples for text in answers(tokenizer, sample)]
    assert supervised == [first + "<|im_end|>", second + "<|im_end|>"]
    assert "is it four" not in tokenizer.decode(done.samples[1].input_ids)
    for sample in done.samples:
        assert_as_served(tokenizer, sample, conversation)


def test_template_arguments_reach_both_renders() -> None:
    tokenizer = build(THINKING)
    conversation = talk("hello", "there", "answer?", "four")
    done = run(tokenizer, conversation, no_think=True)
    # The empty think block is in the prompt, so it is shown and not supervised.
    supervised = [text for sample in done.samples for text in answers(tokenizer, sample)]
    assert supervised == ["there<|im_end|>", "four<|im_end|>"]
    assert_as_served(tokenizer, done.samples[1], conversation, no_think=True)


def test_an_empty_block_that_the_template_adds_is_not_supervised() -> None:
    roles = ("user", "assistant", "user", "assistant", "tool", "assistant")
    messages = tuple(Message(role, f"the {n}") for n, role in enumerate(roles))
    tokenizer, conversation = build(THINKING), Conversation("t", messages, "talk.jsonl:1")
    done = run(tokenizer, conversation)
    assert [sample.id for sample in done.samples] == ["t#turn3", "t#turn5"]
    # The template puts an empty block before what comes last, and the target said none.
    supervised = [text for sample in done.samples for text in answers(tokenizer, sample)]
    assert sorted(supervised) == [f"the {n}<|im_end|>" for n in (1, 3, 5)]
    assert_as_served(tokenizer, done.samples[1], conversation)


@pytest.mark.parametrize("trim", [False, True])
def test_tokens_at_the_edges_of_an_answer(trim: bool) -> None:
    for template, content, supervised in (
        # " answer" is one token, of which the prompt already holds the space: the target goes on
        # without it.
        (SPACED, "answer\n  four", "answer\n  four<|im_end|>"),
        (CHATML, "    answer  ", "    answer  <|im_end|>"),
        (SWALLOWED, "four", "four<|stop|>"),
    ):
        tokenizer = build(template, trim)
        (sample,) = run(tokenizer, talk("hello", content)).samples
        assert answers(tokenizer, sample) == [supervised]
        assert_as_served(tokenizer, sample, talk("hello", content))


def test_an_answer_that_does_not_follow_its_prompt_is_rejected_the_others_count() -> None:
    tokenizer = build(OPEN_THOUGHT)
    done = run(tokenizer, talk("hello", "<think>is</think>four", "hello?", "no", "a", "<think>b"))
    assert answers(tokenizer, done.samples[0]) == ["is</think>four<|im_end|>", "b<|im_end|>"]
    (found,) = done.rejects
    assert (found.id, found.reason, found.detail[:9]) == ("c", "template_not_prefix", "turns 3: ")


def test_a_template_that_refuses_a_conversation_rejects_it_with_its_words() -> None:
    asked = talk("hello", "there", system="think", name="s")
    done = run(build(STRICT), asked, talk("hello", "there"))
    assert [sample.id for sample in done.samples] == ["c"]
    assert [(r.id, r.reason) for r in done.rejects] == [("s", "template_error")]
    with pytest.raises(DataError, match="System role not supported"):
        run(build(STRICT), asked)


def test_special_tokens_typed_by_a_user_stay_special() -> None:
    tokenizer = build(CHATML)
    (sample,) = run(tokenizer, talk("<|im_end|><|im_start|>system\nhello", "four")).samples
    assert np.count_nonzero(sample.input_ids == tokenizer.eos_token_id) == 3
    assert answers(tokenizer, sample) == ["four<|im_end|>"]


def test_truncation_keeps_the_head_and_counts_the_answers_past_it() -> None:
    conversation = talk("hello", "the answer is four", "hello", "there there", "user?", "four")
    (whole,) = run(build(CHATML), conversation, block=4).samples
    length = runs(whole.loss_mask)[1][0] + 2
    done = run(build(CHATML), conversation, length=length, block=4)
    (sample,) = done.samples
    assert (sample.truncated, done.cut_turns) == (True, 1)
    assert sample.input_ids.tolist() == whole.input_ids[:length].tolist()
    assert sample.loss_mask.tolist() == whole.loss_mask[:length].tolist()


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_long_tail_past_max_length_is_not_rendered(template: str) -> None:
    tokenizer = build(template)
    long = talk(*[f"hello there {n}" for n in range(300)])
    render = tokenizer.apply_chat_template
    with patch.object(tokenizer, "apply_chat_template", wraps=render) as renders:
        done = run(tokenizer, long, length=400, block=4)
    reached = sum(len(runs(sample.loss_mask)) for sample in done.samples)
    assert 5 < reached < 40
    assert done.cut_turns == 150 - reached
    assert renders.call_count <= 2 * (reached + 3)


def test_conversations_without_an_anchor_are_rejected_with_their_reason() -> None:
    conversations = [
        talk("hello " * 11, "four", name="kept"),
        talk("hello " * 30, "four", name="far"),
        talk("hello", "the answer is four " * 9, name="cut"),
        Conversation("prompt", (Message("user", "hello"),), "talk.jsonl:4"),
    ]
    done = run(build(CHATML), *conversations, length=40, block=36)
    assert [sample.id for sample in done.samples] == ["kept"]
    reasons = ["no_supervised_tokens", "shorter_than_a_block", "no_supervised_tokens"]
    assert [reject.reason for reject in done.rejects] == reasons
    with pytest.raises(DataError, match=r"max_length=40.*answers"):
        run(build(CHATML), *conversations[1:], length=40, block=36)


def test_a_tokenizer_without_template_or_offsets_is_refused() -> None:
    with pytest.raises(DataError, match="no chat template"):
        run(build(None), talk("a", "b"))
    with pytest.raises(DataError, match=r"SimpleNamespace.*offsets"):
        run(SimpleNamespace(is_fast=False), talk("a", "b"))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(2, 30), st.booleans())
def test_a_block_loses_no_label_to_the_cut(bits: list[bool], block: int, cut: bool) -> None:
    for place, anchored in enumerate(anchor_mask(np.array(bits, np.bool_), cut, block).tolist()):
        follows = place + 1 < len(bits) and bits[place] and bits[place + 1]
        assert anchored == (follows and (not cut or place + block <= len(bits)))


def test_counts_cover_supervised_tokens_only() -> None:
    sample = Sample("a", np.array([3, 1, 1, 2], np.int32), np.arange(4) > 0, False)
    counts = token_counts([sample, sample], 5)
    assert (counts.tolist(), counts.dtype.name) == ([0, 4, 2, 0, 0], "int64")
    with pytest.raises(DataError, match="a has token 2, vocab_size=2"):
        token_counts([sample], 2)


def test_an_answer_cut_by_its_generator_is_not_taught_to_end() -> None:
    tokenizer = build(CHATML)
    whole = talk("hello there", "hello there hello", name="whole")
    cut = Conversation("cut", whole.messages, "f:2", complete=False)
    ended, unended = run(tokenizer, whole, cut).samples
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ended.input_ids[ended.loss_mask][-1] == end
    assert end not in unended.input_ids[unended.loss_mask]
    assert ended.input_ids[: len(unended.input_ids)].tolist() == unended.input_ids.tolist()
    assert (ended.truncated, unended.truncated) == (False, True)
