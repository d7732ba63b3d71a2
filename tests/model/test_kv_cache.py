"""The key/value cache as models of several releases of transformers call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.errors import TargetError
from draftline.model.kv_cache import StaticKV
from tests.support.tiny import build_target

CPU = torch.device("cpu")
NEW = torch.arange(12.0).view(1, 2, 3, 2)


def cache() -> StaticKV:
    made = StaticKV(1, 8, CPU)
    made.begin_prefill(3)
    return made


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ((), {}),
        (({"cache_position": None},), {}),  # before transformers 5
        ((), {"cache_kwargs": {"sin": None}}),
        ((), {"kwargs": {"position_ids": None, "use_cache": True}}),  # transformers 5.24
    ],
)
def test_what_releases_send_along_changes_nothing(
    sent: tuple[object, ...], named: dict[str, object]
) -> None:
    keys, values = cache().update(NEW, NEW + 1, 0, *sent, **named)
    torch.testing.assert_close(keys, NEW)
    torch.testing.assert_close(values, NEW + 1)


@pytest.mark.parametrize(
    ("sent", "named", "seen"),
    [((), {"mask": NEW}, "mask"), (({}, 3), {}, "3"), ((), {"kwargs": {}, "evict": 1}, "evict")],
)
def test_what_it_does_not_know_is_refused(
    sent: tuple[object, ...], named: dict[str, object], seen: str
) -> None:
    with pytest.raises(TargetError, match=f"tells its cache {seen}"):
        cache().update(NEW, NEW, 0, *sent, **named)


def test_it_answers_what_masks_are_made_from() -> None:
    made = cache()
    assert (made.get_seq_length(), made.get_query_offset(2), made.get_max_length()) == (0, 0, 8)
    assert made.get_mask_sizes(3, 0) == (3, 0)
    made.begin(torch.tensor([[3]]), 5)
    assert made.get_mask_sizes(1, 0) == (5, 0)


def test_tokens_that_are_tried_share_positions_and_those_that_stand_move_to_theirs() -> None:
    made = cache()
    made.update(NEW, NEW + 1, 0)
    assert made.key_positions.tolist() == [0, 1, 2]
    slots, positions = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, 4, 5]])
    made.begin(slots, 7, positions)
    assert made.key_positions.tolist() == [[0, 1, 2, 3, 4, 4, 5]]
    tried = torch.arange(100.0, 116.0).view(1, 2, 4, 2)
    keys, values = made.update(tried, tried + 1, 0)
    assert torch.equal(keys, torch.cat([NEW, tried], 2))
    assert torch.equal(values, torch.cat([NEW + 1, tried + 1], 2))
    # The second of the siblings stands, and what follows it.
    made.move(torch.tensor([[3, 5, 6]]), torch.tensor([[3, 4, 5]]))
    made.begin(torch.tensor([[6]]), 7)
    assert made.key_positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    keys, values = made.update(tried[:, :, :1], tried[:, :, :1], 0)
    assert torch.equal(keys[:, :, :6], torch.cat([NEW, tried[:, :, [0, 2, 3]]], 2))
    assert torch.equal(values[:, :, :6], torch.cat([NEW + 1, tried[:, :, [0, 2, 3]] + 1], 2))


class Forgetful(StaticKV):
    """Shows a model nothing but the newest keys, as a cache of another meaning would."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *sent: Any, **named: Any) -> Any:
        seen, values = super().update(keys, values, layer_idx, *sent, **named)
        keep = (torch.arange(seen.shape[2]) >= seen.shape[2] - keys.shape[2])[:, None]
        return seen * keep, values * keep


def decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    # What was found out with another cache must not be remembered.
    monkeypatch.setattr("draftline.model.target.fidelity._known", {})
    build_target().check_decodable(16)


def test_a_model_that_computes_something_else_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decodes(monkeypatch)
    monkeypatch.setattr("draftline.model.target.fidelity.StaticKV", Forgetful)
    with pytest.raises(TargetError, match="not evaluated"):
        decodes(monkeypatch)


@pytest.mark.parametrize(
    "fault",
    [AttributeError("'StaticKV' object has no attribute 'evict'"), TypeError("evict= came twice")],
)
def test_a_model_that_asks_a_cache_for_more_is_not_decoded(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(StaticKV, "update", update)
    with pytest.raises(TargetError, match=r"not evaluated here.*evict"):
        decodes(monkeypatch)
