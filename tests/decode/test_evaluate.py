"""Scores are pooled counts of real decoding; what was not measured is not a number."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import accelerate.hooks
import pytest
import torch
from rich.console import Console

from draftline.config.running import EvaluateSection
from draftline.decode import evaluate as module
from draftline.decode.evaluate import (
    PlainOutputs,
    Score,
    evaluate,
    evaluate_drafter,
    read_prompts,
    score_table,
)
from draftline.decode.propose import DraftModel
from draftline.decode.session import DecodeSession
from draftline.errors import DataError
from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target, load_target
from tests.support.tiny import (
    build_drafter,
    build_samples,
    build_shape,
    build_target,
    refuse_system_turns,
    teach,
)

PROMPTS = {
    "short": [s.input_ids.tolist() for s in build_samples((3, 9, 4, 6, 2), seed=4)],
    "long": [s.input_ids.tolist() for s in build_samples((30, 25), seed=5)],
}


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="module")
def draft(target: Target) -> DraftModel:
    return DraftModel(
        teach(target, build_drafter(build_shape(target)), PROMPTS["short"], new=12, steps=30)
    )


def run(target: Target, draft: DraftModel, **changes: Any) -> list[Score]:
    values: dict[str, Any] = {
        "temperatures": [0.0],
        "max_new_tokens": 12,
        "batch_size": 2,
        "seed": 0,
        "plain": PlainOutputs(),
    }
    return evaluate(target, draft, PROMPTS, **(values | changes))


def test_scores_pool_the_rounds_of_every_prompt(target: Target, draft: DraftModel) -> None:
    short, long = run(target, draft)
    # Rounds differ from prompt to prompt, else every kind of mean would be the same.
    assert short.accept_length > 1.3 * long.accept_length
    assert 0 < short.slot_acceptance[2] < short.slot_acceptance[0] < 1
    assert (short.name, long.name) == ("short", "long")
    assert (short.prompts, long.prompts) == (5, 2)
    for score, prompts in ((short, PROMPTS["short"]), (long, PROMPTS["long"])):
        decoded = [
            DecodeSession(target, draft, rows=1, slots=80).decode([prompt], 12)
            for prompt in prompts
        ]
        assert score.new_tokens == sum(d.new_tokens for d in decoded)
        assert score.rounds == sum(d.rounds for d in decoded)
        assert score.committed == sum(d.committed for d in decoded)
        # Sum over sum, not a mean of means.
        assert score.accept_length == score.committed / score.rounds
        for n, count in enumerate(score.committed_counts):
            assert count == sum(d.committed_counts[n] for d in decoded)
        for slot, share in enumerate(score.slot_acceptance):
            hits = sum(d.slot_accepted[slot] for d in decoded)
            assert share == pytest.approx(hits / score.rounds)
        assert score.identical == score.compared == len(prompts)
        assert score.tokens_per_s > 0
        assert score.speedup == score.tokens_per_s / score.plain_tokens_per_s


def test_batches_change_speeds_only(target: Target, draft: DraftModel) -> None:
    def counts(batch_size: int) -> list[dict[str, Any]]:
        free = ("tokens_per_s", "plain_tokens_per_s", "batch_size")
        scores = run(target, draft, batch_size=batch_size)
        return [{k: v for k, v in s.to_dict().items() if k not in free} for s in scores]

    assert counts(1) == counts(2) == counts(64)
    assert [s.batch_size for s in run(target, draft, batch_size=64)] == [5, 5]


def test_without_plain_decoding_nothing_is_compared(target: Target, draft: DraftModel) -> None:
    for score in run(target, draft, plain=None):
        assert math.isnan(score.plain_tokens_per_s)
        assert math.isnan(score.speedup)
        assert score.compared == score.identical == 0
        assert score.to_dict()["plain_tokens_per_s"] is None


def test_sampled_output_is_not_compared(target: Target, draft: DraftModel) -> None:
    scores = run(target, draft, temperatures=[0.0, 1.0])
    assert [(s.temperature, s.compared) for s in scores] == [(0, 5), (0, 2), (1, 0), (1, 0)]
    assert all(s.plain_tokens_per_s > 0 for s in scores)


def test_plain_output_is_decoded_once_for_many_drafters(
    target: Target, draft: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_calls = []
    decode = module._decode

    def counted(decoder: DecodeSession, *rest: Any, **named: Any) -> Any:
        plain_calls.append(decoder.block == 1)
        return decode(decoder, *rest, **named)

    monkeypatch.setattr(module, "_decode", counted)
    plain = PlainOutputs()
    first = run(target, draft, plain=plain)
    other = DraftModel(build_drafter(build_shape(target), seed=8))
    second = run(target, other, plain=plain)
    assert plain_calls.count(True) == 2
    assert [s.plain_tokens_per_s for s in first] == [s.plain_tokens_per_s for s in second]
    assert all(s.identical == s.compared for s in second)


def test_a_wrong_output_shows(target: Target, draft: DraftModel) -> None:
    plain = PlainOutputs()
    run(target, draft, plain=plain)
    tokens, rate = plain._known["short", 0.0, 1]
    tokens[1] = tokens[1][:-1]
    plain._known["short", 0.0, 1] = (tokens, rate)
    short, long = run(target, draft, plain=plain)
    assert (short.identical, short.compared) == (4, 5)
    assert (long.identical, long.compared) == (2, 2)


def test_outputs_of_one_token_measure_nothing(target: Target, draft: DraftModel) -> None:
    scores = run(target, draft, max_new_tokens=1)
    for score in scores:
        assert score.rounds == score.committed == 0
        assert math.isnan(score.accept_length)
        assert math.isnan(score.tokens_per_s)
        assert math.isnan(score.speedup)
        assert score.identical == score.compared > 0
        json.dumps(score.to_dict(), allow_nan=False)
    assert "n/a" in render(scores)


def render(scores: list[Score]) -> str:
    out = StringIO()
    Console(file=out, width=160).print(score_table(scores, "the title"))
    return out.getvalue()


def test_a_target_that_spans_devices_is_evaluated_as_one_that_does_not(
    target_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of the one CPU: everything happens but the moving itself."""
    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", lambda *_, **__: None)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "what is it?"}]}) + "\n")
    section = EvaluateSection(prompts={"talks": str(path)}, max_new_tokens=12, batch_size=2)
    scores = []
    for devices in (torch.device("cpu"), [torch.device("cpu", 0), torch.device("cpu", 1)]):
        target = load_target(str(target_dir("llama")), device=devices, taps=(1, 2))
        drafter = build_drafter(build_shape(target))
        (score,) = evaluate_drafter(target, drafter, None, section, template={}, seed=0)
        scores.append(replace(score, tokens_per_s=0.0, plain_tokens_per_s=0.0))
    assert scores[0] == scores[1]
    assert scores[0].identical == scores[0].compared == 1
    # Wherever the last layer is, states are brought to the target's own device.
    target._tapped.device = torch.device("meta")
    cache = StaticKV(1, 8, torch.device("cpu"))
    cache.begin_prefill(3)
    hidden, features = target.extend(torch.ones(1, 3).long(), torch.arange(3)[None], cache, None)
    assert hidden.device.type == features.device.type == "meta"


