"""Targets: taps, padding, caches and logits against transformers' own forward of the same weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftline.choices import Choices
from draftline.errors import TargetError
from draftline.model.kv_cache import StaticKV
from draftline.model.target.facts import read_facts
from draftline.model.target.target import Target, load_target
from tests.support.fakes import (
    END_OF_TURN,
    VOCAB_SIZE,
    random_ids,
    tiny_model,
    tiny_target_dir,
    tiny_tokenizer,
)
from tests.support.quantise import edit_config

CPU = torch.device("cpu")
Build = Callable[[str], Path]
TAPS = (0, 2, 3)
SUPPORTED = [
    "llama",
    "tied_llama",
    "qwen3",
    "mistral",
    "gemma3",
    "gemma3_with_vision",
    "qwen3_5",
    "qwen3_vl",
    "qwen2_5_vl",
    "mistral3",
    "llava",
    "granite",
    "cohere",
    "deepseek_v3",
]
# Windows of 6 tokens and, where they are named here, wider than the text.
DECODABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "gemma3": {},
    "gemma3_with_vision": {"sliding_window": 64},
    "qwen3_vl": {},
    "qwen2_5_vl": {},
    "mistral3": {"sliding_window": None},
    "llava": {},
    "granite": {},
    "cohere": {},
    "deepseek_v3": {},
}


def load(path: Path, **options: Any) -> Target:
    taps = {} if "num_taps" in options else {"taps": TAPS}
    return load_target(str(path), **{"device": CPU} | taps | options)


def assert_close(seen: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def plain_forward(model: Any, ids: Tensor, taps: tuple[int, ...] = TAPS) -> tuple[Tensor, ...]:
    """Taps, final-norm states and logits as transformers computes them, with its own attention."""
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    return torch.cat([states[tap + 1] for tap in taps], dim=-1), states[-1], output.logits


@pytest.fixture(scope="module")
def loaded(target_dir: Build) -> Callable[[str], Target]:
    targets: dict[str, Target] = {}

    def get(family: str) -> Target:
        if family not in targets:
            targets[family] = load(target_dir(family))
        return targets[family]

    return get


# What a target computes


@pytest.mark.parametrize("family", SUPPORTED)
def test_features_last_hidden_and_logits_are_those_of_transformers(
    family: str, loaded: Callable[[str], Target]
) -> None:
    target = loaded(family)
    ids = random_ids(2, 20)
    taps, last, logits = plain_forward(tiny_model(family), ids)
    # Neighbouring entries are far apart here, so an off-by-one cannot pass.
    shifted, _, _ = plain_forward(tiny_model(family), ids, tuple(t - 1 for t in TAPS))
    assert (taps - shifted).abs().max() > 0.1

    features, nothing = target.features(ids)
    assert features.shape == (2, 20, len(TAPS) * target.hidden_size)
    assert nothing is None
    assert_close(features, taps)

    again, hidden = target.features(ids, last_hidden=True)
    assert_close(again, taps)
    assert hidden is not None
    assert_close(hidden, last)
    assert_close(target.head.logits(hidden), logits)
    assert target.head.logits(hidden).dtype == torch.float32


@pytest.mark.parametrize("family", SUPPORTED)
def test_padding_on_the_right_changes_no_real_token(
    family: str, loaded: Callable[[str], Target]
) -> None:
    target = loaded(family)
    lengths = (13, 20, 7)
    ids = random_ids(3, 20)
    padded = ids.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 0
    features, hidden = target.features(padded, last_hidden=True)
    assert hidden is not None
    for row, length in enumerate(lengths):
        alone, alone_hidden = target.features(ids[row : row + 1, :length], last_hidden=True)
        assert alone_hidden is not None
        assert_close(features[row, :length], alone[0])
        assert_close(hidden[row, :length], alone_hidden[0])


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_embedding_is_what_the_first_layer_receives(
    family: str, loaded: Callable[[str], Target]
) -> None:
    target = loaded(family)
    ids = random_ids(1, 9)
    received: list[Tensor] = []
    handle = target.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: received.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    target.features(ids)
    handle.remove()
    assert_close(target.embed(ids), received[0])


def test_scales_and_caps_are_measured(loaded: Callable[[str], Target]) -> None:
    seen = {
        family: (target.embed_scale, target.head.multiplier, target.head.softcap)
        for family in ("llama", "gemma3", "gemma3_with_vision", "granite", "cohere")
        for target in [loaded(family)]
    }
    assert seen["llama"] == (1.0, 1.0, None)
    assert seen["gemma3"] == (pytest.approx(32**0.5), 1.0, 2.0)
    # Its configuration has the cap, but transformers' multimodal class does not apply it.
    assert seen["gemma3_with_vision"] == (pytest.approx(32**0.5), 1.0, None)
    assert seen["granite"] == (12.0, pytest.approx(1 / 8), None)
    assert seen["cohere"] == (1.0, pytest.approx(1 / 16), None)


@pytest.mark.parametrize("cap", [2.0, 20.0])
@pytest.mark.parametrize("family", ["gemma3", "gemma3_with_vision"])
def test_a_cap_is_taken_where_it_is_applied(family: str, cap: float) -> None:
    """A cap far above the logits bends them by less than the measurement's tolerance."""
    target = Target(tiny_model(family, final_logit_softcapping=cap), tiny_tokenizer(), taps=TAPS)
    assert target.head.softcap == (cap if family == "gemma3" else None)
    assert target.head.multiplier == 1.0


