"""Quantised checkpoints give the weights that they stand for, or are refused by name, in a plan too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.target.facts import read_facts
from tests.support.fakes import VOCAB_SIZE, tiny_target_dir
from tests.support.loading import TAPS, load, refusal
from tests.support.quantise import (
    Quantise,
    awq,
    edit_config,
    edit_tensors,
    fp8,
    gptq,
    quantised_pair,
)

CPU = torch.device("cpu")
IDS = torch.randint(4, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(1))
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("family", "quantise", "config"),
    [
        ("llama", fp8("weight_scale_inv", block=16), BLOCKS),
        ("llama", fp8("weight_scale_inv"), {"quant_method": "fp8"}),
        ("mistral3", fp8("weight_scale_inv", block=16), BLOCKS),
        ("gemma3_with_vision", fp8("weight_scale_inv", block=16), BLOCKS),
        ("llama", gptq(4, 8), {"quant_method": "gptq", "bits": 4, "group_size": 8}),
        ("llama", gptq(4, 8, shuffled=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
        (
            "llama",
            gptq(8, 16, less_one=False),
            {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        ),
        ("llama", awq(8), {"quant_method": "awq", "bits": 4, "version": "gemm"}),
        ("deepseek_v3", awq(4), {"quant_method": "awq", "bits": 4, "version": "gemm"}),
        ("qwen3_vl", awq(8), {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    ],
)
def test_a_dequantised_target_computes_what_its_weights_stand_for(
    family: str, quantise: Quantise, config: dict[str, Any], tmp_path: Path
) -> None:
    plain, packed = quantised_pair(tmp_path, family, quantise, config)
    choices = Choices()
    target = load(packed, choices=choices)
    wanted, last = load(plain).features(IDS, last_hidden=True)
    seen, seen_last = target.features(IDS, last_hidden=True)
    torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen_last, last, rtol=1e-5, atol=1e-5)
    assert target.replica(CPU).features(IDS)[0].equal(seen)
    said = {c.what: (c.wanted, c.got) for c in choices.entries}
    assert said["target.weights"] == (config["quant_method"], "dequantised to float32")


@pytest.mark.parametrize("family", ["llama", "mistral3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_counts_the_bytes_that_stay_resident(
    family: str, dtype: str, tmp_path: Path
) -> None:
    plain, packed = quantised_pair(tmp_path, family, fp8("weight_scale_inv", block=16), BLOCKS)
    facts = read_facts(str(packed), taps=TAPS, dtype=dtype)
    target = load(packed, dtype=dtype)
    assert facts.dtype == target.dtype == getattr(torch, dtype)
    held = sum(p.numel() * p.element_size() for p in target.parameters())
    assert facts.total_bytes == held
    assert facts.total_bytes == read_facts(str(plain), taps=TAPS, dtype=dtype).total_bytes
    assert {p.dtype for p in target.parameters()} == {target.dtype}


def test_scales_of_modelopt_are_not_dropped(tmp_path: Path) -> None:
    """As reported: float8 weights, one scale each, and no quantiser of transformers for them."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    _, packed = quantised_pair(tmp_path, "llama", fp8("weight_scale"), config)
    assert "(quant_method modelopt, FP8)" in refusal(packed)
    tree = json.loads((packed / "config.json").read_text())
    del tree["quantization_config"]
    # The same checkpoint as its exporter writes it: the config alone says nothing.
    (packed / "config.json").write_text(json.dumps(tree))
    assert "is stored quantised" in refusal(packed)
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (packed / "hf_quant_config.json").write_text(json.dumps(side))
    assert "hf_quant_config.json: FP8" in refusal(packed)
    (packed / "config.json").write_text(json.dumps(tree | {"text_config": {
        "quantization_config": config}}))  # fmt: skip
    assert "quant_method modelopt" in refusal(packed)


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": (weight * 100).to(torch.int8)}, weight


