"""One table of rotary frequencies for a whole run, where a target would pick it batch by batch.

Long-rope and dynamic-NTK targets choose their frequencies by the longest position of a forward, so a
text's features would change with its neighbours and its padding. Servers decide once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RopeTable:
    """What was fixed: `kind` is the target's rope type, `name` says which of its tables it is;
    `switch` positions is where the target would change tables, which this one is `beyond` or not."""

    kind: str
    name: str
    switch: int
    beyond: bool

    @property
    def longest(self) -> int | None:
        """The most positions that the table serves; None for any number."""
        return None if self.beyond else self.switch

    @property
    def serving(self) -> str:
        """What a server must be told to use the same table."""
        if self.kind == "longrope":
            above = "above" if self.beyond else "at most"
            return f"serve it with vLLM's --max-model-len {above} {self.switch}"
        return "serve it with a context of the same length"


@torch.no_grad()
def fix_rope(decoder: nn.Module, context: int | None) -> RopeTable | None:
    """Gives the rotary modules of `decoder` the one table that texts of `context` positions need.

    None stands for whatever the target is made for. Up to the length that the target was first
    trained at (original_max_position_embeddings; for dynamic NTK max_position_embeddings) it is the
    short or plain table, above it the long one, as vLLM decides by max_model_len. Returns what was
    fixed, or None for a target whose frequencies do not depend on lengths.
    """
    fixed = None
    for module, kind, layer_type in _switching(decoder):
        config: Any = module.config
        named = {} if layer_type is None else {"layer_type": layer_type}
        parameters = config.rope_parameters
        if layer_type is not None:
            parameters = parameters[layer_type]
        if kind == "longrope":
            original = int(parameters["original_max_position_embeddings"])
            most = original + 1
        else:
            original = int(config.max_position_embeddings)
            most = context or int(original * float(parameters.get("factor") or 1))
        beyond = context is None or context > original
        frequencies, scaling = _initial(kind)(
            config,
            _buffer(module, layer_type).device,
            seq_len=most if beyond else None,
            **named,
        )
        prefix = "" if layer_type is None else f"{layer_type}_"
        module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
        setattr(module, f"{prefix}attention_scaling", scaling)
        # What transformers asks before every forward whether to choose anew.
        if layer_type is None:
            module.rope_type = "fixed"
        else:
            module.rope_type[layer_type] = "fixed"
        name = {"longrope": "long" if beyond else "short"}.get(
            kind, f"for {most} positions" if beyond else "plain"
        )
        fixed = RopeTable(kind, f"the {name} table", original, beyond)
    return fixed


def _switching(decoder: nn.Module) -> Iterator[tuple[Any, str, str | None]]:
    """Rotary modules that choose by length, with their rope type and, where they have several, the
    type of layer."""
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        by_type = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer_type, kind in list(by_type):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield module, kind, layer_type


def _initial(kind: str) -> Any:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[kind]


def _buffer(module: nn.Module, layer_type: str | None) -> Tensor:
    found: Tensor = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    return found
