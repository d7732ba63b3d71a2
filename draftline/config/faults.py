"""What is wrong with a configuration, in words: each key with the value seen and what it needs."""

from __future__ import annotations

import datetime
import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from draftline.config.schema import Config

# What keys are called elsewhere -> what they are called here.
_OTHER_NAMES = {
    "lr": ("train.learning_rate",),
    "max_lr": ("train.learning_rate",),
    "peak_lr": ("train.learning_rate",),
    "min_lr": ("train.min_lr_ratio",),
    "warmup": ("train.warmup_ratio",),
    "warmup_steps": ("train.warmup_ratio",),
    "wd": ("train.weight_decay",),
    "adam_betas": ("train.betas",),
    "grad_clip": ("train.clip",),
    "max_grad_norm": ("train.clip",),
    "gradient_clipping": ("train.clip",),
    "ema_decay": ("train.ema",),
    "max_steps": ("train.steps",),
    "num_steps": ("train.steps",),
    "iterations": ("train.steps",),
    "num_epochs": ("train.epochs",),
    "num_train_epochs": ("train.epochs",),
    "save_steps": ("train.checkpoint_every",),
    "save_every": ("train.checkpoint_every",),
    "save_total_limit": ("train.keep_checkpoints",),
    "logging_steps": ("train.log_every",),
    "log_interval": ("train.log_every",),
    "report_to": ("train.trackers",),
    "gradient_accumulation_steps": ("train.packs_per_step",),
    "grad_accum": ("train.packs_per_step",),
    "bs": ("token_budget", "max_batch_size", "train.packs_per_step"),
    "batch_size": ("token_budget", "max_batch_size", "train.packs_per_step"),
    "train_batch_size": ("token_budget", "max_batch_size", "train.packs_per_step"),
    "micro_batch_size": ("token_budget", "max_batch_size"),
    "per_device_train_batch_size": ("token_budget", "max_batch_size"),
    "num_anchors": ("max_anchors",),
    "output_dir": ("run.dir",),
    "out_dir": ("run.dir",),
    "out": ("run.dir",),
    "output": ("run.dir",),
    "save_dir": ("run.dir",),
    "random_seed": ("run.seed",),
    "gpu": ("run.device",),
    "devices": ("topology.targets", "topology.drafters"),
    "gpus": ("topology.targets", "topology.drafters"),
    "model": ("target.path",),
    "model_path": ("target.path",),
    "model_name": ("target.path",),
    "model_name_or_path": ("target.path",),
    "base_model": ("target.path",),
    "teacher": ("target.path",),
    "torch_dtype": ("target.dtype",),
    "precision": ("target.dtype",),
    "layer_ids": ("target.tap_layers",),
    "target_layer_ids": ("target.tap_layers",),
    "num_draft_layers": ("drafter.layers",),
    "num_hidden_layers": ("drafter.layers",),
    "num_attention_heads": ("drafter.num_heads",),
    "num_key_value_heads": ("drafter.num_kv_heads",),
    "draft_vocab_size": ("drafter.vocab_size",),
    "dataset": ("data.train",),
    "train_data": ("data.train",),
    "train_file": ("data.train",),
    "train_path": ("data.train",),
    "files": ("data.train",),
    "train_files": ("data.train",),
    "data_path": ("data.train",),
    "data_files": ("data.train",),
    "val": ("data.heldout",),
    "valid": ("data.heldout",),
    "validation": ("data.heldout",),
    "eval_data": ("data.heldout",),
    "eval_file": ("data.heldout",),
    "val_data": ("data.heldout",),
    "val_file": ("data.heldout",),
    "val_split": ("data.heldout",),
    "validation_split": ("data.heldout",),
    "test_size": ("data.heldout",),
    "eval_steps": ("train.eval_every",),
    "eval_interval": ("train.eval_every",),
    "val_every": ("train.eval_every",),
    "save_interval": ("train.checkpoint_every",),
    "checkpoint_steps": ("train.checkpoint_every",),
    "seq_len": ("data.max_length",),
    "max_seq_len": ("data.max_length",),
    "max_seq_length": ("data.max_length",),
    "max_len": ("data.max_length",),
    "chat_template": ("data.template",),
    "cache_dir": ("features.dir",),
    "eval_batch_size": ("evaluate.batch_size",),
    "temp": ("evaluate.temperatures",),
    "temperature": ("evaluate.temperatures",),
    "max_tokens": ("evaluate.max_new_tokens",),
}
# What such a word says depends on its section.
_OTHER_KEYS = {
    "data.path": ("data.train",),
    "data.eval": ("data.heldout",),
    "data.test": ("data.heldout",),
    "data.dev": ("data.heldout",),
    "features.cache": ("features.source",),
    "features.kind": ("features.source",),
    "features.type": ("features.source",),
    "features.mode": ("features.source",),
    "features.path": ("features.dir",),
    "run.path": ("run.dir",),
    "run.name": ("run.dir",),
}
# Of the command, and no keys.
_OPTIONS = {"resume": "--resume", "resume_from_checkpoint": "--resume"}
_MOST_SHOWN = 3
# Of one answer, whatever a file holds.
_MOST_LINES, _MOST_CHARACTERS = 20, 400


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the configuration, sections before their keys."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if (section := _section(field)) is not None:
            yield from known_keys(section, f"{prefix}{name}.")


