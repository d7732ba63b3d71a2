"""Which form an export has, and what is said about serving it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftline.choices import Choices
from draftline.config.model import TargetSection
from draftline.errors import ConfigError, FallbackError
from draftline.export.engines import choose_folding
from draftline.export.serving import Served, parallel_sizes, serve_lines, serving
from draftline.export.zlab import build_config, export_zlab
from tests.support.tiny import build_drafter, build_shape, build_target

CONFIG: dict[str, Any] = {
    "block_size": 16,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "dflash_config": {},
}
GRANITE = Served("m", "GraniteForCausalLM", embed_scale=12.0)


def lines(served: Served, out: str = "my-drafter", **changes: Any) -> str:
    return "\n".join(serve_lines(out, CONFIG | changes, served))


def test_the_lines_can_be_pasted() -> None:
    text = lines(
        Served("/models/it's a target", "Qwen3ForCausalLM", remote_code=True), "my $drafter"
    )
    vllm, sglang = (shlex.split(x) for x in text.splitlines() if x.startswith("  "))
    assert vllm[:4] == ["vllm", "serve", "/models/it's a target", "--trust-remote-code"]
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "my $drafter",
        "num_speculative_tokens": 15,
    }
    assert sglang[:5] == ["python", "-m", "sglang.launch_server", "--model-path", vllm[2]]
    options = dict(zip(sglang[6::2], sglang[7::2], strict=True))
    assert options == {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "my $drafter",
        "--speculative-num-draft-tokens": "16",
    }
    assert sglang[5] == "--trust-remote-code"
    assert "at most 4096 positions" in text
    assert text.endswith("divide the drafter: 1, 2, 4, 8, 16, 32")


def test_mixed_layers_need_the_other_runner() -> None:
    served = Served("m", "LlamaForCausalLM")
    mixed = lines(served, layer_types=["sliding_attention", "full_attention"])
    assert "\n  VLLM_USE_V2_MODEL_RUNNER=1 vllm serve m " in mixed
    assert "vLLM >= 0.26" in mixed
    for alike in ("sliding_attention", "full_attention"):
        assert "VLLM_USE" not in lines(served, layer_types=[alike, alike])


def test_linear_attention_needs_buffers_in_sglang() -> None:
    served = Served("m", "Qwen3_5ForConditionalGeneration", recurrent=True)
    assert lines(served).count("--mamba-scheduler-strategy extra_buffer") == 1


@pytest.mark.parametrize(
    ("architecture", "vllm", "sglang"),
    [
        ("LlamaForCausalLM", True, True),
        ("Qwen3ForCausalLM", True, True),
        ("Qwen2ForCausalLM", True, False),
        ("GraniteForCausalLM", True, False),
        ("Gemma3ForCausalLM", False, False),
        ("Gemma3ForConditionalGeneration", False, False),
        ("Gemma4ForCausalLM", True, True),
        ("GptOssForCausalLM", True, True),
        ("CohereForCausalLM", False, False),
    ],
)
def test_engines_without_hooks_are_named(architecture: str, vllm: bool, sglang: bool) -> None:
    text = lines(Served("m", architecture))
    for title, able in (("vLLM 0.32", vllm), ("SGLang 0.5.23", sglang)):
        assert (f"serve with {title}:" in text) == able
        reason = f"not with {title}: it has no hooks to read the hidden states of {architecture}"
        assert (reason in text) != able
    assert "bounds: " in text


@pytest.mark.parametrize(
    ("engine", "architecture", "folded"),
    [
        ("auto", "GraniteForCausalLM", True),
        ("auto", "Gemma4ForCausalLM", True),
        ("auto", "Gemma3ForCausalLM", False),  # neither can: the layout's own form
        ("vllm", "Gemma4ForConditionalGeneration", True),
        ("sglang", "Gemma4ForConditionalGeneration", False),
        ("dflash", "GraniteForCausalLM", False),
    ],
)
def test_the_form_of_scaled_embeddings(engine: str, architecture: str, folded: bool) -> None:
    choices = Choices()
    assert choose_folding(engine, architecture, 12.0, choices) == folded
    assert len(choices.entries) == (engine == "auto")
    if engine == "auto":
        choice = choices.entries[0]
        assert (choice.what, choice.got) == ("export.engine", "vllm" if folded else "dflash")
        assert "embeddings are multiplied by 12" in choice.reason


def test_without_a_scale_there_is_nothing_to_choose() -> None:
    choices = Choices()
    for engine in ("auto", "vllm", "sglang", "dflash"):
        assert not choose_folding(engine, "LlamaForCausalLM", 1.0, choices)
    assert choices.entries == []


@pytest.mark.parametrize(
    ("engine", "architecture", "scale", "message"),
    [
        ("tgi", "LlamaForCausalLM", 1.0, "--engine=tgi is not one of auto, vllm, sglang, dflash"),
        ("vllm", "Gemma3ForCausalLM", 8.0, r"vLLM 0\.32 has no hooks.*--engine=dflash"),
        ("sglang", "GraniteForCausalLM", 12.0, r"SGLang 0\.5\.23 has no hooks"),
        ("sglang", "Qwen2ForCausalLM", 1.0, r"SGLang 0\.5\.23 has no hooks"),
        ("sglang", "LlamaForCausalLM", 3.0, r"SGLang 0\.5\.23 does not multiply.*by 3"),
    ],
)
def test_a_form_that_would_be_wrong_is_refused(
    engine: str, architecture: str, scale: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_folding(engine, architecture, scale, Choices())


def test_an_export_in_the_other_form_is_not_recommended() -> None:
    gemma = Served("m", "Gemma4ForCausalLM", embed_scale=8.0)
    folded = lines(gemma, dflash_config={"embedding_scale_folded": 8.0})
    kept = lines(gemma, dflash_config={"input_embedding_scale": 8.0})
    assert "serve with vLLM" in folded
    assert "not with SGLang 0.5.23: this export has the embedding scale in another form" in folded
    assert "serve with SGLang" in kept
    assert "not with vLLM 0.32: this export has the embedding scale in another form" in kept
    assert "--engine=vllm" in kept
    both = lines(GRANITE, dflash_config={"embedding_scale_folded": 12.0})
    assert "serve with vLLM" in both
    assert "not with SGLang 0.5.23: it has no hooks" in both


def test_a_cap_that_vllm_does_not_apply_is_said() -> None:
    served = Served("m", "LlamaForCausalLM")
    assert "not capped" in lines(served, dflash_config={"final_logit_softcapping": 30.0})
    assert "not capped" not in lines(served)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "sizes"),
    [
        (32, 8, 12288, [1, 2, 4, 8, 16, 32]),
        (9, 3, 1536, [1, 3]),
        (64, 4, 7680, [1, 2, 4, 8, 16, 32, 64]),
        (12, 3, 40, [1]),
        (6, 2, 48, [1, 2, 6]),
    ],
)
def test_parallel_sizes(heads: int, kv_heads: int, width: int, sizes: list[int]) -> None:
    assert parallel_sizes(heads, kv_heads, width) == sizes


def test_the_lines_of_a_real_export(tmp_path: Path) -> None:
    target = build_target()
    drafter = build_drafter(build_shape(target, block_size=5))
    out = export_zlab(drafter, target, target.taps, None, tmp_path / "my drafter")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    said = serving(out, target, TargetSection(path=str(tmp_path / "target")))
    words = shlex.split(said[1])
    assert words[2] == str(tmp_path / "target")
    assert json.loads(words[-1])["model"] == str(out)
    assert json.loads(words[-1])["num_speculative_tokens"] == 4
    assert "at most 512 positions" in said[-1]
    assert said[-1].endswith("divide the drafter: 1, 2, 4")


def test_the_architecture_is_the_one_of_config_json() -> None:
    target = build_target()
    assert target.architecture == "LlamaForCausalLM"
    target._model.config.architectures = ["MistralForCausalLM"]
    assert target.architecture == "MistralForCausalLM"


def test_what_the_configuration_does_not_say_is_recorded() -> None:
    target = build_target()
    shape = build_shape(target)
    choices = Choices()
    assert build_config(shape, target, (0, 2), "float32", None, choices=choices)["vocab_size"] == 64
    assert choices.entries == []
    target.text_config = SimpleNamespace(vocab_size=60)  # the head has four padded rows
    config = build_config(shape, target, (0, 2), "float32", None, choices=choices)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (60, 40960)
    found = {choice.what: choice for choice in choices.entries}
    assert found["export.vocab_size"].got == "60"
    assert found["export.max_position_embeddings"].fallback
    with pytest.raises(FallbackError, match="max_position_embeddings"):
        build_config(shape, target, (0, 2), "float32", None, choices=Choices(strict=True))


def test_dflash_reports_the_draft_head_and_loads_the_rest(tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model")
    target = build_target()
    target.embed_scale = 5.5
    drafter = build_drafter(build_shape(target))
    out = export_zlab(
        drafter, target, target.taps, torch.tensor([1, 3, 9]), tmp_path / "out", dtype="float32"
    )
    model, info = dflash.DFlashDraftModel.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert set(info["unexpected_keys"]) == {"d2t", "lm_head.weight"}
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    # The folded form needs bare rows, and this package, too, multiplies by the key alone.
    assert dflash._draft_value(model.config, "input_embedding_scale", 1.0) == 1.0
    assert model.config.rms_norm_eps == pytest.approx(1e-6 / 5.5**2)
