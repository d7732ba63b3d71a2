"""The tap rule against z-lab's released numbers, and the refusals around it."""

from __future__ import annotations

import pytest

from draftline.errors import TargetError
from draftline.model.target.taps import check_taps, choose_taps


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (28, 5, (1, 7, 13, 19, 25)),
        (28, 3, (1, 13, 25)),
        (32, 8, (1, 5, 9, 13, 17, 21, 25, 29)),
        (36, 1, (18,)),
        (29, 1, (14,)),
        # 7.5 and 20.5 both go to the even neighbour.
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 2, (1, 33)),
    ],
)
def test_the_rule_of_z_lab(layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert choose_taps(layers, count) == ids


def test_whatever_the_rule_chooses_can_be_read() -> None:
    chosen = 0
    for layers in range(1, 70):
        for count in range(1, 12):
            try:
                ids = choose_taps(layers, count)
            except TargetError:
                continue
            assert check_taps(ids, layers) == ids
            assert len(ids) == count
            chosen += 1
    assert chosen > 500


@pytest.mark.parametrize(("layers", "count"), [(6, 5), (3, 2), (4, 2), (2, 1), (1, 1)])
def test_too_few_layers_name_both_numbers_and_the_keys(layers: int, count: int) -> None:
    with pytest.raises(TargetError) as caught:
        choose_taps(layers, count)
    message = str(caught.value)
    assert f"{layers} layers, too few for {count}" in message
    assert "target.num_taps" in message
    assert "target.tap_layers" in message
    if layers > 3:
        most = int(message.partition("num_taps is at most ")[2].split()[0].rstrip(","))
        assert len(choose_taps(layers, most)) == most
        with pytest.raises(TargetError):
            choose_taps(layers, most + 1)


def test_explicit_taps_are_kept() -> None:
    assert check_taps([0, 3, 6], 8) == (0, 3, 6)


@pytest.mark.parametrize(
    ("taps", "reason"),
    [
        ([], "is empty"),
        ([3, 1], "ascending"),
        ([1, 1], "distinct"),
        ([-1, 2], "0..6"),
        ([1, 8], "has 8 layers"),
        ([1, 7], "last layer, 7: .* after the final norm .* use ids up to 6"),
    ],
)
def test_taps_that_cannot_be_read_are_refused_with_the_reason(taps: list[int], reason: str) -> None:
    with pytest.raises(TargetError, match=rf"target.tap_layers.*{reason}"):
        check_taps(taps, 8)