def explain(error: ValidationError) -> str:
    """One line that names every key at fault, once."""
    lines: dict[str, None] = {}
    for item in error.errors():
        for line in _lines(item):
            lines[line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."] = None
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "configuration: " + "; ".join([*list(lines)[:_MOST_LINES], *more])


def suggestion(key: str) -> str:
    """What follows "unknown key `key`": the keys that are likely meant, or where all are listed."""
    if option := _OPTIONS.get(key.rpartition(".")[2]):
        return f"; it is an option of the command: draftline train CONFIG {option}"
    near = nearest_keys(key)
    if not near:
        return "; see `draftline config schema`"
    return f"; did you mean {' or '.join(near[:_MOST_SHOWN])}?"


def nearest_keys(key: str) -> Sequence[str]:
    """The keys that an unknown one is likely to stand for, the likeliest alone where one is."""
    leaves = [k for k in known_keys() if k not in Config.model_fields or not _is_section(k)]
    head, _, leaf = key.lower().replace("-", "_").rpartition(".")
    sections = [name for name in Config.model_fields if _is_section(name)]
    if head not in sections and (close := difflib.get_close_matches(head, sections, n=1)):
        head = close[0]
        if f"{head}.{leaf}" in leaves:
            return (f"{head}.{leaf}",)
    if near := _OTHER_KEYS.get(f"{head}.{leaf}"):
        return near
    same = [k for k in leaves if k.rpartition(".")[2] == leaf]
    if (
        not head
        and not same
        and (close := difflib.get_close_matches(leaf, sections, n=1, cutoff=0.75))
    ):
        return (close[0],)
    inside = {k.rpartition(".")[2]: k for k in leaves if k.rpartition(".")[0] == head}
    # A slip of the finger in the right place, before a word that is another key's elsewhere.
    if close := difflib.get_close_matches(leaf, inside, n=1, cutoff=0.85):
        return (inside[close[0]],)
    if leaf in _OTHER_NAMES:
        return _OTHER_NAMES[leaf]
    if same:
        return same
    scores = {
        k: _likeness(leaf, k.rpartition(".")[2]) + 0.1 * (k in inside.values()) for k in leaves
    }
    best = max(scores, key=lambda k: scores[k])
    return (best,) if scores[best] >= 0.6 else ()


def _likeness(name: str, known: str) -> float:
    """0 to 1: by letters, or by the words that both have."""
    letters = difflib.SequenceMatcher(None, name, known).ratio()
    ours, theirs = set(name.split("_")), set(known.split("_"))
    words = len(ours & theirs) / max(len(ours), len(theirs))
    part = 0.7 if ours > theirs or theirs > ours else 0.0
    short = 0.7 if len(name) > 2 and known.startswith(name) else 0.0
    return max(letters, words, part, short)


def _lines(item: Any) -> Iterator[str]:
    path, field = _find(item["loc"])
    key = ".".join(path)
    value, kind = item["input"], item["type"]
    if kind == "extra_forbidden":
        for name in _leaves(key, value):
            yield f"unknown key {name}{suggestion(name)}"
    elif kind == "missing" and (field is None or len(path) == len(item["loc"])):
        yield from _missing(key, field)
    elif kind == "value_error":
        yield str(item["ctx"]["error"])
    elif field is not None and (section := _section(field)) is not None:
        example = next(iter(section.model_fields))
        seen = "is empty" if value is None else f"is a section and cannot be {shown(value)}"
        out = "" if field.is_required() else ", or leave it out"
        yield f"{key} {seen}: give its keys, such as {key}.{example}{out}"
    else:
        wanted = "a path of more than blanks" if kind == "blank" else needs(field)
        note = "; yes, no, on and off are flags, and null turns a key off" if kind == "flag" else ""
        where = next((part for part in item["loc"][len(path) :] if isinstance(part, int)), None)
        place = "" if where is None or kind == "missing" else f" (entry {where + 1})"
        if kind == "list_type" and isinstance(value, str):
            note += f": {key}=[{shown(value)}]"
        yield f"{key}={shown(value)}{place}: needs {wanted}{note}"


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The keys inside an unknown section, else the key itself."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def _missing(key: str, field: FieldInfo | None) -> Iterator[str]:
    section = None if field is None else _section(field)
    if section is None:
        yield f"{key} is missing and has no default"
        return
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    if required:
        for name in required:
            yield f"{key}.{name} is missing and has no default"
    else:
        yield f"{key} is missing: train.steps or train.epochs is needed"


def _find(location: Sequence[int | str]) -> tuple[list[str], FieldInfo | None]:
    """The names that lead to the key a fault belongs to, and its field; what pydantic adds behind
    them (places in a list, alternatives of a type) is left out."""
    model: type[BaseModel] | None = Config
    path: list[str] = []
    field: FieldInfo | None = None
    for part in location:
        if model is None:
            break
        path.append(str(part))
        field = model.model_fields.get(str(part))
        model = None if field is None else _section(field)
    behind = location[len(path) :]
    if field is not None and get_origin(field.annotation) is dict and behind:
        # A name of a mapping is the user's own key.
        return [*path, str(behind[0])], FieldInfo.from_annotation(get_args(field.annotation)[1])
    return path, field


def shown(value: Any) -> str:
    """A value as YAML spells it, cut short where it is long: one can be as long as its file."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def needs(field: FieldInfo | None) -> str:
    """What a key may hold: "a whole number, at least 1, or null"."""
    if field is None:
        return "another value"
    if field.examples:
        return ", ".join(map(str, field.examples[:-1])) + f" or {field.examples[-1]}"
    kinds = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
    limits = [words for rule in field.metadata if (words := _limit(rule, field.annotation))]
    text = " or ".join(map(_kind, kinds))
    text = ", ".join([text, *limits])
    return f"{text}, or null" if type(None) in _alternatives(field.annotation) else text


def _alternatives(annotation: Any) -> Sequence[Any]:
    return (
        get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else [annotation]
    )


def _kind(annotation: Any, many: bool = False) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    if origin is list:
        return f"lists of {_kind(inner[0], True)}" if many else f"a list of {_kind(inner[0], True)}"
    if origin is tuple:
        return f"{'lists' if many else 'a list'} of {len(inner)} {_kind(inner[0], True)}"
    if origin in (dict, Mapping):
        return f"names with {'values' if inner[1] is Any else _kind(inner[1], True)}"
    one, several = {
        int: ("a whole number", "whole numbers"),
        float: ("a finite number", "finite numbers"),
        bool: ("true or false", "flags"),
        str: ("text", "texts"),
        datetime.date: ("a day such as 2026-03-30", "days"),
    }.get(annotation, ("another value", "other values"))
    return several if many else one


def _limit(rule: Any, annotation: Any) -> str:
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if (bound := getattr(rule, name, None)) is not None:
            return f"{words} {bound}"
    if (fewest := getattr(rule, "min_length", None)) is not None:
        return f"at least {fewest} of them"
    return ""


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_section(name: str) -> bool:
    return _section(Config.model_fields[name]) is not None