def test_the_table_shows_the_numbers(target: Target, draft: DraftModel) -> None:
    score = replace(
        run(target, draft)[0],
        accept_length=2.3456,
        slot_acceptance=[0.789, 0.5, 0.1],
        tokens_per_s=123.45,
        plain_tokens_per_s=50.0,
        identical=4,
    )
    text = render([score, replace(score, compared=0, plain_tokens_per_s=math.nan)])
    first, second = [line for line in text.splitlines() if "short" in line]
    for number in ("2.346", "0.79", "123.5", "50.0", "2.47", "4 of 5"):
        assert number in first or number.replace("123.5", "123.4") in first
    assert second.count("n/a") == 3


def write(path: Path, *conversations: list[tuple[str, str]]) -> str:
    rows = [{"messages": [{"role": r, "content": c} for r, c in turns]} for turns in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_end_with_the_generation_prompt(target: Target, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        [("user", "HI")],
        [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")],
        [("system", "S"), ("user", "E")],
    )
    read = read_prompts({"a": file, "b": file}, target, limit=None, template={})
    texts = [target.tokenizer.decode(ids) for ids in read["a"]]
    assert texts == [
        "<s><user>HI<e><assistant>",
        "<s><user>A<e><assistant>B<e><user>C<e><assistant>",
        "<s><system>S<e><user>E<e><assistant>",
    ]
    assert read["b"] == read["a"]
    assert read_prompts({"a": file}, target, limit=2, template={})["a"] == read["a"][:2]


def test_prompts_that_cannot_be_used_are_data_errors(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"evaluate\.prompts"):
        read_prompts({}, target, limit=None, template={})
    with pytest.raises(DataError):
        read_prompts({"a": str(tmp_path / "none.jsonl")}, target, limit=None, template={})
    file = write(tmp_path / "a.jsonl", [("user", "HI")], [("system", "S"), ("user", "E")])

    refuse_system_turns(monkeypatch)
    with pytest.raises(DataError, match=r"a\.jsonl:2.*System role not supported"):
        read_prompts({"a": file}, target, limit=None, template={})
