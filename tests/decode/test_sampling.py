"""Temperatures, ranges, and what a target's own generation_config.json asks for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftline.decode.sampling import Sampling, target_sampling
from draftline.errors import ConfigError, TargetError


def test_temperatures_are_evenly_spread_and_stay_with_the_conversation() -> None:
    sampling = Sampling((0.0, 0.7, 1.0), seed=4)
    ids = [f"row-{i}" for i in range(3000)]
    given = {name: sampling.temperature_of(name) for name in ids}
    counts = Counter(given.values())
    assert all(900 < counts[t] < 1100 for t in sampling.temperatures)
    assert all(Sampling((0.0, 0.7, 1.0), seed=4).temperature_of(n) == given[n] for n in ids[::9])
    other = Sampling((0.0, 0.7, 1.0), seed=5)
    assert 0.2 < sum(other.temperature_of(n) == given[n] for n in ids) / 3000 < 0.45


def test_noise_belongs_to_a_turn_of_a_batch() -> None:
    sampling = Sampling(seed=1)
    seeds = {
        sampling.noise_of(0, ["a", "b"]),
        sampling.noise_of(1, ["a", "b"]),
        sampling.noise_of(0, ["a"]),
        sampling.noise_of(0, ["b", "a"]),
        Sampling(seed=2).noise_of(0, ["a", "b"]),
    }
    assert len(seeds) == 5
    assert sampling.noise_of(0, iter(["a", "b"])) == sampling.noise_of(0, ["a", "b"])
    assert all(0 <= seed < 2**63 for seed in seeds), "a seed of a generator"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperatures": (-0.1,)}, "temperature -0.1"),
        ({"temperatures": (0.0, float("nan"))}, "temperature 0.0, nan"),
        ({"temperatures": (float("inf"),)}, "temperature inf"),
        ({"temperatures": ()}, "temperature nothing"),
        ({"top_p": 0.0}, "top-p 0.0 is a share"),
        ({"top_p": 1.1}, "top-p 1.1"),
        ({"top_p": float("nan")}, "top-p nan"),
        ({"top_k": 0}, "top-k 0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Sampling(**values)


def target(directory: Path, config: dict[str, Any] | None) -> str:
    (directory / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (directory / "generation_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (  # Qwen3 8B
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            Sampling((0.6,), 0.95, 20, 7),
        ),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling((0.6,), 0.9, None, 7)),
        ({"do_sample": True}, Sampling((1.0,), None, None, 7)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, Sampling((1.0,), 0.95, 64, 7)),  # Gemma 3
        ({"do_sample": False, "eos_token_id": 1}, Sampling((0.0,), None, None, 7)),
        ({"do_sample": True, "temperature": 1.0, "top_k": 0}, Sampling((1.0,), None, None, 7)),
    ],
)
def test_the_targets_own_sampling_is_read(
    tmp_path: Path, config: dict[str, Any], wanted: Sampling
) -> None:
    assert target_sampling(target(tmp_path, config), 7) == wanted


def test_a_target_that_asks_for_nothing_is_said(tmp_path: Path) -> None:
    path = target(tmp_path, None)
    with pytest.raises(TargetError, match=r"generation_config.json cannot be read"):
        target_sampling(path, 0)
    target(tmp_path, {"eos_token_id": 2})
    with pytest.raises(TargetError, match="names no temperature, top_p or top_k"):
        target_sampling(path, 0)


def test_what_is_not_followed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"temperature": 0.7, "do_sample": True, "repetition_penalty": 1.05, "min_p": 0.0}
    target_sampling(target(tmp_path, config), 0)
    assert "repetition_penalty=1.05: not followed" in caplog.text
    assert "min_p" not in caplog.text
