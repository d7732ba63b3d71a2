"""A key/value cache of fixed size in which every row of a batch has its own length.

What a row has settled lies in order: slot `p` holds the key of position `p`. Tokens that are tried
behind it may share a position, as siblings of a tree do; those that stand are then moved to the slot
of theirs. Rewinding a row therefore costs nothing: slots at or after the row's length are masked by
the caller and overwritten later. The class stands in for a Hugging Face cache and serves the drafter
as well. It answers what decoder-only models ask a cache in transformers 5.15 to 5.24;
`check_fidelity` finds out whether a model asks for more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftline.errors import TargetError

# What models send along with keys and values: the arguments of their forward, for caches that store
# less than every position. Positions and masks come from the caller here.
_SENT_ALONG = ("cache_kwargs", "kwargs")


class StaticKV:
    """Keys and values `[rows, kv_heads, slots, head_dim]` per layer, allocated on first use."""

    def __init__(self, rows: int, slots: int, device: torch.device) -> None:
        self.rows = rows
        self.slots = slots
        self._row_index = torch.arange(rows, device=device)[:, None]
        self._slot = torch.arange(slots, device=device)
        self._written: Tensor | None = None
        self._visible = slots
        self.key_positions = self._slot
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def begin_prefill(self, length: int) -> None:
        """The next updates write slots `0..length-1` of every row and return only those."""
        self._written = None
        self._visible = length
        self.key_positions = self._slot[:length]

    def begin(self, slots: Tensor, visible: int, positions: Tensor | None = None) -> None:
        """The next updates write `slots [rows, tokens]`, all below `visible`, and return the first
        `visible` slots. `positions [rows, tokens]` are those of the tokens, None where they are the
        slots; `key_positions`, `[visible]` or `[rows, visible]`, then has the position of every key."""
        self._written = slots
        self._visible = visible
        self.key_positions = self._slot[:visible]
        if positions is not None:
            of_row = self.key_positions.expand(self.rows, -1)
            self.key_positions = of_row.scatter(1, slots, positions)

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copies what lies at `source [rows, tokens]` to `slots [rows, tokens]`, in every layer."""
        for buffer in (*self._keys.values(), *self._values.values()):
            tokens = buffer.transpose(1, 2)
            tokens[self._place(slots, buffer)] = tokens[self._place(source, buffer)]

    def _place(self, slots: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and `slots` as an index of `buffer`: a target that spans devices has layers on each."""
        return self._row_index.to(buffer.device), slots.to(buffer.device)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *sent: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        """Writes `keys` and `values [rows, kv_heads, tokens, head_dim]`; returns the visible slots.

        Raises TargetError for a model that tells its cache what this one does not know.
        """
        if unknown := sorted(set(named) - set(_SENT_ALONG)) or list(map(repr, sent[1:])):
            raise TargetError(
                f"the target tells its cache {', '.join(unknown)}, which draftline's does not know; "
                "it can be trained for, but not decoded here"
            )
        for store, new in ((self._keys, keys), (self._values, values)):
            if layer_idx not in store:
                shape = (self.rows, new.shape[1], self.slots, new.shape[3])
                store[layer_idx] = new.new_zeros(shape)
            buffer = store[layer_idx]
            if self._written is None:
                buffer[:, :, : self._visible] = new
            else:
                place = self._place(self._written, buffer)
                buffer.transpose(1, 2)[place] = new.transpose(1, 2)
        return (
            self._keys[layer_idx][:, :, : self._visible],
            self._values[layer_idx][:, :, : self._visible],
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given, so no model may derive them from the cache."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero, as `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        return self._visible, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Positions that a row can hold."""
        return self.slots
