"""A decoder whose layers are listened to: features of whole texts, or of new tokens over a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftline.errors import TargetError
from draftline.model.attention import TARGET_ATTENTION, target_attention
from draftline.model.kv_cache import StaticKV


class _LastTap(Exception):
    """Raised before the layer behind the last tap, where nobody needs the rest of a forward."""


class TappedDecoder:
    """The decoder of a causal LM with hooks on the layers `taps`, run with draftline's attention.

    Results are on `device`, that of the embedding. One object serves one thread.
    """

    def __init__(self, decoder: Any, taps: Sequence[int], device: torch.device) -> None:
        use_own_attention(decoder)
        self.taps = tuple(taps)
        self.layers: nn.ModuleList = decoder.layers
        self.device = device
        self.tapped: dict[int, Tensor] = {}
        self._decoder = decoder
        # transformers 5.24 renames it, and takes the old name until 5.40.
        named = inspect.signature(decoder.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self._stops = False
        self._kinds = set(getattr(decoder.config, "layer_types", None) or ())
        self._window = _window(decoder.config, self._kinds)
        self.hooks: list[Any] = [self._keep(tap) for tap in self.taps]
        for tap, hook in zip(self.taps, self.hooks, strict=True):
            self.layers[tap].register_forward_hook(hook)
        self.hooks.append(self._leave)
        self.layers[self.taps[-1] + 1].register_forward_pre_hook(self._leave)

    @torch.no_grad()
    def features(self, input_ids: Tensor, *, last_hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Taps `[rows, tokens, taps * hidden]` and, if asked, final-norm states; see `Target.features`."""
        # Cutting the decoder short by its config would change what depends on the number of layers
        # (shared keys, inputs of each layer's own), so the whole one runs and is left at the last tap.
        self._stops = not last_hidden
        try:
            output = self._decoder(input_ids=input_ids, use_cache=False)
        except _LastTap:
            return self._take_taps(), None
        finally:
            self._stops = False
        return self._take_taps(), output.last_hidden_state

    @torch.no_grad()
    def extend(
        self, input_ids: Tensor, positions: Tensor, cache: StaticKV, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Final-norm states and taps of new tokens, through the cache; see `Target.extend`."""
        output = self._decoder(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=self._masks(mask, positions, cache.key_positions),
            use_cache=True,
            **{self._cache_name: cache},
        )
        return output.last_hidden_state.to(self.device), self._take_taps()

    def _masks(self, mask: Tensor | None, positions: Tensor, keys: Tensor) -> Any:
        """`mask` as the decoder takes it: one, or one per kind of layer, windows cut out of it by the
        positions of `keys`."""
        windowed = mask
        if mask is not None and self._window is not None and mask.shape[-1] > self._window:
            key = keys.view(-1, 1, 1, keys.shape[-1])
            windowed = mask & (key > positions[:, None, :, None] - self._window)
        if len(self._kinds) > 1:
            return {kind: windowed if "sliding" in kind else mask for kind in self._kinds}
        return windowed

    def _keep(self, tap: int) -> Any:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self.tapped[tap] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _leave(self, *_: object) -> None:
        if self._stops:
            raise _LastTap

    def _take_taps(self) -> Tensor:
        # Layers of a target that spans several devices leave their outputs where they are.
        tapped = torch.cat([self.tapped[tap].to(self.device) for tap in self.taps], dim=-1)
        self.tapped.clear()
        return tapped


def _window(config: Any, kinds: set[str]) -> int | None:
    """How many positions, its own included, a windowed layer of the decoder sees; None without any."""
    window = getattr(config, "sliding_window", None)
    if kinds:
        return window if any("sliding" in kind for kind in kinds) else None
    return window if getattr(config, "use_sliding_window", True) else None


def use_own_attention(decoder: Any) -> None:
    """Sets `decoder` to draftline's attention; raises TargetError where its scores are soft-capped."""
    from transformers import AttentionInterface

    if cap := getattr(decoder.config, "attn_logit_softcapping", None):
        raise TargetError(
            f"{type(decoder).__name__} soft-caps attention scores (attn_logit_softcapping={cap}); "
            "such targets (Gemma 2) are not supported"
        )
    AttentionInterface.register(TARGET_ATTENTION, target_attention)
    decoder.config._attn_implementation = TARGET_ATTENTION