def int32(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {"weight": (weight * 100).to(torch.int32)}, weight


@pytest.mark.parametrize(
    ("quantise", "config", "reason"),
    [
        (int32, None, r"weight is stored quantised \(I32"),
        (fp8(None), None, r"weight is stored quantised \(F8_E4M3"),
        (fp8(None), {"quant_method": "fp8"}, r"float8 without .*it has no scale at all"),
        (fp8("weight_scale"), {"quant_method": "fp8"}, r"weight_scale_inv .*it has weight_scale\)"),
        (int8, None, r"weight is stored quantised \(I8"),
        (int8, {"bits": 8}, "quant_method none named"),
        (int8, {"quant_method": "unheard"}, "unheard.*which transformers does not read"),
        (int8, {"quant_method": "torchao"}, "torchao.*keeps packed"),
        (gptq(4, 8), None, "stored quantised"),
        (gptq(4, 8), {"quant_method": "gptq", "bits": 3}, "gptq, 3 bits, layout gptq"),
        (awq(8), {"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout gemv"),
        # Of GPTQ's layout, and said to be AWQ's.
        (gptq(4, 8), {"quant_method": "awq", "bits": 4}, "does not fit its scales"),
        (fp8("weight_scale"), "fp8", "quantization_config is no mapping"),
    ],
)
def test_what_nobody_would_dequantise_is_refused(
    quantise: Quantise, config: Any, reason: str, tmp_path: Path
) -> None:
    _, packed = quantised_pair(tmp_path, "llama", quantise, config)
    with pytest.raises(TargetError, match=reason):
        read_facts(str(packed), taps=TAPS)
    with pytest.raises(TargetError):
        load(packed)


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_missing_package_is_named(
    config: dict[str, Any], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, packed = quantised_pair(tmp_path, "llama", fp8("weight_scale"), config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"not installed: pip install {package}" in refusal(packed)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}),
        ("quant_config.json", {"quant_method": "awq", "w_bit": 4}),
    ],
)
def test_a_quantisation_that_only_a_side_file_tells_of_is_refused(
    file: str, content: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_target_dir(tmp_path)
    (path / file).write_text(json.dumps(content))
    assert file in refusal(path)
    edit_config(path, compression_config={"quant_method": "compressed-tensors"})
    assert "compressed-tensors in compression_config" in refusal(path)


def test_a_quantised_key_value_cache_alone_is_no_quantised_weight(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    load(path)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight_scale",
        "model.embed_tokens.weight_scale_inv",
        "model.layers.3.self_attn.k_proj.k_scale",
        "model.layers.1.mlp.up_proj.input_scale",
        "model.layers.1.mlp.up_proj.weight_zero_point",
        "model.layers.2.mlp.down_proj.pre_quant_scale",
    ],
)
def test_a_scale_beside_plain_weights_is_refused(name: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    edit_tensors(path, lambda tensors: tensors | {name: torch.ones(1)})
    assert name in refusal(path)


def test_blocks_that_do_not_divide_a_weight_are_refused(tmp_path: Path) -> None:
    config = BLOCKS | {"weight_block_size": [16, 16]}
    _, packed = quantised_pair(tmp_path, "llama", fp8("weight_scale_inv", block=16), config)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    edit_tensors(packed, lambda tensors: tensors | {name: torch.ones(5, 2)})
    assert "blocks of its scales [5, 2]" in refusal(packed)


@pytest.fixture
def compressed(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*vision.*", "re:.*projector.*"],
        "config_groups": {"group_0": group},
    }
    return lambda family: quantised_pair(tmp_path, family, fp8("weight_scale"), config)


@pytest.mark.parametrize("family", ["llama", "mistral3"])
def test_compressed_tensors_leave_plain_modules(
    family: str, compressed: Callable[[str], tuple[Path, Path]]
) -> None:
    """Runs where that package is installed. It would quantise activations as well."""
    plain, packed = compressed(family)
    target = load(packed)
    torch.testing.assert_close(target.features(IDS)[0], load(plain).features(IDS)[0])
    held = sum(p.numel() * p.element_size() for p in target.parameters())
    assert held == read_facts(str(packed), taps=TAPS).total_bytes
