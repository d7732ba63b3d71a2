"""What is known before weights are loaded, and the key under which features are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.config.schema import Config
from draftline.errors import FallbackError, TargetError
from draftline.model.target.target import Target
from draftline.runtime.devices import parse_devices
from draftline.train.plan.inputs import feature_key, prepare
from tests.support.fakes import tiny_model, tiny_tokenizer
from tests.support.tiny import build_samples, build_target


def config(path: str = "somewhere", **loss: Any) -> Config:
    return build_config(
        {
            "target": {"path": path},
            "data": {"train": ["data.jsonl"]},
            "train": {"steps": 1},
            "loss": loss,
        }
    )


def test_the_key_is_that_of_tokens_target_and_taps() -> None:
    samples = build_samples((9, 5))
    key = feature_key(config(), samples, build_target())
    assert key == feature_key(config(), build_samples((9, 5)), build_target())
    assert key == feature_key(config("moved"), samples, build_target()), "a target may move"
    assert key == feature_key(config(kind="dpace"), samples, build_target())
    others = [
        feature_key(config(), build_samples((9, 5), seed=1), build_target()),
        feature_key(config(), build_samples((5, 9)), build_target()),
        feature_key(config(), samples[::-1], build_target()),
        feature_key(config(soft_labels=0.5), samples, build_target()),
        feature_key(config(), samples, build_target(taps=(0, 1))),
        feature_key(config(), samples, build_target(dtype=torch.bfloat16)),
        feature_key(config(), samples, build_target(seed=1)),
    ]
    assert len({key, *others}) == 1 + len(others)


def test_weights_that_changed_behind_the_same_path_are_another_target() -> None:
    samples = build_samples((9, 5))
    target = build_target()
    key = feature_key(config(), samples, target)
    layer = target.layers[1]
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1.001)
    assert feature_key(config(), samples, target) != key


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("granite", {"embedding_multiplier": 6.0}),
        ("granite", {"residual_multiplier": 0.5}),
        ("gemma3", {"sliding_window": 12}),
        ("llama", {"rms_norm_eps": 1e-3}),
    ],
)
def test_arithmetic_that_changed_in_the_configuration_alone_is_another_target(
    family: str, changed: dict[str, Any]
) -> None:
    def key(**changes: Any) -> str:
        target = Target(tiny_model(family, **changes), tiny_tokenizer(), taps=(1, 2))
        target.text_config.transformers_version = "0.0.0"
        return feature_key(config(), [], target)

    # Not another version, nor how it is stored.
    assert key() == key(use_cache=False)
    assert key() != key(**changed)


@pytest.fixture
def prepared(tmp_path: Path, target_dir: Callable[[str], Path]) -> Callable[..., Config]:
    """A configuration over three short conversations and a tiny target, or its config.json alone."""
    talks = [
        {"id": str(n), "messages": [{"role": r, "content": f"{r} number {n} "} for r in roles]}
        for n, roles in enumerate([("user", "assistant")] * 3)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def build(*overrides: str, bare: bool = False) -> Config:
        path = target_dir("llama")
        if bare:
            path = tmp_path / "bare"
            path.mkdir(exist_ok=True)
            shutil.copy(target_dir("llama") / "config.json", path)
        tree = {
            "target": {"path": str(path), "tap_layers": [1, 2]},
            "data": {"train": [str(tmp_path / "talks.jsonl")], "max_length": 200},
            "block_size": 4,
            "train": {"steps": 1},
        }
        return build_config(tree, list(overrides))

    return build


def test_no_weight_is_loaded(
    prepared: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    load = LlamaForCausalLM.from_pretrained

    def shapes_only(*args: Any, **kwargs: Any) -> Any:
        model, *rest = load(*args, **kwargs)
        assert all(p.is_meta for p in model.parameters()), "weights were loaded"
        return model, *rest

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", shapes_only)
    inputs = prepare(prepared("drafter.vocab_size=20"), Choices())
    assert inputs.facts.taps == (1, 2)
    assert inputs.shape.hidden_size == inputs.facts.hidden_size
    assert len(inputs.samples) == inputs.rows == 3
    assert inputs.supervised_tokens < inputs.tokens
    assert inputs.token_ids is not None
    assert inputs.token_ids.device.type == "cpu"
    assert "3 samples of 3 rows" in inputs.summary()
    assert "about" not in inputs.summary()


def test_the_kind_of_device_settles_the_dtype(prepared: Callable[..., Config]) -> None:
    gpus = parse_devices("1x80")
    assert prepare(prepared(), Choices(), ()).facts.dtype == torch.float32
    assert prepare(prepared(), Choices(), gpus).facts.dtype == torch.bfloat16
    on_cpu = prepare(prepared("run.device=cpu"), Choices(), gpus)
    assert on_cpu.facts.dtype == torch.float32


def test_without_a_tokenizer_lengths_are_guessed_only_when_asked(
    prepared: Callable[..., Config],
) -> None:
    config = prepared(bare=True)
    with pytest.raises(TargetError, match="has no tokenizer"):
        prepare(config, Choices())
    choices = Choices()
    inputs = prepare(config, choices, estimate=True)
    assert inputs.estimated
    characters = len("user number 0 ") + len("assistant number 0 ")
    assert [len(s.input_ids) for s in inputs.samples] == [characters // 4] * 3
    assert f"about {inputs.tokens} tokens" in inputs.summary()
    assert [entry.what for entry in choices.entries if entry.fallback] == ["data.tokens"]
    with pytest.raises(FallbackError):
        prepare(config, Choices(strict=True), estimate=True)
    cut = prepare(prepared("data.max_length=5", bare=True), Choices(), estimate=True)
    assert [len(s.input_ids) for s in cut.samples] == [5] * 3
    assert all(s.truncated for s in cut.samples)


def test_answers_that_are_not_the_targets_own_are_said(
    prepared: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prepare(prepared(), Choices())
    [said] = [m for m in caplog.messages if "not this target's own words" in m]
    assert "draftline regenerate" in said
    caplog.clear()
    prepare(prepared("data.train=['builtin:demo-train']"), Choices())
    assert "own words" not in caplog.text
