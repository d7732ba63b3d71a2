"""What a target's layers do about positions is draftline's too, or the target is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from draftline.choices import Choices
from draftline.config.load import build_config as build_run
from draftline.decode.session import DecodeSession
from draftline.errors import FallbackError, TargetError
from draftline.model.drafter.init import build_shape
from draftline.model.target import fidelity
from draftline.model.target.facts import read_facts
from draftline.model.target.fidelity import check_fidelity
from draftline.model.target.target import Target, load_target
from draftline.model.target.twin import build_twin, representative_layers
from tests.support.architectures import build_config, build_model
from tests.support.fakes import random_ids, tiny_tokenizer

CPU = torch.device("cpu")
TAPS = (0, 2, 3)
DECODABLE = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3",
    "gemma4_12b",
    "gemma4_e2b",
    "mistral",
    "ministral",
    "starcoder2",
    "phi3_longrope",
    "dynamic_ntk",
    "cohere2",
    "olmo2",
    "olmo3",
    "exaone4",
    "smollm3",
    "glm4",
    "granite",
    "deepseek_v3",
]
TRAINED_FOR_ONLY = ["jamba", "falcon_h1"]
REFUSED = {
    "gemma2": r"Gemma2Model soft-caps attention scores",
    "gpt_oss": r"GptOssAttention uses attention sinks",
    "mimo_v2_flash": r"MiMoV2FlashAttention uses attention sinks",
    "doge": r"DogeAttention makes an attention mask of its own",
    "deepseek_v32": r"DeepseekV32Model has rules of its own about positions \(index_topk=4\)",
    "glm_moe_dsa": r"GlmMoeDsaModel has rules of its own about positions \(index_topk=4\)",
    "minimax_m3": r"MiniMaxM3VLTextModel: .*beyond .*index_topk_blocks=2",
    "gemma3n": r"Gemma3nTextModel: a layer hands on \[4, 1, 3, 128\]",
    "xglm": r"XGLMModel: .*not the plain causal one",
}


@torch.no_grad()
def own_states(model: Any, ids: Tensor, taps: tuple[int, ...] = TAPS) -> tuple[Tensor, Tensor]:
    states = model.get_decoder()(
        input_ids=ids, output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[tap + 1] for tap in taps], -1), states[-1]


def on_meta(name: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(build_config(name, **changes)).get_decoder()


def save(name: str, path: Path, **changes: Any) -> Path:
    build_model(name, **changes).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


# What is taken is computed as the model computes it


@pytest.mark.parametrize("name", [*DECODABLE, *TRAINED_FOR_ONLY])
def test_features_are_the_models_own_alone_padded_and_beside_longer_texts(name: str) -> None:
    model = build_model(name)
    # Beyond the windows of 6 tokens, inside the 32 after which long ropes would switch.
    texts = [random_ids(1, n, seed=n) for n in (4, 13, 29)]
    wanted = [own_states(model, text) for text in texts]
    context = 32 if name in ("phi3_longrope", "dynamic_ntk") else None
    target = Target(model, tiny_tokenizer(), taps=TAPS, context=context)
    together = torch.zeros(3, 40, dtype=torch.long)
    for row, text in enumerate(texts):
        together[row, : text.shape[1]] = text
    for last_hidden in (False, True):
        features, last = target.features(together, last_hidden=last_hidden)
        for row, (taps, hidden) in enumerate(wanted):
            tokens = taps.shape[1]
            torch.testing.assert_close(features[row : row + 1, :tokens], taps, rtol=1e-4, atol=1e-4)
            if last is not None:
                seen = last[row : row + 1, :tokens]
                torch.testing.assert_close(seen, hidden, rtol=1e-4, atol=1e-4)
    assert target.fidelity.untried is None
    if name in TRAINED_FOR_ONLY:
        with pytest.raises(TargetError, match="not evaluated"):
            target.check_decodable(8)
    else:
        target.check_decodable(30)


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4_e2b", "gemma4_12b", "mistral", "qwen2", "olmo3"]
)
def test_decoding_far_beyond_a_window_says_what_the_whole_forward_says(name: str) -> None:
    model = build_model(name)
    prompts = [random_ids(1, n, seed=n) for n in (5, 12)]
    wanted = []
    for prompt in prompts:
        text = prompt
        for _ in range(14):
            logits = model(input_ids=text, use_cache=False).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
        wanted.append(text[0, prompt.shape[1] :].tolist())
    target = Target(model, tiny_tokenizer(), taps=TAPS)
    target.stop_ids = ()
    with DecodeSession(target, None, rows=2, slots=40) as decoder:
        assert decoder.decode([p[0].tolist() for p in prompts], 14).tokens == wanted


@pytest.mark.parametrize("taps", [(0, 1), (1, 2), (4, 5), (0, 6)])
def test_leaving_behind_any_tap_is_exact_where_layers_share_keys(taps: tuple[int, ...]) -> None:
    """Layers 4 to 7 use the keys of layers 2 and 3, and each has an input of its own."""
    model = build_model("gemma4_e2b")
    wanted, _ = own_states(model, random_ids(1, 20), taps)
    features, _ = Target(model, tiny_tokenizer(), taps=taps).features(random_ids(1, 20))
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)


# What is not taken is refused before a weight is read


@pytest.mark.parametrize("name", list(REFUSED))
def test_rules_that_draftline_does_not_know_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=REFUSED[name]):
        check_fidelity(on_meta(name))
    build_config(name).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=REFUSED[name]):
        read_facts(str(tmp_path), taps=TAPS)


def test_a_refused_target_is_refused_with_its_weights_too(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=REFUSED["doge"]):
        load_target(str(save("doge", tmp_path)), device=CPU, taps=TAPS)


class Biased(LlamaModel):  # type: ignore[misc]
    """Keys lose weight with their distance, as with ALiBi, by means of a mask."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **options: Any) -> Any:
        count = input_ids.shape[1]
        place = torch.arange(count)
        distance = (place[:, None] - place).float()
        bias = (-distance).masked_fill(distance < 0, -torch.inf)[None, None]
        return super().forward(input_ids=input_ids, attention_mask=bias, **options)