def test_a_multimodal_config_is_read_through_its_text_config(
    loaded: Callable[[str], Target],
) -> None:
    target = loaded("qwen3_5")
    assert target.num_layers == 8
    assert target.hidden_size == 32
    assert target.vocab_size == VOCAB_SIZE
    assert target.text_config.layer_types[:4] == ["linear_attention"] * 3 + ["full_attention"]
    # Nothing of the vision tower is held.
    assert sum(p.numel() for p in target.parameters()) < 150_000
    assert loaded("gemma3_with_vision").num_layers == 6


# What a target does not compute


def count_calls(target: Target) -> tuple[list[int], list[str], list[Any]]:
    layers: list[int] = []
    others: list[str] = []
    handles = [
        layer.register_forward_hook(lambda *_, index=index: layers.append(index))
        for index, layer in enumerate(target.layers)
    ]
    head = target._model.get_output_embeddings()
    for name, module in (("norm", target.final_norm), ("head", head)):
        assert module is not None
        handles.append(module.register_forward_hook(lambda *_, name=name: others.append(name)))
    return layers, others, handles


@pytest.mark.parametrize("family", ["llama", "gemma3_with_vision", "qwen3_5"])
def test_the_forward_stops_behind_the_last_tap(
    family: str, loaded: Callable[[str], Target]
) -> None:
    target = loaded(family)
    layers, others, handles = count_calls(target)
    target.features(random_ids(1, 5))
    assert layers == [0, 1, 2, 3]
    assert others == []
    layers.clear()
    target.features(random_ids(1, 5), last_hidden=True)
    assert layers == list(range(target.num_layers))
    assert others == ["norm"]
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("last_hidden", [False, True])
def test_states_that_are_not_tapped_are_not_kept(target_dir: Build, last_hidden: bool) -> None:
    target = load(target_dir("llama"), taps=(2, 3))
    alive: list[Any] = []
    seen: list[bool] = []

    def remember(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        alive.append(weakref.ref(output))

    def look(*_: object) -> None:
        seen.append(alive[0]() is not None)

    target.layers[0].register_forward_hook(remember)
    target.layers[2].register_forward_hook(remember)
    target.layers[3].register_forward_hook(look)
    features, _ = target.features(random_ids(2, 6), last_hidden=last_hidden)
    assert seen == [False], "the output of layer 0 outlived the layers that read it"
    assert alive[1]() is None, "a tap outlived the features that were made of it"
    assert features.grad_fn is None


def test_nothing_of_a_target_can_be_trained(loaded: Callable[[str], Target]) -> None:
    target = loaded("llama")
    assert not any(p.requires_grad for p in target.parameters())
    assert len({id(p) for p in target.parameters()}) == len(target.parameters())
    assert not target.embed(random_ids(1, 2)).requires_grad


# Replicas, ends, and targets that span devices


def tensors(target: Target) -> list[Tensor]:
    return [*target._model.parameters(), *target._model.buffers()]


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_replica_shares_weights_and_nothing_else(family: str, target_dir: Build) -> None:
    target = load(target_dir(family))
    target.stop_ids = (9,)
    twin = target.replica(CPU)
    mine = {t.data_ptr() for t in tensors(target)}
    assert mine == {t.data_ptr() for t in tensors(twin)}
    modules = set(map(id, target._model.modules()))
    assert not modules & set(map(id, twin._model.modules()))
    assert twin.head.weight is target.head.weight
    # Either alone is right although the other one ran in between, and neither keeps anything.
    ids, others = random_ids(2, 20), random_ids(1, 7, seed=2)
    for last_hidden in (False, True):
        wanted = target.features(ids, last_hidden=last_hidden)
        twin.features(others)
        seen = twin.features(ids, last_hidden=last_hidden)
        for a, b in zip(wanted, seen, strict=True):
            assert a is b is None or torch.equal(a, b)  # type: ignore[arg-type]
        assert target._tapped.tapped == twin._tapped.tapped == {}
    assert (twin.taps, twin.stop_ids, twin.tokenizer) == (target.taps, (9,), target.tokenizer)
    assert (twin.embed_scale, twin.head.softcap) == (target.embed_scale, target.head.softcap)
    again = twin.replica(CPU)
    assert_close(again.features(ids)[0], target.features(ids)[0])


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_replica_elsewhere_holds_every_tensor_once(family: str, target_dir: Build) -> None:
    target = load(target_dir(family))
    twin = target.replica(torch.device("meta"))
    assert twin.device.type == twin.head.weight.device.type == "meta"
    assert {t.device.type for t in tensors(twin)} == {"meta"}
    left = [
        name
        for module in twin._model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.device.type != "meta"
    ]
    assert left == []
    assert len(tensors(twin)) == len(tensors(target))
    tied = target.head.weight is target.embedding
    assert (twin.head.weight is twin.embedding) == tied
    assert {t.device.type for t in tensors(target)} == {"cpu"}
    if family != "deepseek_v3":  # torch has no grouped float32 product for shapes alone
        assert twin.features(random_ids(1, 3).to("meta"))[0].shape == (1, 3, 3 * 32)


@pytest.mark.parametrize("family", ["llama", "gemma3_with_vision", "qwen3_5", "deepseek_v3"])
def test_replicas_run_in_two_threads_at_once(family: str, target_dir: Build) -> None:
    target = load(target_dir(family))
    twins = (target, target.replica(CPU))
    inputs = [[random_ids(2, 16, seed=10 * w + i) for i in range(6)] for w in range(2)]
    wanted = [[target.features(ids, last_hidden=True) for ids in own] for own in inputs]
    together = threading.Barrier(2, timeout=60)

    def work(worker: int) -> list[tuple[Tensor, Tensor | None]]:
        seen = []
        for ids in inputs[worker]:
            together.wait()
            seen.append(twins[worker].features(ids, last_hidden=True))
        return seen

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    for mine, theirs in zip(wanted, found, strict=True):
        for (taps, last), (seen, seen_last) in zip(mine, theirs, strict=True):
            assert_close(seen, taps)
            assert last is not None
            assert seen_last is not None
            assert_close(seen_last, last)


def test_ends_are_the_targets_own_memory(loaded: Callable[[str], Target]) -> None:
    for family in ("llama", "gemma3"):
        target = loaded(family)
        ends = target.ends(CPU)
        assert ends.embedding.data_ptr() == target.embedding.data_ptr()
        assert ends.head.weight.data_ptr() == target.head.weight.data_ptr()
        assert torch.equal(ends.embed(random_ids(1, 5)), target.embed(random_ids(1, 5)))
        assert ends.vocab_size == target.vocab_size
        assert target.ends(torch.device("meta")).device.type == "meta"


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two names of the one CPU: everything of a spanning target happens but the moving itself."""
    import accelerate.hooks

    monkeypatch.setattr(accelerate.hooks, "set_module_tensor_to_device", lambda *_, **__: None)
    return [torch.device("cpu", 0), torch.device("cpu", 1)]


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_target_that_spans_devices_computes_the_same(
    family: str, target_dir: Build, two_devices: list[torch.device]
) -> None:
    one = load(target_dir(family))
    target = load(target_dir(family), device=two_devices)
    assert target.devices == tuple(two_devices)
    assert one.devices == (CPU,)
    # Every layer is wrapped, so its inputs follow it to its device.
    assert all(hasattr(layer, "_hf_hook") for layer in target.layers)
    ids = random_ids(2, 20)
    for last_hidden in (False, True):
        wanted, last = one.features(ids, last_hidden=last_hidden)
        seen, seen_last = target.features(ids, last_hidden=last_hidden)
        assert torch.equal(seen, wanted)
        assert (last is None) == (seen_last is None)
        if last is not None and seen_last is not None:
            assert torch.equal(seen_last, last)
    assert (target.embed_scale, target.head.multiplier) == (one.embed_scale, one.head.multiplier)
    layers, others, _ = count_calls(target)
    target.features(ids)
    assert layers == [0, 1, 2, 3]
    assert others == []
    # Wherever the layers are, their outputs are brought to the target's own device.
    target._tapped.device = torch.device("meta")
    assert target.features(ids)[0].device.type == "meta"


def test_a_spanning_target_has_no_replica(
    target_dir: Build, two_devices: list[torch.device]
) -> None:
    target = load(target_dir("llama"), device=two_devices)
    with pytest.raises(TargetError, match=r"cpu:0, cpu:1 .*cuda:3"):
        target.replica(torch.device("cuda", 3))
    # One device named twice is one device.
    assert load(target_dir("llama"), device=[CPU, CPU]).devices == (CPU,)


# The cached forward


@pytest.mark.parametrize("family", DECODABLE)
def test_a_cached_forward_with_rejected_drafts_equals_a_plain_one(
    family: str, tmp_path: Path
) -> None:
    changes = DECODABLE[family]
    target = load(tiny_target_dir(tmp_path, family, **changes))
    rows, total, slots = 3, 20, 24
    true = random_ids(rows, total)
    wrong = random_ids(rows, total, seed=2)
    taps, last, _ = plain_forward(tiny_model(family, **changes), true)
    lengths = torch.tensor([3, 8, 5])
    index = torch.arange(rows)[:, None]
    cache = StaticKV(rows, slots, CPU)
    target.check_decodable(slots)

    prompt = true[:, :8].clone()
    for row, length in enumerate(lengths.tolist()):
        prompt[row, length:] = 0
    cache.begin_prefill(8)
    hidden, features = target.extend(prompt, torch.arange(8).expand(rows, 8), cache, None)
    for row, length in enumerate(lengths.tolist()):
        assert_close(hidden[row, :length], last[row, :length])
        assert_close(features[row, :length], taps[row, :length])

    start = lengths
    for right in ((1, 4, 2), (4, 1, 3), (2, 2, 4)):
        accepted = torch.tensor(right)
        positions = start[:, None] + torch.arange(4)
        good = torch.arange(4) < accepted[:, None]
        tokens = torch.where(good, true[index, positions], wrong[index, positions])
        cache.begin(positions, slots)
        mask = torch.arange(slots)[None, None, None, :] <= positions[:, None, :, None]
        hidden, features = target.extend(tokens, positions, cache, mask)
        assert_close(hidden[good], last[index, positions][good])
        assert_close(features[good], taps[index, positions][good])
        assert not torch.allclose(hidden[~good], last[index, positions][~good], atol=0.05)
        start = start + accepted  # the rest was rejected: the row is rewound to there


def test_the_cache_never_shows_slots_behind_the_visible_ones() -> None:
    cache = StaticKV(2, 10, CPU)
    new = torch.randn(2, 1, 3, 4)
    cache.begin_prefill(3)
    keys, values = cache.update(new, new * 2, 5)
    assert keys.shape == (2, 1, 3, 4)
    assert torch.equal(values, new * 2)
    cache.begin(torch.tensor([[1, 2], [7, 8]]), 9)
    late = torch.ones(2, 1, 2, 4)
    keys, _ = cache.update(late, late, 5)
    assert keys.shape == (2, 1, 9, 4)
    assert torch.equal(keys[0, :, 1:3], late[0])
    assert torch.equal(keys[0, :, 0], new[0, :, 0])
    assert torch.equal(keys[1, :, :3], new[1])
    assert torch.equal(keys[1, :, 7:9], late[1])


def test_targets_whose_state_cannot_be_rewound_are_not_decodable(
    loaded: Callable[[str], Target],
) -> None:
    with pytest.raises(TargetError, match=r"linear_attention layers.*rewound.*vLLM or SGLang"):
        loaded("qwen3_5").check_decodable(10)
    for family in ("llama", "qwen3", "mistral", "gemma3"):
        loaded(family).check_decodable(10**6)


# Loading


def test_automatic_dtype_and_stop_tokens(tmp_path: Path) -> None:
    choices = Choices()
    path = tiny_target_dir(tmp_path, eos_token_id=[7, 5])
    target = load(path, choices=choices)
    assert target.dtype == torch.float32
    assert [(c.what, c.got) for c in choices.entries] == [("target.dtype", "float32")]
    assert target.stop_ids == tuple(sorted({5, 7, END_OF_TURN}))
    assert target.tokenizer.chat_template
    assert target.taps == TAPS
    assert load(path, num_taps=1).taps == (3,)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite"])
def test_bfloat16_keeps_the_measured_scales(
    family: str, target_dir: Build, loaded: Callable[[str], Target]
) -> None:
    exact = loaded(family)
    target = load(target_dir(family), dtype="bfloat16")
    ids = random_ids(1, 12)
    features, hidden = target.features(ids, last_hidden=True)
    wanted, _ = exact.features(ids)
    assert features.dtype == target.dtype == torch.bfloat16
    assert (features.float() - wanted).norm() < 0.02 * wanted.norm()
    assert target.embed_scale == pytest.approx(exact.embed_scale, rel=0.01)
    assert target.head.multiplier == pytest.approx(exact.head.multiplier, rel=0.01)
    assert target.head.softcap == exact.head.softcap
    assert hidden is not None


def test_a_padded_vocabulary_keeps_its_rows(tmp_path: Path) -> None:
    """More embedding rows than tokens, those behind the tokenizer's vocabulary zero."""
    model = tiny_model(vocab_size=VOCAB_SIZE + 21)
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCAB_SIZE:] = 0
        model.lm_head.weight[VOCAB_SIZE:] = 0
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.vocab_size == target.embedding.shape[0] == VOCAB_SIZE + 21
    assert len(target.tokenizer) == VOCAB_SIZE
    _, hidden = target.features(random_ids(1, 4), last_hidden=True)
    assert hidden is not None
    assert target.head.logits(hidden).shape == (1, 4, VOCAB_SIZE + 21)


