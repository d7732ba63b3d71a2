"""Which class of transformers a target is, and the refusal of what is no decoder-only language model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftline.errors import TargetError

_NO_LANGUAGE_MODEL = re.compile(
    r"(Classification|RewardModel|ForReward|MaskedLM|QuestionAnswering|Embedding|Diffusion)"
)
_DRAFTERS = re.compile(r"(DFlash|Eagle|Medusa|DSpark|Speculator)", re.IGNORECASE)
# Around the language model of a wrapper: encoders are models of their own, what fits their outputs
# to the language model goes by one of these names.
_ADAPTERS = re.compile(r"(projector|merger|connector|aligner|resampler)", re.IGNORECASE)


def check_architecture(path: str, source: str, tree: Mapping[str, Any]) -> None:
    """Raises TargetError where `tree`, a config.json, is none of a decoder-only language model."""
    import transformers

    said = tree.get("architectures")
    names = [str(name) for name in said] if isinstance(said, list) else []
    for name in names:
        known = getattr(transformers, name, None)
        generates = getattr(known, "can_generate", None)
        if _DRAFTERS.search(name):
            raise TargetError(
                f"target.path={path} is a drafter ({name}), not the model that it drafts for; give "
                "its target"
            )
        if _NO_LANGUAGE_MODEL.search(name) or (generates is not None and not generates()):
            raise TargetError(
                f"target.path={path} is a {name}: it has no head that writes the next token "
                "(embedding models, encoders, classifiers and reward models have none); give a "
                "causal language model"
            )
    if (Path(source) / "modules.json").is_file():
        raise TargetError(
            f"target.path={path} is a sentence-transformers model (modules.json): its layers were "
            "trained to embed, not to write; give a causal language model"
        )
    parts: list[Mapping[str, Any]] = [tree]
    if isinstance(tree.get("text_config"), Mapping):
        parts.append(tree["text_config"])
    for part in parts:
        if part.get("is_encoder_decoder"):
            raise TargetError(
                f"target.path={path} is an encoder-decoder model ({_name(tree)}); draftline drafts "
                "for decoder-only language models"
            )
        if part.get("use_bidirectional_attention") is True or part.get("is_causal") is False:
            raise TargetError(
                f"target.path={path} attends in both directions ({_name(tree)}); draftline drafts "
                "for causal language models"
            )


def read_tree(path: str, source: str, trust_remote_code: bool) -> dict[str, Any]:
    """The config.json of the checkpoint `source`, which the user called `path`, as it is written.

    Raises TargetError where it cannot be read, for a model type that transformers does not know or
    that is code which `trust_remote_code` does not allow, and for what is no decoder-only language
    model.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig, __version__

    try:
        tree = PretrainedConfig.get_config_dict(source)[0]
        model_type = tree.get("model_type")
        own_code = (tree.get("auto_map") or {}).get("AutoConfig")
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(
            f"target.path={path}: its config.json cannot be read: {' '.join(str(error).split()[:60])}"
        ) from None
    except (TypeError, AttributeError):
        raise TargetError(
            f"target.path={path}: its config.json is no mapping of settings; fetch it again"
        ) from None
    if model_type is None and not own_code:
        raise TargetError(
            f"target.path={path}: its config.json has no model_type, so it is not that of a "
            "transformers model"
        )
    if model_type not in CONFIG_MAPPING and not own_code:
        raise TargetError(
            f"target.path={path}: transformers {__version__} has no model type {model_type!r}; a "
            "later version may, or the name is mistyped in config.json"
        )
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise TargetError(
            f"target.path={path}: model type {model_type!r} is code that comes with the model "
            f"({own_code}); read it, and run it with target.trust_remote_code=true"
        )
    check_architecture(path, source, tree)
    return dict(tree)


def read_config(path: str, source: str, trust_remote_code: bool) -> Any:
    """transformers' configuration of the checkpoint `source`, whose tree was checked before.

    Raises TargetError for an encoder-decoder model, which some types are without saying so, and for
    one that has no attention at all.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(
            f"target.path={path} is an encoder-decoder model ({config.model_type}); draftline "
            "drafts for decoder-only language models"
        )
    if getattr(config.get_text_config(), "num_attention_heads", None) is None:
        raise TargetError(
            f"target.path={path}: a {config.model_type} model has no attention heads; draftline "
            "drafts for models whose context is a cache of keys and values"
        )
    return config


def auto_class(path: str, config: Any) -> Any:
    """The Auto class of transformers that loads `config`; TargetError where none writes text.

    A causal LM where there is one, else the wrapper of a language model that also reads images.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    own = getattr(config, "auto_map", None) or {}
    for auto, known in (
        (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
        (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        if type(config) in known or auto.__name__ in own:
            return auto
    raise TargetError(
        f"target.path={path}: a {config.model_type} model is no causal language model for "
        "transformers, nor one in a wrapper for images; draftline drafts for those"
    )


def keep_language_model(model: Any) -> list[str]:
    """Takes the encoders of images and sound out of a wrapper; returns the names they had.

    Text needs none of them. What remains is the decoder, the head, and small parts that some
    wrappers pass text through.
    """
    from transformers import PreTrainedModel

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is model:
        return []  # a model that does not tell its parts; `decoder_layers` refuses it
    kept = {id(decoder), id(head)}
    dropped: list[str] = []

    def walk(prefix: str, module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            full = f"{prefix}{name}"
            if id(child) in kept:
                continue
            if any(id(inner) in kept for inner in child.modules()):
                walk(f"{full}.", child)
            elif isinstance(child, PreTrainedModel) or _ADAPTERS.search(name):
                setattr(module, name, nn.Identity())
                dropped.append(full)

    walk("", model)
    return dropped


def empty_model(path: str, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model of `config` as the default device makes it (meta: shapes alone), with fresh weights
    where it has any."""
    auto = auto_class(path, config)
    return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _name(tree: Mapping[str, Any]) -> str:
    names = tree.get("architectures") or []
    return ", ".join(map(str, names)) or str(tree.get("model_type"))
