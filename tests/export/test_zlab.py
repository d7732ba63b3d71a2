"""An exported drafter is the trained one: for our own reader and for the package `dflash`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftline.checkpoint.zlab import load_zlab
from draftline.decode.propose import DraftModel
from draftline.decode.session import DecodeSession
from draftline.errors import ConfigError, ParityError
from draftline.export import zlab
from draftline.export.tensors import export_tensors
from draftline.export.zlab import build_config, export_zlab
from draftline.model.drafter.backbone import Drafter
from draftline.model.drafter.masks import draft_masks
from draftline.model.head import Head
from draftline.model.kv_cache import StaticKV
from draftline.model.target.target import Target
from tests.support.tiny import (
    build_drafter,
    build_model,
    build_samples,
    build_shape,
    build_target,
    teach,
)

SHAPES: list[dict[str, Any]] = [
    {},
    {"num_layers": 3, "sliding_layers": 2, "sliding_window": 6, "block_size": 5},
    {"num_layers": 2, "sliding_layers": 2, "sliding_window": 3, "num_kv_heads": 1},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return build_target()


def export(target: Target, drafter: Drafter, out: Path, **changes: Any) -> Path:
    ids = changes.pop("token_ids", None)
    return export_zlab(drafter, target, target.taps, ids, out, **({"dtype": "float32"} | changes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_read_back_computes_the_same(
    target: Target, tmp_path: Path, shape: dict[str, Any], dtype: str
) -> None:
    drafter = build_drafter(build_shape(target, **shape))
    out = export(target, drafter, tmp_path / "out", dtype=dtype)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    loaded, taps, token_ids = load_zlab(out)
    assert loaded.shape == drafter.shape
    assert taps == target.taps
    assert token_ids is None
    assert bool((loaded.feature_scale == 1).all())
    features = torch.randn(3, 2 * target.hidden_size)
    tolerance = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}[dtype]
    torch.testing.assert_close(
        loaded.fuse(features), drafter.fuse(features), rtol=tolerance, atol=tolerance
    )
    for name, tensor in load_file(out / "model.safetensors").items():
        assert tensor.dtype == getattr(torch, dtype)
        wanted = drafter.state_dict()[name]
        if name == "fc.weight":
            wanted = wanted * drafter.feature_scale
        assert torch.equal(tensor, wanted.to(tensor.dtype)), name


def test_names_are_those_of_the_layout(target: Target) -> None:
    drafter = build_drafter(build_shape(target, num_layers=1))
    tensors = export_tensors(drafter, target.head.weight, None, torch.bfloat16)
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    norms = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    norms += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    mlp = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer = [f"layers.0.{name}" for name in (*attention, *norms, *mlp)]
    assert sorted(tensors) == sorted([*layer, "fc.weight", "hidden_norm.weight", "norm.weight"])
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes["fc.weight"] == (32, 64)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (24, 32)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (12, 32)
    assert shapes["layers.0.self_attn.o_proj.weight"] == (32, 24)
    assert shapes["layers.0.self_attn.k_norm.weight"] == (6,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (32, 40)


def test_a_sub_vocabulary_is_exported_as_offsets(target: Target, tmp_path: Path) -> None:
    ids = torch.tensor([0, 3, 4, 17, 63])
    drafter = build_drafter(build_shape(target))
    out = export(target, drafter, tmp_path / "out", token_ids=ids)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target.head.weight[ids])
    offsets = tensors["d2t"]
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, 2, 2, 14, 59]
    config = json.loads((out / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"]) == (5, 64)
    token_ids = load_zlab(out)[2]
    assert token_ids is not None
    assert token_ids.tolist() == ids.tolist()


def test_config_fields(target: Target) -> None:
    shape = build_shape(target, num_layers=3, sliding_layers=2, sliding_window=6, block_size=5)
    config = build_config(shape, target, (0, 2), "bfloat16", None)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {
        "block_size": 5,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
    }
    wanted = {
        "dtype": "bfloat16",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
        "vocab_size": 64,
        "num_target_layers": 4,
        "block_size": 5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    assert {key: config[key] for key in wanted} == wanted
    for absent in ("is_causal", "draft_vocab_size", "partial_rotary_factor", "rope_parameters"):
        assert absent not in config
    full = build_config(build_shape(target), target, (0, 2), "bfloat16", None)
    assert (full["sliding_window"], full["use_sliding_window"]) == (None, False)


def test_what_the_target_does_to_embeddings_and_logits_is_written(target: Target) -> None:
    unusual = build_target()
    unusual.embed_scale = 5.5
    unusual.head = Head(unusual.head.weight, multiplier=0.25, softcap=30.0)
    dflash = build_config(build_shape(target), unusual, (0, 2), "float32", 9)["dflash_config"]
    assert dflash["input_embedding_scale"] == 5.5
    assert dflash["output_multiplier"] == 0.25
    assert dflash["final_logit_softcapping"] == 30.0


def test_an_existing_directory_is_only_replaced_when_asked(target: Target, tmp_path: Path) -> None:
    first, second = (build_drafter(build_shape(target), seed=s) for s in (1, 2))
    out = export(target, first, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"exists.*--overwrite"):
        export(target, second, out)
    assert torch.equal(load_zlab(out)[0].norm.weight, first.norm.weight)
    export(target, second, out, overwrite=True)
    assert torch.equal(load_zlab(out)[0].norm.weight, second.norm.weight)


def test_overwriting_never_deletes_what_is_no_export(target: Target, tmp_path: Path) -> None:
    drafter = build_drafter(build_shape(target))
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="not an exported drafter"):
        export(target, drafter, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="not an exported drafter"):
        export(target, drafter, precious, overwrite=True)
    assert precious.read_text() == "years of work"
    empty = tmp_path / "empty"
    empty.mkdir()
    export(target, drafter, empty, overwrite=True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), "safetensors"])
def test_a_failed_write_leaves_the_old_export(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    from safetensors import SafetensorError

    drafter = build_drafter(build_shape(target))
    out = export(target, drafter, tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left") if error == "safetensors" else error

    monkeypatch.setattr(zlab, "save_file", full)
    other = build_drafter(build_shape(target), seed=5)
    with pytest.raises(ConfigError, match=r"cannot be written.*No space left"):
        export(target, other, out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_parent_that_is_a_file_is_a_config_error(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        export(target, build_drafter(build_shape(target)), tmp_path / "file" / "out")


def rewrite(out: Path, change: Any) -> None:
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")


def edit(out: Path, **fields: Any) -> None:
    config = json.loads((out / "config.json").read_text()) | fields
    (out / "config.json").write_text(json.dumps(config))


def test_reading_is_strict(target: Target, tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        return export(target, build_drafter(build_shape(target)), tmp_path / name)

    missing = fresh("missing")
    rewrite(missing, lambda t: t.pop("norm.weight"))
    with pytest.raises(ParityError, match=r"norm\.weight"):
        load_zlab(missing)
    extra = fresh("extra")
    rewrite(extra, lambda t: t.update({"mask_hidden": torch.zeros(3)}))
    with pytest.raises(ParityError, match="mask_hidden"):
        load_zlab(extra)
    resized = fresh("resized")
    edit(resized, intermediate_size=44)
    with pytest.raises(ParityError, match="size mismatch"):
        load_zlab(resized)
    for number, text in enumerate(("", "{", "[]", "{}", '{"dflash_config": null}')):
        broken = fresh(f"broken{number}")
        (broken / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not a drafter"):
            load_zlab(broken)
    cut = fresh("cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="not a drafter"):
        load_zlab(cut)
    with pytest.raises(ConfigError, match="not a drafter"):
        load_zlab(tmp_path / "nowhere")


def test_layers_in_another_order_are_refused(target: Target, tmp_path: Path) -> None:
    """Our windowed layers come first; a drafter with another order would be read wrongly."""
    shape = build_shape(target, sliding_layers=1, sliding_window=6)
    out = export(target, build_drafter(shape), tmp_path / "out")
    edit(out, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="layer_types"):
        load_zlab(out)


# Parity with the package that serves these checkpoints.


@pytest.fixture(scope="module")
def dflash() -> Any:
    return pytest.importorskip(
        "dflash.model", reason="dflash 0.1.0 is not installed: pip install 'draftline[dev]'"
    )


def load_theirs(dflash: Any, out: Path) -> Any:
    model, info = dflash.DFlashDraftModel.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


class Ours:
    """Our decode path for one row, driven as the package drives its own."""

    def __init__(self, drafter: Drafter, slots: int) -> None:
        self.drafter, self.slots = drafter, slots
        self.cache = StaticKV(1, slots, torch.device("cpu"))

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(keys, values, layer)

    def __call__(self, features: Tensor, block: Tensor, start: int) -> Tensor:
        positions = torch.arange(start - features.shape[1], start)[None]
        self.cache.begin(positions, self.slots)
        self.drafter.context(features, positions, self.extend)
        positions = start + torch.arange(block.shape[1])[None]
        self.cache.begin(positions, self.slots)
        full, sliding = draft_masks(
            torch.tensor([start]),
            positions,
            torch.arange(self.slots),
            self.drafter.shape.sliding_window,
        )
        return self.drafter.draft(block, positions, self.extend, full, sliding)


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES)
def test_states_and_logits_equal_those_of_dflash(
    target: Target, tmp_path: Path, dflash: Any, shape: dict[str, Any]
) -> None:
    drafter = build_drafter(build_shape(target, **shape))
    out = export(target, drafter, tmp_path / "out")
    theirs, ours = load_theirs(dflash, out), Ours(load_zlab(out)[0], 40)
    original = Ours(drafter, 40)
    block_size = drafter.shape.block_size
    assert theirs.block_size == block_size
    assert theirs.mask_token_id == drafter.shape.mask_token_id
    assert tuple(theirs.target_layer_ids) == target.taps
    head = nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    head.weight = nn.Parameter(target.head.weight)
    cache = dflash._make_cache(theirs.config)
    random = torch.Generator().manual_seed(0)
    start = 0
    # A prompt, then rounds that committed 3 tokens, 1 token and a whole block.
    for new in (9, 3, 1, block_size):
        start += new
        features = torch.randn(1, new, 2 * target.hidden_size, generator=random)
        ids = torch.full((1, block_size), drafter.shape.mask_token_id)
        ids[0, 0] = start
        wanted = theirs(
            target_hidden=features,
            noise_embedding=target.embed(ids),
            position_ids=torch.arange(start - new, start + block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        dflash._crop_to(cache, start)
        for mine in (ours, original):
            hidden = mine(features, target.embed(ids), start)
            torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            target.head.logits(hidden), theirs.compute_logits(wanted, head), rtol=1e-4, atol=1e-3
        )


@torch.no_grad()
def test_head_transforms_are_read_by_dflash(target: Target, tmp_path: Path, dflash: Any) -> None:
    unusual = build_target()
    unusual.embed_scale = 5.5
    unusual.head = Head(unusual.head.weight, multiplier=0.25, softcap=2.0)
    theirs = load_theirs(
        dflash,
        export(unusual, build_drafter(build_shape(target)), tmp_path / "out", engine="dflash"),
    )
    head = nn.Linear(target.hidden_size, target.vocab_size, bias=False)
    head.weight = nn.Parameter(unusual.head.weight)
    hidden = 4 * torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(unusual.head.logits(hidden), theirs.compute_logits(hidden, head))
    assert dflash._draft_value(theirs.config, "input_embedding_scale", 1.0) == 5.5


@pytest.mark.parametrize("shape", [{"block_size": 6}, SHAPES[1]])
def test_rounds_of_dflash_are_our_rounds(
    target: Target,
    tmp_path: Path,
    dflash: Any,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
) -> None:
    """The whole loop of the package with the exported drafter commits what ours commits."""
    endless = build_target(stop=())
    prompts = [s.input_ids.tolist() for s in build_samples((5, 17, 9), seed=1)]
    plain = DecodeSession(endless, None, rows=3, slots=80).decode(prompts, 40).tokens
    drafter = teach(endless, build_drafter(build_shape(endless, **shape)), prompts)
    block = drafter.shape.block_size
    theirs = load_theirs(dflash, export(endless, drafter, tmp_path / "out"))
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)
    model = build_model()
    decoder = DecodeSession(endless, DraftModel(drafter), rows=1, slots=80)
    lengths: list[int] = []
    for prompt, tokens in zip(prompts, plain, strict=True):
        result = dflash.dflash_generate(
            theirs, model, torch.tensor([prompt]), 40, None, return_stats=True
        )
        assert result.output_ids[0, len(prompt) :].tolist() == tokens
        mine = decoder.decode([prompt], 40)
        assert mine.tokens == [tokens]
        counts = [result.acceptance_lengths.count(n) for n in range(block + 1)]
        assert mine.committed_counts == counts
        lengths += result.acceptance_lengths
    assert sum(lengths) / len(lengths) > 1.3
    assert len(set(lengths)) > 2


def test_weights_that_do_not_fit_are_not_exported(target: Target, tmp_path: Path) -> None:
    drafter = build_drafter(build_shape(target))
    drafter.feature_scale[3] = 1e6
    with pytest.raises(ParityError, match=r"fc\.weight is not finite in float16"):
        export(target, drafter, tmp_path / "out", dtype="float16")
    export(target, drafter, tmp_path / "out", dtype="bfloat16")
    with torch.no_grad():
        drafter.norm.weight[0] = torch.nan
    with pytest.raises(ParityError, match=r"norm\.weight is not finite"):
        export(target, drafter, tmp_path / "other")
    assert not (tmp_path / "other").exists()