def refused(family: str, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(TargetError) as caught:
        load(tiny_target_dir(tmp_path, family), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "attn_logit_softcapping=50.0"),
        ("gpt_oss", "GptOssAttention uses attention sinks"),
        ("gpt2", "GPT2LMHeadModel: no list of 6 decoder layers"),
        ("opt", "OPTForCausalLM: the first layer does not receive embedding rows"),
        ("phi", "PhiForCausalLM: an output head with a bias"),
        ("llama4", "Llama4ForCausalLM"),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(
    family: str, reason: str, tmp_path: Path
) -> None:
    said = refused(family, tmp_path)
    assert reason in said
    assert said.startswith(f"target.path={tmp_path}")


def test_a_weight_that_is_no_number_is_said_to_be_damaged() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data.fill_(float("nan"))
    with pytest.raises(TargetError, match="NaN or infinity"):
        Target(model, tiny_tokenizer(), taps=TAPS)


def test_logits_that_are_no_multiple_of_the_head_are_refused() -> None:
    model = tiny_model()
    weight = model.lm_head.weight
    model.lm_head.forward = lambda hidden: (hidden @ weight.t()) ** 3
    with pytest.raises(TargetError, match="logits are not the output head"):
        Target(model, tiny_tokenizer(), taps=TAPS)


def test_too_few_layers_and_unreadable_taps_are_refused(tmp_path: Path) -> None:
    assert "6 layers, too few for 5 distinct taps" in refused("llama", tmp_path, num_taps=5)
    message = refused("llama", tmp_path, taps=(1, 5))
    assert "names the last layer, 5" in message
    assert "after the final norm" in message
    assert "0..4" in refused("llama", tmp_path, taps=(1, 6))


def test_an_unknown_dtype_is_refused(target_dir: Build) -> None:
    with pytest.raises(TargetError, match=r"target.dtype=float17 .*auto, float32, bfloat16"):
        load(target_dir("llama"), dtype="float17")


@pytest.mark.parametrize(
    ("family", "lost"),
    [("llama", "lm_head.weight"), ("qwen3", "model.layers.5.mlp.up_proj.weight")],
)
def test_a_checkpoint_without_a_weight_is_refused(family: str, lost: str, tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=rf"{path}: 1 weights .* random, first {lost}"):
        load(path)


def test_a_head_beside_a_tied_embedding_must_be_that_embedding(tmp_path: Path) -> None:
    path = tiny_target_dir(tmp_path, "tied_llama")
    tensors = load_file(path / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    for head, fits in ((rows.clone(), True), (rows * 2, False)):
        save_file(
            tensors | {"lm_head.weight": head},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        for read in (load, lambda path: read_facts(str(path), taps=TAPS)):
            if fits:
                read(path)
                continue
            with pytest.raises(TargetError, match=r"tie_word_embeddings.*lm_head.weight that is"):
                read(path)


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (cut("model.safetensors", 4), "model"),
        (cut("model.safetensors", 1000), "model"),
        (cut("model.safetensors", -100), "model"),
        (cut("config.json", 20), "config.json cannot be read"),
        (
            lambda path: (path / "config.json").write_text("[" * 100_000),
            "config.json cannot be read",
        ),
        (cut("tokenizer.json", 100), "tokenizer"),
        (lambda path: (path / "model.safetensors").unlink(), "model"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer"),
        (partial(edit_config, model_type="flurb"), "flurb"),
        (partial(edit_config, model_type="t5"), "encoder-decoder"),
        (partial(edit_config, hidden_size=64), "model"),
        (partial(edit_config, num_attention_heads=3), "32.* is not a multiple"),
        (partial(edit_config, num_hidden_layers="six"), "num_hidden_layers"),
    ],
)
def test_a_damaged_directory_is_a_target_error_with_its_path(
    damage: Callable[[Path], object], part: str, tmp_path: Path
) -> None:
    path = tiny_target_dir(tmp_path)
    damage(path)
    with pytest.raises(TargetError, match=rf"target.path={path}:? .*({part})"):
        load(path)


def test_a_hub_name_that_cannot_be_fetched_is_a_target_error() -> None:
    with pytest.raises(TargetError, match=r"target.path=nobody/nothing: .*not in the local cache"):
        load(Path("nobody/nothing"))
