"""A target's tokenizer, and whether it is this target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftline.errors import TargetError
from draftline.model.target.probe import find_ends
from draftline.model.target.reading import named, reading

# A directory with none of these has no tokenizer; with one of them, it must load.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str, source: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer at `source`, which the user called `path`; None for a directory without one.

    Raises TargetError for one that cannot be read.
    """
    from transformers import AutoTokenizer

    directory = Path(source)
    if directory.is_dir() and not any((directory / name).exists() for name in _FILES):
        return None
    with reading(path, "tokenizer (tokenizer.json, tokenizer_config.json)", "read"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def check_vocabulary(path: str, tokenizer: Any, model: Any) -> None:
    """Raises TargetError where `tokenizer` is another model's: words, or the token that ends a
    text, lie behind the last row of embedding or head. (Added tokens alone may lie there: a row of
    the data that has one is left out.)"""
    with named(path):
        embedding, head = find_ends(model)
    rows = min(int(embedding.weight.shape[0]), int(head.weight.shape[0]))
    words = int(getattr(tokenizer, "vocab_size", 0) or 0)
    end = getattr(tokenizer, "eos_token_id", None)
    if words > rows or (isinstance(end, int) and end >= rows):
        seen = f"{words} words" if words > rows else f"the end token {end}"
        raise TargetError(
            f"target.path={path}: its tokenizer has {seen} and the model {rows} embedding rows, so "
            "the tokenizer is another model's; copy the model's own into the directory"
        )
