"""The configuration: strict keys, named clashes, overrides, and what is written back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftline.config import Config
from draftline.config_file import build_config, changed_keys, describe_keys, known_keys, load_config
from draftline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted([*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("draftline/**/*.yaml")])
LEAST: dict[str, Any] = {
    "target": {"path": "some/model"},
    "data": {"train": ["talks.jsonl"]},
    "train": {"steps": 10},
}


def refuse(*overrides: str, tree: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(tree or LEAST, overrides)
    return str(caught.value)


def load(directory: Path, text: str, *overrides: str) -> Config:
    (directory / "run.yaml").write_text(text, encoding="utf-8")
    return load_config(directory / "run.yaml", overrides)


def refuse_text(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    return str(caught.value)


# Keys


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("drafter.layer", "drafter.layers"),
        ("train.learning_rte", "train.learning_rate"),
        ("trian.steps", "train"),
        ("max_anchor", "max_anchors"),
        # The right name in the wrong section.
        ("train.max_length", "data.max_length"),
        ("block_sise", "block_size"),
        ("drafter.block_size", "block_size"),
        ("learning_rate", "train.learning_rate"),
        ("loss.softlabels", "loss.soft_labels"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(mistyped: str, meant: str) -> None:
    message = refuse(f"{mistyped}=1")
    top = mistyped.split(".", maxsplit=1)[0]
    shown = mistyped if top in Config.model_fields else top
    assert f"unknown key {shown}; did you mean {meant}?" in message


def test_a_key_like_no_other_points_to_the_schema() -> None:
    assert "unknown key zzz; see `draftline config schema`" in refuse("zzz=1")


def test_every_wrong_key_is_named_at_once() -> None:
    message = refuse("drafter.layer=1", "train.stepz=2", "block_size=one")
    assert "drafter.layer;" in message
    assert "train.stepz;" in message
    assert "block_size='one'" in message


@pytest.mark.parametrize("lost", ["target", "data", "train"])
def test_a_missing_required_section_is_named(lost: str) -> None:
    tree = {key: value for key, value in LEAST.items() if key != lost}
    assert f"{lost} is missing and has no default" in refuse(tree=tree)


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=ten",
        "train.steps=1.5",
        "train.steps=0",
        "train.steps=[1]",
        "train.learning_rate=fast",
        "train.learning_rate=-1",
        "train.warmup_ratio=1",
        "run.dir=5",
        "run.device=tpu",
        "run.device=cuda:x",
        "run.strict_choices=maybe",
        "target.dtype=float16",
        "target.tap_layers=3",
        "drafter.init=random",
        "drafter=5",
        "data.train=talks.jsonl",
        "data.train=[]",
        "train.trackers=[mlflow]",
        "train.betas=0.9",
        "evaluate.prompts=[a]",
        "loss.kind=null",
        # A flag is not a number, though Python counts with it.
        "loss.soft_labels=yes",
        "train.steps=true",
        "features.noise=on",
        "drafter.sliding_layers=off",
        "train.clip=false",
        # Nor is there a number that is not finite.
        "train.learning_rate=.inf",
        "train.learning_rate=.nan",
        "features.noise=.nan",
        "evaluate.temperatures=[.nan]",
    ],
)
def test_a_wrong_type_or_range_names_the_key_and_the_value(override: str) -> None:
    key, _, text = override.partition("=")
    message = refuse(override)
    assert key in message
    value = yaml.safe_load(text)
    shown = value[0] if isinstance(value, list) and value else value
    assert repr(shown) in message or repr(value) in message


def test_a_tuple_that_is_too_short_names_the_place() -> None:
    assert "train.betas.1 is missing" in refuse("train.betas=[0.9]")


def test_what_yaml_reads_as_text_may_still_be_a_number() -> None:
    """YAML 1.1 takes 6e-4 for a string."""
    assert build_config(LEAST, ["train.learning_rate=6e-4"]).train.learning_rate == 6e-4
    assert build_config(LEAST, ["run.strict_choices=yes"]).run.strict_choices is True


# Clashes


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["drafter.sliding_layers=6", "drafter.sliding_window=8"],
            ["drafter.sliding_layers=6", "drafter.layers=5"],
        ),
        (
            ["drafter.sliding_layers=2"],
            ["drafter.sliding_layers=2", "drafter.sliding_window=None"],
        ),
        (["drafter.sliding_window=8"], ["drafter.sliding_layers=0", "drafter.sliding_window=8"]),
        (
            ["drafter.num_heads=6", "drafter.num_kv_heads=4"],
            ["drafter.num_heads=6", "drafter.num_kv_heads=4"],
        ),
        (["drafter.head_dim=7"], ["drafter.head_dim=7"]),
        (["loss.kind=dpace", "loss.gamma=3"], ["loss.kind=dpace", "loss.gamma=3"]),
        (["features.dir=cache"], ["features.dir=cache", "features.source=online"]),
        (["train.epochs=2"], ["train.steps=10", "train.epochs=2"]),
        (["train.steps=null"], ["train.steps", "train.epochs"]),
        (["token_budget=1000"], ["data.max_length=2048", "token_budget=1000"]),
        (["data.max_length=8"], ["block_size=16", "data.max_length=8"]),
        (["max_anchors=9000"], ["max_anchors=9000", "token_budget=8192"]),
        (["evaluate.temperatures=[0, -0.5]"], ["evaluate.temperatures=[-0.5]"]),
    ],
)
def test_clashing_keys_are_both_named_with_their_values(
    overrides: list[str], keys: list[str]
) -> None:
    message = refuse(*overrides)
    assert [key for key in keys if key not in message] == []


# Overrides


def test_overrides_reach_into_sections_and_dictionaries() -> None:
    config = build_config(
        LEAST,
        [
            "run.seed=7",
            "drafter.num_heads=8",
            "block_size=8",
            "data.train=[a.jsonl, b.jsonl]",
            "data.template.enable_thinking=false",
            "evaluate.prompts.math=math.jsonl",
            "train.steps=null",
            "train.epochs=1.5",
            "run.dir=a=b",
            "train.betas=[0.8, 0.9]",
        ],
    )
    assert config.run.seed == 7
    assert config.drafter.num_heads == 8
    assert config.block_size == 8
    assert config.data.train == ["a.jsonl", "b.jsonl"]
    assert config.data.template == {"enable_thinking": False}
    assert config.evaluate.prompts == {"math": "math.jsonl"}
    assert (config.train.steps, config.train.epochs) == (None, 1.5)
    assert config.run.dir == "a=b"
    assert config.train.betas == (0.8, 0.9)


def test_the_last_override_wins_and_the_tree_is_left_alone() -> None:
    assert build_config(LEAST, ["train.steps=3", "train.steps=4"]).train.steps == 4
    assert LEAST["train"] == {"steps": 10}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps", "is not key=value, such as train.steps=200"),
        ("=5", "is not key=value"),
        ("train.steps=[1", "the value is not YAML"),
        ("block_size.x=1", "block_size is a value, not a section"),
        ("target.path.x=1", "path is a value, not a section"),
    ],
)
def test_an_override_that_is_none_is_refused(override: str, reason: str) -> None:
    tree = LEAST | {"block_size": 16}
    message = refuse(override, tree=tree)
    assert repr(override) in message
    assert reason in message


# Files


def test_a_file_with_overrides(tmp_path: Path) -> None:
    text = yaml.safe_dump(LEAST)
    assert load(tmp_path, text, "train.steps=11").train.steps == 11
    assert load(tmp_path, "\ufeff" + text).train.steps == 10


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refuse_text(tmp_path, "train:\n  steps: 1\n  clip: 1.0\n  steps: 2\n")
    assert "line 4" in message
    assert "'steps' stands twice" in message
    assert "'data' stands twice" in refuse_text(tmp_path, "data: {}\ndata: {}\n")


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    text = yaml.safe_dump(LEAST) + "drafter:\n  <<: {layers: 2, head_dim: 8}\n  layers: 3\n"
    config = load(tmp_path, text)
    assert (config.drafter.layers, config.drafter.head_dim) == (3, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "holds list, not a mapping"),
        ("train: [1\n", "is not YAML"),
        ("train: !!python/object:os.system {}\n", "is not YAML"),
        # A template's placeholder that was not filled in.
        ("target:\n  path: {{ model }}\n", "line 2: a key must be a plain word"),
        ("? [a, b]\n: 1\n", "line 1: a key must be a plain word"),
    ],
)
def test_what_is_no_mapping_of_keys_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    assert reason in refuse_text(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.yaml does not exist; see configs/"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=rf"{tmp_path} cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xe9}")
    with pytest.raises(ConfigError, match=r"latin.yaml cannot be read"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_config(path)


# What is written back


def test_the_effective_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = build_config(
        LEAST,
        [
            "run.dir='läufe/ü: #1'",
            "train.learning_rate=1e-5",
            "train.betas=[0.5, 0.75]",
            "target.tap_layers=[1, 2]",
            "data.template={enable_thinking: false, name: null}",
            "evaluate.prompts={math: m.jsonl}",
            "evaluate.temperatures=[0, 0.7]",
            "train.ema=0.999",
        ],
    )
    again = load(tmp_path, config.to_yaml())
    assert again == config
    assert again.run.dir == "läufe/ü: #1"
    assert again.digest() == config.digest()
    assert list(yaml.safe_load(config.to_yaml())) == list(Config.model_fields)


def test_the_hash_is_of_the_effective_values() -> None:
    base = build_config(LEAST).digest()
    assert len(base) == 16
    assert int(base, 16) >= 0
    reordered = {key: LEAST[key] for key in reversed(LEAST)}
    assert build_config(reordered).digest() == base
    assert build_config(LEAST, ["drafter.layers=5", "train.learning_rate=0.0006"]).digest() == base
    seen = {base}
    for change in ("run.seed=1", "drafter.layers=4", "train.clip=null", "data.template.a=1"):
        seen.add(build_config(LEAST, [change]).digest())
    assert len(seen) == 5


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    config = build_config(LEAST)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3  # type: ignore[misc]


def test_changed_keys_are_dotted_with_both_values() -> None:
    old = build_config(LEAST).model_dump(mode="json")
    new = build_config(LEAST, ["train.steps=20", "block_size=8"]).model_dump(mode="json")
    assert changed_keys(old, new) == {"train.steps": (10, 20), "block_size": (16, 8)}
    assert changed_keys(old, old) == {}
    assert changed_keys({"a": {"b": 1}}, {"a": {}, "c": 2}) == {"a.b": (1, None), "c": (None, 2)}


def test_every_key_is_described() -> None:
    known = list(known_keys())
    leaves = [k for k in known if not any(other.startswith(f"{k}.") for other in known)]
    described = list(describe_keys())
    assert [key.name for key in described] == leaves
    assert len(set(known)) == len(known)
    assert [key.name for key in described if not key.meaning.endswith((".", ")"))] == []
    assert {k.name for k in described if k.default == "required"} == {"target.path", "data.train"}
    by_name = {key.name: key for key in described}
    assert by_name["drafter.num_heads"].type == "int | None"
    assert by_name["drafter.init"].type == "Literal['scratch', 'target']"
    assert by_name["evaluate.temperatures"].default == "[0.0]"
    assert by_name["run.seed"].default == "0"


@pytest.mark.parametrize(("block", "gamma"), [(8, 4.0), (16, 7.0), (10, 4.75)])
def test_gamma_follows_the_block_unless_told(block: int, gamma: float) -> None:
    assert build_config(LEAST, [f"block_size={block}"]).gamma == gamma
    assert build_config(LEAST, [f"block_size={block}", "loss.gamma=2"]).gamma == 2.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("topology.targets=cpu", r"topology.targets=cpu: give a list, \[cpu\] for one worker"),
        ("topology.drafters=[]", "topology.drafters=\\[\\]: at least one worker is needed"),
        ("topology.drafters=[cuda:0+cuda:1]", "an entry is cpu or cuda:N"),
        ("topology.target=[cpu]", "unknown key topology.target; did you mean topology.targets"),
        ("target.batches=[128]", r"give a list of \[rows, length\] pairs"),
        ("target.batches=[[3,128,1]]", r"give a list of \[rows, length\] pairs"),
        ("topology.deadline_s=0.001", "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_with_a_topology_is_said_in_its_own_words(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(LEAST, [override])


@pytest.mark.parametrize(
    ("overrides", "anchors"),
    [
        ([], 1360),
        (["token_budget=3072"], 512),
        (["token_budget=49152"], 8160),
        (["block_size=10", "token_budget=16384"], 2688),
        (["block_size=4", "token_budget=160", "data.max_length=128"], 26),
        (["token_budget=3000", "block_size=2000"], 500),
        (["max_anchors=77"], 77),
    ],
)
def test_anchors_are_a_sixth_of_the_budget(overrides: list[str], anchors: int) -> None:
    """512 for 3,072 tokens, in whole mask tiles and equal loss chunks, whatever a pack's size."""
    config = build_config(LEAST, overrides)
    assert config.anchors == anchors
    if config.max_anchors is None and anchors >= 128:
        slots = config.block_size - 1
        chunks = -(-anchors // max(1, config.loss.chunk_rows // slots))
        assert anchors % chunks == 0
        if config.block_size < 1000:
            assert anchors * config.block_size % 128 == 0
