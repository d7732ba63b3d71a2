"""Which target layers are read.

A tap id `t` means the residual stream after the 0-based decoder layer `t`, un-normalised: the entry
`hidden_states[t + 1]` of a Hugging Face model. This is the numbering of z-lab's `target_layer_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftline.errors import TargetError


def choose_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """`num_taps` layer ids spread from layer 1 to layer `num_layers - 3`.

    The rule of z-lab's `build_target_layer_ids`, Python's rounding to even included. Raises
    TargetError when the target has too few layers for distinct ids.
    """
    if num_taps == 1 and num_layers > 2:
        return (num_layers // 2,)
    gaps = max(num_taps - 1, 1)
    ids = tuple(round(1 + i * (num_layers - 4) / gaps) for i in range(num_taps))
    if len(set(ids)) < num_taps or num_layers < 4:
        # Distinct ids over that span; one tap alone lies in the middle.
        most = num_layers - 3 if num_layers > 3 else int(num_layers > 2)
        way_out = (
            f"target.num_taps is at most {most} here" if most else "target.num_taps finds none"
        )
        named = f"may name some of 0..{num_layers - 2}" if num_layers > 1 else "has none to name"
        raise TargetError(
            f"the target has {num_layers} layers, too few for {num_taps} distinct taps; {way_out}, and "
            f"target.tap_layers {named}"
        )
    return ids


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`taps` when they are distinct, ascending, and name layers that can be read; else TargetError."""
    if not taps:
        raise TargetError("target.tap_layers is empty; name at least one layer or set it to null")
    if list(taps) != sorted(set(taps)):
        raise TargetError(f"target.tap_layers={list(taps)} must be distinct and ascending")
    if taps[0] < 0 or taps[-1] >= num_layers:
        raise TargetError(
            f"target.tap_layers={list(taps)} must lie in 0..{num_layers - 2}: the target has "
            f"{num_layers} layers"
        )
    if taps[-1] == num_layers - 1:
        raise TargetError(
            f"target.tap_layers={list(taps)} names the last layer, {num_layers - 1}: Hugging Face "
            "returns that entry after the final norm while serving engines read it before, so the "
            f"drafter would see other features than in training; use ids up to {num_layers - 2}"
        )
    return tuple(taps)