class Neighbourly(LlamaModel):  # type: ignore[misc]
    """Every token is moved by all that is in the batch."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        embedded = self.embed_tokens(input_ids)
        length = 0.5 * (input_ids.shape[0] - 1)
        return super().forward(inputs_embeds=embedded + length, **options)


class Chunked(LlamaModel):  # type: ignore[misc]
    """Sees only tokens of its own chunk of `attention_chunk_size`, as Llama 4 does."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **options: Any) -> Any:
        from transformers.masking_utils import create_chunked_causal_mask

        place = torch.arange(input_ids.shape[1])[None]
        mask = create_chunked_causal_mask(
            config=self.config,
            inputs_embeds=self.embed_tokens(input_ids),
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=place,
        )
        return super().forward(input_ids=input_ids, attention_mask=mask, **options)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (Biased, r"Biased: .*makes an attention mask|LlamaAttention makes an attention mask"),
        (Neighbourly, r"Neighbourly: the features of a text change by .* with its padding"),
        (Chunked, r"Chunked: .*beyond the limits .*attention_chunk_size=512"),
    ],
)
def test_a_rule_that_nobody_named_is_found(decoder: type[nn.Module], reason: str) -> None:
    config = build_config("llama")
    config.attention_chunk_size = 512
    with torch.device("meta"):
        model = decoder(config)
    with pytest.raises(TargetError, match=reason):
        check_fidelity(model)


# The twin


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        ("llama", [0, 1, 2]),
        ("gemma3_text", [0, 1, 2, 3, 4, 5]),
        ("qwen3_next", [0, 1, 2, 3]),
        ("jamba", [0, 1, 2, 3, 4]),
    ],
)
def test_a_twin_has_a_layer_of_every_kind_and_few_of_them(model_type: str, kept: list[int]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]()).get_decoder()
    assert representative_layers(model.layers) == kept
    twin = build_twin(model, small_heads=True).decoder
    assert len(twin.layers) == len(kept)
    assert sum(p.numel() for p in twin.parameters()) < 3_000_000


def test_late_kinds_of_layers_come_into_the_twin_with_their_lists() -> None:
    kinds = ["full_attention"] * 28 + ["sliding_attention"] * 4
    model = on_meta("qwen2", num_hidden_layers=32, layer_types=kinds, sliding_window=4096)
    twin = build_twin(model, small_heads=True)
    assert twin.decoder.config.layer_types == ["full_attention", "sliding_attention"]
    assert twin.decoder.config.sliding_window == 8
    assert twin.limits == {"sliding_window": 4096}
    assert check_fidelity(model).undecodable is None


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6, 40])
def test_any_number_of_layers_has_a_twin(layers: int) -> None:
    """Four is as long as `silu`, five as `llama`."""
    found = check_fidelity(on_meta("llama", num_hidden_layers=layers, hidden_act="silu"))
    assert (found.untried, found.undecodable) == (None, None)


