"""Targets whose rotation depends on the longest text of a batch get one table for a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.config.load import build_config as build_run
from draftline.decode.session import DecodeSession
from draftline.errors import TargetError
from draftline.model.target.rope import fix_rope
from draftline.model.target.target import Target, load_target
from draftline.train.plan.inputs import feature_key
from tests.support.architectures import build_model
from tests.support.fakes import random_ids, tiny_tokenizer

CPU = torch.device("cpu")
TAPS = (1, 2)
SWITCHING = ["phi3_longrope", "dynamic_ntk"]
# Both switch after 32 positions.
SHORT, LONG = 24, 40


def tapped(name: str, context: int | None) -> Target:
    return Target(build_model(name), tiny_tokenizer(), taps=TAPS, context=context)


@torch.no_grad()
def own_taps(model: Any, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[tap + 1] for tap in TAPS], -1)


@pytest.mark.parametrize("context", [32, LONG, None])
@pytest.mark.parametrize("name", SWITCHING)
def test_a_short_text_is_the_same_alone_padded_and_beside_a_long_one(
    name: str, context: int | None
) -> None:
    target = tapped(name, context)
    short, long = random_ids(1, SHORT), random_ids(1, LONG, seed=2)
    alone, _ = target.features(short)
    together = torch.cat([torch.nn.functional.pad(short, (0, LONG - SHORT)), long])
    for batch in (together[:1, :33], together[:1], together):
        features, _ = target.features(batch)
        torch.testing.assert_close(features[:1, :SHORT], alone, rtol=1e-4, atol=1e-5)
    again, _ = target.features(short)
    assert torch.equal(again, alone), "a long forward left something behind"


@pytest.mark.parametrize("name", SWITCHING)
def test_the_table_is_the_models_own_for_texts_of_that_length(name: str) -> None:
    model = build_model(name)
    wanted = {tokens: own_taps(model, random_ids(1, tokens)) for tokens in (SHORT, LONG)}
    for context, exact, other in ((32, SHORT, LONG), (LONG, LONG, SHORT)):
        target = tapped(name, context)
        seen, _ = target.features(random_ids(1, exact))
        torch.testing.assert_close(seen, wanted[exact], rtol=1e-4, atol=1e-4)
        seen, _ = target.features(random_ids(1, other))
        assert (seen - wanted[other]).norm() > 0.01 * seen.norm(), "the tables are alike"


@pytest.mark.parametrize("context", [32, 60, None])
@pytest.mark.parametrize("name", SWITCHING)
def test_plain_decoding_does_not_depend_on_the_prompts_beside(
    name: str, context: int | None
) -> None:
    target = tapped(name, context)
    target.stop_ids = ()
    short, other = random_ids(1, 8)[0].tolist(), random_ids(1, 18, seed=2)[0].tolist()
    found = []
    for prompts in ([short], [short, other]):
        with DecodeSession(target, None, rows=len(prompts), slots=32) as decoder:
            found.append(decoder.decode(prompts, 12).tokens[0])
    assert found[0] == found[1]
    # The whole forward, which is that of training, says the same.
    text = random_ids(1, 8)
    for token in found[0]:
        _, last = target.features(text, last_hidden=True)
        assert last is not None
        assert int(target.head.logits(last[:, -1]).argmax()) == token
        text = torch.cat([text, torch.tensor([[token]])], dim=1)


@pytest.mark.parametrize("name", SWITCHING)
def test_decoding_beyond_the_short_table_is_refused(name: str) -> None:
    target = tapped(name, 32)
    target.check_decodable(32)
    with pytest.raises(TargetError, match=r"33 positions.*32"):
        target.check_decodable(33)
    for context in (33, None):
        tapped(name, context).check_decodable(200)


@pytest.mark.parametrize("name", SWITCHING)
def test_a_replica_has_the_same_table(name: str) -> None:
    target = tapped(name, None)
    twin = target.replica(CPU)
    assert torch.equal(
        twin.features(random_ids(1, SHORT))[0], target.features(random_ids(1, SHORT))[0]
    )


def test_cached_features_of_another_table_are_others() -> None:
    run = build_run({"target": {"path": "x"}, "data": {"train": ["x"]}, "train": {"steps": 1}})
    keys = [feature_key(run, [], tapped("phi3_longrope", context)) for context in (32, 33, 90)]
    assert keys[0] != keys[1] == keys[2]


def test_the_table_is_recorded_with_how_to_serve(tmp_path: Any) -> None:
    build_model("phi3_longrope").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    choices = Choices()
    load_target(str(tmp_path), device=CPU, taps=TAPS, context=32, choices=choices)
    (choice,) = [c for c in choices.entries if c.what == "target.rope"]
    assert choice.got == "the short table"
    assert "--max-model-len at most 32" in choice.reason
    load_target(str(tmp_path), device=CPU, taps=TAPS, choices=choices)
    assert [c.got for c in choices.entries if c.what == "target.rope"] == [
        "the short table",
        "the long table",
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4_e2b"])
def test_rotations_that_do_not_depend_on_lengths_are_left_alone(name: str) -> None:
    decoder = build_model(name).get_decoder()
    before = {key: value.clone() for key, value in decoder.rotary_emb.named_buffers()}
    assert fix_rope(decoder, 10**6) is None
    after = dict(decoder.rotary_emb.named_buffers())
    assert all(torch.equal(after[key], value) for key, value in before.items())
