"""Whether draftline computes a target's features as the target itself does, tried on a small twin.

Attention rules that live only in a mask, neighbours that change a text's rotation, layers that read
what earlier ones stored: what a decoder does is not to be told from names, so a twin of it with the
same classes and much smaller windows is run both ways, and the results are compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftline.errors import TargetError
from draftline.model.kv_cache import StaticKV
from draftline.model.target.rope import fix_rope
from draftline.model.target.tapped import TappedDecoder
from draftline.model.target.twin import build_twin

# Within every limit that a twin has, beyond some of them, beyond all.
_LENGTHS = (3, 13, 30)
_PADDED = 34
# Tokens per round of the cached forward that is tried.
_BLOCK = 3


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What was found: `undecodable` says why the cached forward cannot be trusted, None where it can;
    `untried` why no twin could be built, None where one was."""

    undecodable: str | None = None
    untried: str | None = None


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """`texts`, `[1, tokens]` each, and the states of every layer that a decoder has for them."""

    texts: list[Tensor]
    states: list[list[Tensor]]


_known: dict[str, Fidelity | TargetError] = {}


def check_fidelity(decoder: Any) -> Fidelity:
    """Compares features and cached forward of a twin of `decoder` with the twin's own forward.

    `decoder` may be on the meta device. Raises TargetError when features differ or cannot be computed.
    The answer for a configuration is kept.
    """
    key = f"{type(decoder).__qualname__} {json.dumps(decoder.config.to_dict(), default=str)}"
    if key not in _known:
        try:
            _known[key] = _compare(decoder)
        except TargetError as error:
            _known[key] = error
    found = _known[key]
    if isinstance(found, TargetError):
        raise TargetError(str(found))
    return found


@torch.no_grad()
def _compare(decoder: Any) -> Fidelity:
    failure = ""
    for small_heads in (True, False):
        try:
            twin = build_twin(decoder, small_heads=small_heads)
            fix_rope(twin.decoder, None)
            own = own_answers(twin.decoder)
            break
        except Exception as error:  # its classes were given sizes that nobody has tried
            failure = _said(error)
    else:
        return Fidelity(untried=failure)
    name = type(decoder).__name__
    taps = range(len(twin.decoder.layers) - 1)
    limits = ", ".join(f"{key}={value}" for key, value in twin.limits.items())
    tapped = _tap(twin.decoder, taps, name, limits)
    _compare_features(tapped, own, name, limits)
    return Fidelity(undecodable=_try_cache(tapped, own))


@torch.no_grad()
def check_weights(tapped: TappedDecoder, own: OwnAnswers, name: str) -> Fidelity:
    """What `check_fidelity` does, with the real weights and so only inside the target's limits.

    `own` are the decoder's answers with its own attention. Raises TargetError when features differ.
    """
    _compare_features(tapped, own, name, "")
    return Fidelity(undecodable=_try_cache(tapped, own))


def _tap(decoder: Any, taps: Sequence[int], name: str, limits: str) -> TappedDecoder:
    try:
        return TappedDecoder(decoder, taps, torch.device("cpu"))
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(_crashed(name, limits, error)) from None


@torch.no_grad()
def own_answers(decoder: Any) -> OwnAnswers:
    """A few random texts, and what `decoder` says of each of them alone, run as it stands."""
    weight = decoder.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, len(weight), (1, n), generator=generator) for n in _LENGTHS]
    texts = [text.to(weight.device) for text in texts]
    return OwnAnswers(texts, [own_states(decoder, text) for text in texts])


def own_states(decoder: Any, ids: Tensor) -> list[Tensor]:
    """What `decoder` itself says of `ids [1, tokens]`: every layer's output, the last one normed."""
    entered: list[Tensor] = []
    handle = decoder.layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    try:
        output = decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        handle.remove()
    states = list(output.hidden_states or ())
    # Most families begin with what enters the first layer, some with what leaves it.
    if states and torch.equal(states[0], entered[0]):
        del states[0]
    count = len(decoder.layers)
    if len(states) not in (count, count + 1):
        raise ValueError(f"{len(states)} hidden states of {count} layers")
    return [*states[: count - 1], output.last_hidden_state]