def test_shared_keys_stay_shared_in_the_twin() -> None:
    model = on_meta("gemma4_e2b", num_hidden_layers=30, num_kv_shared_layers=14, layer_types=None)
    twin = build_twin(model, small_heads=True).decoder
    shared = [layer.self_attn.is_kv_shared_layer for layer in twin.layers]
    assert shared == sorted(shared)
    assert 0 < sum(shared) == twin.config.num_kv_shared_layers < len(shared) < 10
    assert check_fidelity(model).untried is None


def test_the_answer_for_a_configuration_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fidelity(on_meta("llama"))
    monkeypatch.setattr(fidelity, "build_twin", lambda *_, **__: pytest.fail("built again"))
    assert check_fidelity(on_meta("llama")).undecodable is None
    with pytest.raises(pytest.fail.Exception):
        check_fidelity(on_meta("llama", num_attention_heads=2))


@pytest.fixture
def without_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("widths must be multiples of 4096")

    monkeypatch.setattr(fidelity, "build_twin", refuse)
    monkeypatch.setattr(fidelity, "_known", {})


@pytest.mark.usefixtures("without_twins")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_twin_the_real_weights_are_tried_and_that_is_recorded(
    dtype: str, tmp_path: Path
) -> None:
    path = str(save("gemma4_e2b", tmp_path))
    choices = Choices()
    target = load_target(path, device=CPU, dtype=dtype, taps=TAPS, choices=choices)
    (choice,) = [c for c in choices.entries if c.what == "target.check"]
    assert "widths must be multiples of 4096" in choice.reason
    assert choice.got == "compared on short texts with the real weights"
    assert target.fidelity.undecodable is None
    with pytest.raises(FallbackError, match=r"target\.check"):
        load_target(path, device=CPU, taps=TAPS, choices=Choices(strict=True))


@pytest.mark.usefixtures("without_twins")
@pytest.mark.parametrize("name", ["doge", "minimax_m3"])
def test_without_a_twin_wrong_features_are_refused_with_the_real_weights(name: str) -> None:
    with pytest.raises(TargetError, match=r"makes an attention mask|features differ"):
        Target(build_model(name), tiny_tokenizer(), taps=(0, 2))


# Layers whose heads differ


@pytest.mark.parametrize(
    ("name", "changes", "heads"),
    [
        ("gemma4_12b", {}, (4, 1, 16)),
        ("gemma4_e2b", {}, (4, 2, 16)),
        ("gemma4_e2b", {"global_head_dim": 512}, (4, 2, 128)),
        ("llama", {"head_dim": 8}, (4, 2, 8)),
    ],
)
def test_a_drafter_takes_the_heads_of_full_attention(
    name: str, changes: dict[str, Any], heads: tuple[int, int, int], tmp_path: Path
) -> None:
    build_config(name, **changes).save_pretrained(tmp_path)
    facts = read_facts(str(tmp_path), taps=TAPS)
    tree = {"target": {"path": "x"}, "data": {"train": ["x"]}, "train": {"steps": 1}}
    choices = Choices()
    shape = build_shape(build_run(tree), facts, 3, choices)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == heads
    recorded = [c.got for c in choices.entries]
    assert recorded == ([] if name == "llama" else recorded[:1])
    assert name == "llama" or f"drafter.head_dim={heads[2]}" in recorded[0]
    told = build_run(tree | {"drafter": {"head_dim": 8, "num_kv_heads": 2}})
    choices = Choices()
    assert build_shape(told, facts, 3, choices).head_dim == 8
    assert choices.entries == []


def test_numbers_that_are_lists_are_refused_with_the_key_to_set() -> None:
    class Listed:
        num_attention_heads = 4
        num_key_value_heads = (2, 2, 4)
        head_dim = 8
        intermediate_size = 16

    class Shape:
        text_config = Listed()
        taps = (0, 1)
        hidden_size = 32

    tree = {"target": {"path": "x"}, "data": {"train": ["x"]}, "train": {"steps": 1}}
    with pytest.raises(
        TargetError, match=r"num_key_value_heads differs .* set drafter.num_kv_heads"
    ):
        build_shape(build_run(tree), Shape(), 3)
    told = build_run(tree | {"drafter": {"num_kv_heads": 2}})
    assert build_shape(told, Shape(), 3).num_kv_heads == 2
    assert json.dumps(build_shape(told, Shape(), 3).num_heads) == "4"
