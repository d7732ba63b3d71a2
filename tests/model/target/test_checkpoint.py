"""A checkpoint, its config.json and its directory fit one another, or are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.target.checkpoint_files import read_stored
from draftline.model.target.facts import read_facts
from draftline.model.target.target import load_target
from tests.support.fakes import FAMILIES, VOCAB_SIZE, tiny_model, tiny_target_dir, tiny_tokenizer
from tests.support.loading import TAPS, load, refusal
from tests.support.quantise import edit_config, edit_tensors

CPU = torch.device("cpu")
WRAPPERS = ("gemma3_with_vision", "qwen3_vl", "qwen2_5_vl", "mistral3", "llava")
Edit = Callable[[Path], object]


# Wrappers of language models


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_wrapper_holds_its_language_model_only(
    family: str, target_dir: Callable[..., Path]
) -> None:
    choices = Choices()
    target = load(target_dir(family), choices=choices)
    whole = sum(p.numel() for p in tiny_model(family).parameters())
    held = sum(p.numel() for p in target.parameters())
    layers = sum(p.numel() for layer in target.layers for p in layer.parameters())
    ends = {id(t): t.numel() for t in (target.embedding, target.head.weight)}
    assert held == layers + sum(ends.values()) + target.hidden_size < whole
    parts = [c.got for c in choices.entries if c.what == "target.parts"]
    assert len(parts) == 1
    assert parts[0].startswith("the language model, without model.vis")


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_wrapper_without_its_encoder_is_enough_for_text(family: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "target", family)
    ids = torch.randint(4, VOCAB_SIZE, (1, 9))
    wanted = load(path).features(ids)[0]
    edit_tensors(path, lambda t: {k: v for k, v in t.items() if "vis" not in k})
    assert load(path).features(ids)[0].equal(wanted)


def test_a_lone_language_model_under_a_wrappers_names_is_read(tmp_path: Path) -> None:
    """Earlier versions saved the same model under other prefixes."""
    path = tiny_target_dir(tmp_path, "qwen2_5_vl")
    ids = torch.randint(4, VOCAB_SIZE, (1, 9))
    wanted = load(path).features(ids)[0]
    names = {"model.language_model.": "model.", "model.visual.": "visual."}

    def older(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            for new, old in names.items():
                name = old + name.removeprefix(new) if name.startswith(new) else name
            found[name] = tensor
        return found

    edit_tensors(path, older)
    assert load(path).features(ids)[0].equal(wanted)
    assert read_facts(str(path), taps=TAPS).embedding[5] is not None


def test_a_shard_of_a_wrapper_spans_devices_without_its_encoder(
    target_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate.hooks

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", lambda *_, **__: None)
    two = [torch.device("cpu", 0), torch.device("cpu", 1)]
    target = load_target(str(target_dir("mistral3")), device=two, taps=TAPS)
    assert target.devices == tuple(two)
    assert sum(p.numel() for p in target.parameters()) == sum(
        p.numel() for p in load(target_dir("mistral3")).parameters()
    )


# What is no decoder-only language model


def saved(make: Callable[[], Any]) -> Edit:
    def edit(path: Path) -> None:
        shutil.rmtree(path)
        make().save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)

    return edit


def small(name: str, **settings: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    return getattr(transformers, name)(**sizes | settings)


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=6)
    return transformers.MambaForCausalLM(config)


def reward() -> Any:
    config = small("LlamaConfig", tie_word_embeddings=True, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (saved(t5), "an encoder-decoder model"),
        (saved(lambda: transformers.BertModel(small("BertConfig"))), "BertModel: it has no head"),
        (saved(lambda: transformers.BertForMaskedLM(small("BertConfig"))), "BertForMaskedLM"),
        (saved(lambda: transformers.LlamaModel(small("LlamaConfig"))), "LlamaModel: it has no"),
        (saved(mamba), "a mamba model has no attention heads"),
        (saved(reward), "LlamaForSequenceClassification: it has no head"),
        (lambda p: edit_config(p, architectures=["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
        (lambda p: edit_config(p, architectures=["DFlashDraftModel"]), "is a drafter"),
        (lambda p: edit_config(p, is_causal=False), "in both directions"),
        (lambda p: edit_config(p, use_bidirectional_attention=True), "in both directions"),
        (lambda p: (p / "modules.json").write_text("[]"), "sentence-transformers"),
        (lambda p: edit_config(p, model_type="vit"), "vit"),
        (lambda p: edit_config(p, model_type="flurb"), "has no model type 'flurb'"),
        (
            lambda p: edit_config(
                p, model_type="flurb", auto_map={"AutoConfig": "configuration_flurb.FlurbConfig"}
            ),
            "target.trust_remote_code=true",
        ),
        (lambda p: (p / "config.json").write_text("{}"), "has no model_type"),
        (lambda p: (p / "config.json").write_text("[]"), "no mapping of settings"),
        (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read"),
    ],
)
def test_another_kind_of_model_is_refused(edit: Edit, reason: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "target")
    edit(path)
    assert reason in refusal(path)


# Directories


def shard(path: Path) -> list[Path]:
    tiny_model().save_pretrained(path, max_shard_size="60KB")
    (path / "model.safetensors").unlink()
    return sorted(path.glob("model-*.safetensors"))


def pickled(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def adapter(path: Path) -> None:
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def without_config(name: str) -> Edit:
    def edit(path: Path) -> None:
        (path / "config.json").unlink()
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            lambda p: shard(p)[1].unlink(),
            "1 of the 4 files that model.safetensors.index.json names",
        ),
        (
            lambda p: (shard(p), (p / "model.safetensors.index.json").write_text("{")),
            "index.json cannot be read",
        ),
        (
            lambda p: (shard(p), (p / "model.safetensors.index.json").write_text("[1]")),
            "index.json cannot be read",
        ),
        (lambda p: shard(p)[2].write_bytes(b""), "no safetensors header"),
        (pickled, r"pickled (pytorch_model.bin)"),
        (
            lambda p: (p / "model.safetensors").rename(p / "consolidated.safetensors"),
            "only consolidated.safetensors",
        ),
        (
            lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/x"),
            "Git LFS pointer",
        ),
        (adapter, "is a LoRA adapter for org/base"),
        (lambda p: (adapter(p), (p / "config.json").unlink()), "is a LoRA adapter for org/base"),
        (without_config("model.gguf"), "give one of them as target.path, e.g. model.gguf"),
        (without_config("model_index.json"), "diffusion pipeline"),
        (without_config("params.json"), "transformers version"),
        (without_config("inner/config.json"), "did you mean its folder inner?"),
    ],
)
def test_another_kind_of_directory_is_refused(edit: Edit, reason: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "target")
    edit(path)
    assert reason in refusal(path)


@pytest.mark.parametrize("size", [0, 4, 1000, -100])
def test_a_cut_file_is_refused(size: int, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model file model.safetensors" in refusal(path)
    assert "fetch it again" in refusal(path)


def test_bytes_behind_the_weights_are_damage(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"0" * 9)
    assert "is damaged" in refusal(path)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path / "target")
    one = read_stored("x", str(path))
    shard(path)
    several = read_stored("x", str(path))
    assert one is not None
    assert several is not None
    assert {n: (t.dtype, t.shape) for n, t in one.items()} == {
        n: (t.dtype, t.shape) for n, t in several.items()
    }
    assert len({t.file for t in several.values()}) == 4
    load(path)


def test_a_collection_of_gguf_files_on_the_hub_is_refused() -> None:
    assert "collection of GGUF files" in refusal(Path("someone/Some-Model-GGUF"))


def test_a_directory_without_tokenizer_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    assert read_facts(str(path), taps=TAPS).tokenizer is None
    with pytest.raises(TargetError, match=f"{path} has no tokenizer"):
        load(path)


# Tensors and shapes


def add(*names: str) -> Edit:
    return lambda path: edit_tensors(path, lambda t: t | {n: torch.ones(8) for n in names})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.post_feedforward_layernorm.weight",
        "model.layers.6.input_layernorm.weight",
        "model.embed_layernorm.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_of_the_language_model_that_stays_unread_is_refused(
    name: str, tmp_path: Path
) -> None:
    path = tiny_target_dir(tmp_path)
    add(name)(path)
    assert f"first {name}: Llama" in refusal(path)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.input_layernorm.weight",
        "model.mtp_layers.0.mlp.up_proj.weight",
        "model.visual.blocks.0.norm1.weight",
        "vision_tower.encoder.layers.0.norm.weight",
        "audio_tower.layers.0.self_attn.q_proj.bias",
        "multi_modal_projector.linear.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "v_head.summary.weight",
    ],
)
def test_what_text_does_not_pass_may_stay_unread_and_is_said(name: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    add(name)(path)
    read_facts(str(path), taps=TAPS)
    choices = Choices()
    load(path, choices=choices)
    said = [c.got for c in choices.entries if c.what == "target.unread"]
    assert said == [f"all but 1, first {name}"] or "inv_freq" in name


def test_layers_that_predict_further_tokens_may_stay_unread(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path)
    add("model.layers.6.eh_proj.weight")(path)
    assert "would stay unread" in refusal(path)
    edit_config(path, num_nextn_predict_layers=1)
    load(path)
    add("model.layers.7.eh_proj.weight")(path)
    assert "model.layers.7.eh_proj.weight" in refusal(path)


def test_the_head_of_a_tied_target_may_be_saved_twice(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path, "tied_llama")
    edit_tensors(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    target = load(path)
    assert torch.equal(target.head.weight, target.embedding)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 5}, "9 tensors of the checkpoint would stay unread"),
        ({"num_hidden_layers": 7}, "9 weights are not in the checkpoint"),
        ({"intermediate_size": 40}, r"[32, 48] in the checkpoint, [32, 40] by config.json"),
        ({"vocab_size": VOCAB_SIZE + 5}, f"[{VOCAB_SIZE}, 32] in the checkpoint"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": "six"}, "num_hidden_layers"),
    ],
)
def test_a_config_that_is_another_models_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tiny_target_dir(tmp_path)
    edit_config(path, **changes)
    assert reason in refusal(path)


def test_a_tokenizer_that_is_another_models_is_refused(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path, vocab_size=VOCAB_SIZE - 1)
    assert f"{VOCAB_SIZE - 1} embedding rows" in refusal(path)


def test_an_added_token_behind_the_embedding_refuses_no_target(tmp_path: Path) -> None:
    """Gemma 3's text models have one; rows of the data that hold it are left out."""
    path = tiny_target_dir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    tokenizer.save_pretrained(path)
    facts = read_facts(str(path), taps=TAPS)
    assert len(facts.tokenizer) == facts.embedding_rows + 1
    load(path)


def test_whatever_transformers_raises_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_target_dir(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("One thing went wrong. And this is why, at length.")

    monkeypatch.setattr(FAMILIES["llama"]().__class__, "from_pretrained", fail)
    said = refusal(path)
    assert said.endswith("cannot be loaded: One thing went wrong")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FAMILIES["llama"]().__class__, "from_pretrained", stop)
    with pytest.raises(KeyboardInterrupt):
        load(path)


def test_reading_the_shapes_reads_no_weights(tmp_path: Path) -> None:
    """The header alone is read: what follows it here is one hole of two GiB."""
    path = tiny_target_dir(tmp_path)
    file = path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    end = 0
    for entry in (entry for name, entry in header.items() if name != "__metadata__"):
        entry["shape"] = [2**20 if n == 48 else n for n in entry["shape"]]
        begin, end = end, end + 4 * prod(entry["shape"])
        entry["data_offsets"] = [begin, end]
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)
    edit_config(path, intermediate_size=2**20)
    assert read_facts(str(path), taps=TAPS).total_bytes == end > 2**31