def _compare_features(tapped: TappedDecoder, own: OwnAnswers, name: str, limits: str) -> None:
    """Raises TargetError unless features are the decoder's own, for each text and for all together.

    `limits` says where the rules of positions begin that the longer texts go beyond, if they do.
    """
    shape = list(own.states[0][0].shape)
    if len(shape) != 3:
        raise TargetError(
            f"{name}: a layer hands on {shape} for {own.texts[0].shape[1]} tokens, not one state for "
            "each; such targets are not supported"
        )
    try:
        for text, states in zip(own.texts, own.states, strict=True):
            alone, last = tapped.features(text, last_hidden=True)
            short, _ = tapped.features(text, last_hidden=False)
            assert last is not None, "asked for"
            change = max(
                difference(alone, _joined(tapped, states)),
                difference(last, states[-1]),
                difference(short, alone),
            )
            if change > _tolerance(alone):
                beyond = limits if text.shape[1] > _LENGTHS[0] else ""
                raise TargetError(_refusal(name, change, beyond))
        together, _ = tapped.features(_padded(own.texts), last_hidden=False)
    except TargetError:
        raise
    except Exception as error:  # code that was not written for this attention
        raise TargetError(_crashed(name, limits, error)) from None
    for row, (text, states) in enumerate(zip(own.texts, own.states, strict=True)):
        change = difference(together[row : row + 1, : text.shape[1]], _joined(tapped, states))
        if change > _tolerance(together):
            raise TargetError(
                f"{name}: the features of a text change by {100 * change:.2g} % with its padding and "
                "the texts beside it; such targets are not supported"
            )


def _joined(tapped: TappedDecoder, states: Sequence[Tensor]) -> Tensor:
    return torch.cat([states[tap].to(tapped.device) for tap in tapped.taps], dim=-1)


def _refusal(name: str, change: float, beyond: str) -> str:
    why = (
        f"beyond the limits that its layers have ({beyond}), they choose what they see by a rule that "
        "draftline's attention does not know"
        if beyond
        else "its attention is not the plain causal one that draftline computes"
    )
    return (
        f"{name}: features differ by {100 * change:.2g} % from the model's own forward; {why}. "
        "Such targets are not supported"
    )


def _crashed(name: str, limits: str, error: Exception) -> str:
    own = f"has rules of its own about positions ({limits}) and " if limits else ""
    return (
        f"{name} {own}does not run with draftline's attention, which is causal by itself and builds no "
        f"mask for the model to change ({_said(error)}); such targets are not supported"
    )


def _try_cache(tapped: TappedDecoder, own: OwnAnswers) -> str | None:
    """Why states computed through the cache are not those of the whole text; None where they are."""
    try:
        for extended, row, begin in _through_cache(tapped, own.texts):
            wanted = own.states[row][-1][:, begin : begin + extended.shape[1]]
            change = difference(extended, wanted)
            if change > _tolerance(extended):
                return f"its cached forward differs by {100 * change:.2g} % from its whole forward"
    except Exception as error:  # a cache that was not written for these layers
        return f"its layers cannot use a cache of keys and values alone ({_said(error)})"
    finally:
        tapped.tapped.clear()
    return None


def _through_cache(tapped: TappedDecoder, texts: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """Last states of the final tokens of every text, in rounds, with row and first position."""
    device = texts[0].device
    rows = len(texts)
    cache = StaticKV(rows, _PADDED, device)
    begins = torch.tensor([max(1, t.shape[1] - 2 * _BLOCK) for t in texts], device=device)
    most = int(begins.max())
    padded = _padded(texts)
    cache.begin_prefill(most)
    first, _ = tapped.extend(
        padded[:, :most], torch.arange(most, device=device).expand(rows, most), cache, None
    )
    found = [(first[row : row + 1, : int(n)], row, 0) for row, n in enumerate(begins)]
    for step in range(2):
        positions = begins[:, None] + step * _BLOCK + torch.arange(_BLOCK, device=device)
        block = padded.gather(1, positions)
        cache.begin(positions, _PADDED)
        mask = torch.arange(_PADDED, device=device)[None, None, None] <= positions[:, None, :, None]
        hidden, _ = tapped.extend(block, positions, cache, mask)
        for row, text in enumerate(texts):
            real = int(text.shape[1] - positions[row, 0])
            if real > 0:
                found.append((hidden[row : row + 1, :real], row, int(positions[row, 0])))
    return found


def difference(seen: Tensor, wanted: Tensor) -> float:
    """The change of a token's state relative to its size: the largest in float32, the median where
    rounding alone moves single tokens; nan counts as infinite."""
    if seen.shape != wanted.shape:
        return float("inf")
    wanted = wanted.to(seen.device)
    change = (seen - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1).clamp_min(1e-30)
    change = change.nan_to_num(nan=float("inf"))
    return float(change.max() if seen.dtype == torch.float32 else change.median())


def _tolerance(seen: Tensor) -> float:
    return 1e-3 if seen.dtype == torch.float32 else 0.05


def _padded(texts: Sequence[Tensor]) -> Tensor:
    padded = torch.zeros(len(texts), _PADDED, dtype=torch.long, device=texts[0].device)
    for row, text in enumerate(texts):
        padded[row, : text.shape[1]] = text
    return padded


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()[:30])}"
