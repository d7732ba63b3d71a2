"""Facts read without weights are those of the loaded target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftline.choices import Choices
from draftline.config.load import build_config
from draftline.errors import TargetError
from draftline.model.drafter.init import build_shape
from draftline.model.drafter.vocabulary import choose_mask_token
from draftline.model.target.facts import TargetFacts, read_facts
from draftline.model.target.target import load_target
from draftline.train.features.cache import feature_size
from tests.support.fakes import FAMILIES, tiny_target_dir

CPU = torch.device("cpu")
TAPS = (0, 2, 3)
# What `load_target` refuses, and test_target.py holds.
REFUSED = ("gemma2", "gpt_oss", "gpt2", "opt", "phi", "llama4")
Build = Callable[[str], Path]


def facts_of(path: Path, **options: object) -> TargetFacts:
    taps = {} if "num_taps" in options else {"taps": TAPS}
    return read_facts(str(path), **(taps | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_facts_are_those_of_the_loaded_target(family: str, target_dir: Build) -> None:
    path = target_dir(family)
    target = load_target(str(path), device=CPU, taps=TAPS)
    facts = facts_of(path)
    for name in ("taps", "hidden_size", "num_layers", "vocab_size", "stop_ids", "dtype"):
        assert getattr(facts, name) == getattr(target, name), name
    texts = [t.text_config.to_dict() | {"_name_or_path": ""} for t in (facts, target)]
    assert texts[0] == texts[1]
    assert facts.embedding_rows == len(target.embedding)
    own = {id(p): p.numel() * p.element_size() for p in target.parameters()}
    assert facts.total_bytes == sum(own.values())
    assert facts.embedding_bytes == own[id(target.embedding)]
    tied = target.head.weight is target.embedding
    assert facts.head_bytes == (0 if tied else own[id(target.head.weight)])
    trunk = [p for layer in target.layers[: TAPS[-1] + 1] for p in layer.parameters()]
    assert facts.trunk_bytes == facts.embedding_bytes + sum(own[id(p)] for p in trunk)
    for token_id in (0, 5, facts.embedding_rows - 1):
        assert facts.embedding[token_id].equal(target.embedding[token_id])  # type: ignore[union-attr]
    assert facts.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    tree = {"target": {"path": "x"}, "data": {"train": ["x"]}, "train": {"steps": 1}}
    if family != "deepseek_v3":
        config = build_config(tree)
        assert build_shape(config, facts, 3) == build_shape(config, target, 3)
    used = np.zeros(facts.embedding_rows, np.int64)
    masks = [choose_mask_token(t, None, used, Choices()) for t in (facts, target)]
    assert masks[0] == masks[1]


@pytest.mark.parametrize(
    ("family", "reason"), [("gpt2", "no list of"), ("phi", "head with a bias")]
)
def test_a_target_that_cannot_be_tapped_is_refused_before_its_weights_are_read(
    family: str, reason: str, target_dir: Build
) -> None:
    with pytest.raises(TargetError, match=reason):
        facts_of(target_dir(family))


def test_a_config_alone_is_enough(target_dir: Build, tmp_path: Path) -> None:
    whole = facts_of(target_dir("llama"))
    shutil.copy(target_dir("llama") / "config.json", tmp_path)
    bare = facts_of(tmp_path)
    assert bare.tokenizer is None
    assert (bare.total_bytes, bare.trunk_bytes) == (whole.total_bytes, whole.trunk_bytes)
    assert bare.stop_ids == whole.stop_ids
    assert bare.embedding[3] is None


def test_dtype_follows_the_device_and_halves_the_bytes(target_dir: Build) -> None:
    path = target_dir("llama")
    wide, narrow = facts_of(path), facts_of(path, device_type="cuda")
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert wide.total_bytes == 2 * narrow.total_bytes
    assert facts_of(path, dtype="float32", device_type="cuda").dtype == torch.float32
    assert feature_size(narrow, 10, last_hidden=True).bytes == 10 * 4 * 32 * 2


def test_nothing_of_the_model_is_allocated(target_dir: Build, tmp_path: Path) -> None:
    tree = json.loads((target_dir("llama") / "config.json").read_text())
    large = {"hidden_size": 2**16, "intermediate_size": 2**18, "vocab_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(tree | large))
    assert facts_of(tmp_path).total_bytes > 2**40


def test_work_a_token_counts_the_experts_that_it_is_routed_to(target_dir: Build) -> None:
    plain = facts_of(target_dir("llama"), taps=(0,))
    layer = plain.trunk_bytes - plain.embedding_bytes
    assert plain.trunk_flops == 2 * layer / 4
    assert plain.total_flops == plain.num_layers * plain.trunk_flops
    experts = facts_of(target_dir("deepseek_v3"))
    weights = 2 * (experts.trunk_bytes - experts.embedding_bytes) / 4
    state = load_file(target_dir("deepseek_v3") / "model.safetensors")
    routed = [
        tensor.numel()
        for name, tensor in state.items()
        if ".mlp.experts." in name and int(name.split(".")[2]) <= TAPS[-1]
    ]
    assert routed
    assert experts.trunk_flops == weights - 2 * sum(routed) / 2, "2 of 4 experts are asked"


def test_stop_ids_of_the_generation_config_count(target_dir: Build, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "target")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert facts_of(path).stop_ids == load_target(str(path), device=CPU, taps=TAPS).stop_ids
    assert 9 in facts_of(path).stop_ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"model_type": "nothing"}, "no model type 'nothing'"), ({"num_hidden_layers": 3}, "taps")],
)
def test_what_cannot_be_read_or_tapped_is_said(
    changes: dict[str, object], reason: str, target_dir: Build, tmp_path: Path
) -> None:
    tree = json.loads((target_dir("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tree | changes))
    with pytest.raises(TargetError, match=reason):
        read_facts(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TargetError, match=r"tokenizer .*cannot be read"):
        read_facts(str(tmp_path))
