"""The configuration: strict keys, named clashes, overrides, and what is written back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from draftline.config.faults import known_keys, nearest_keys, needs
from draftline.config.load import build_config, changed_keys, describe_keys, load_config
from draftline.config.schema import Config
from draftline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
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
        ("trian.steps", "train.steps"),
        ("trian", "train"),
        ("max_anchor", "max_anchors"),
        # The right name in the wrong section.
        ("train.max_length", "data.max_length"),
        ("block_sise", "block_size"),
        ("drafter.block_size", "block_size"),
        ("learning_rate", "train.learning_rate"),
        ("loss.softlabels", "loss.soft_labels"),
        # What a key is called elsewhere.
        ("train.lr", "train.learning_rate"),
        ("lr", "train.learning_rate"),
        ("optimizer.lr", "train.learning_rate"),
        ("train.optimizer.lr", "train.learning_rate"),
        ("train.warmup", "train.warmup_ratio"),
        ("train.wd", "train.weight_decay"),
        ("train.epoch", "train.epochs"),
        ("train.batch_size", "token_budget or max_batch_size or train.packs_per_step"),
        ("batch_size", "token_budget or max_batch_size or train.packs_per_step"),
        ("output_dir", "run.dir"),
        ("train.output-dir", "run.dir"),
        ("model", "target.path"),
        ("train.seed", "run.seed"),
        ("data.seed", "run.seed"),
        ("drafter.num_layers", "drafter.layers"),
        ("data.max_len", "data.max_length"),
        ("blocksize", "block_size"),
        ("evaluate.temp", "evaluate.temperatures"),
        ("data.path", "data.train"),
        ("data.files", "data.train"),
        ("data.val", "data.heldout"),
        ("data.eval", "data.heldout"),
        ("train.eval_steps", "train.eval_every"),
        ("train.save_interval", "train.checkpoint_every"),
        ("features.cache", "features.source"),
        ("features.path", "features.dir"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(mistyped: str, meant: str) -> None:
    assert f"unknown key {mistyped}; did you mean {meant}?" in refuse(f"{mistyped}=1")


def test_every_right_key_is_its_own_nearest_with_a_slip() -> None:
    """One letter left out inside, or the section forgotten."""
    leaves = [k.name for k in describe_keys()]
    for key in leaves:
        name = key.rpartition(".")[2]
        if len(name) > 3:
            cut = key[: -len(name)] + name[:2] + name[3:]
            assert key in nearest_keys(cut), cut
        if "." in key and name not in ("batch_size", "train"):
            assert key in nearest_keys(name), name


def test_an_option_that_stands_among_the_keys_is_named() -> None:
    assert "unknown key run.resume; it is an option of the command" in refuse("run.resume=true")


def test_a_key_like_no_other_points_to_the_schema() -> None:
    assert "unknown key zzz; see `draftline config schema`" in refuse("zzz=1")


def test_every_wrong_key_is_named_at_once() -> None:
    message = refuse("drafter.layer=1", "train.stepz=2", "block_size=one")
    assert "drafter.layer;" in message
    assert "train.stepz;" in message
    assert "block_size='one'" in message


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("target", "target.path is missing and has no default"),
        ("data", "data.train is missing and has no default"),
        ("train", "train is missing: train.steps or train.epochs is needed"),
    ],
)
def test_a_missing_required_section_is_named(lost: str, said: str) -> None:
    tree = {key: value for key, value in LEAST.items() if key != lost}
    assert said in refuse(tree=tree)


# Words that belong to the program, not to its user.
INTERNAL = re.compile(
    r"Section|Input|should|valid|literal|pydantic|None|NoneType|dict|instance|parse|<class|str\b|"
    r"extra|Error|\bint\b|\bfloat\b|tuple|[a-z]+_type"
)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train=5", "train is a section and cannot be 5: give its keys, such as train.steps"),
        ("train=[]", "train is a section and cannot be []"),
        ("run=x", "run is a section and cannot be 'x': give its keys, such as run.dir, or leave"),
        ("drafter=", "drafter is empty: give its keys, such as drafter.layers, or leave it out"),
        ("data.train=[]", "data.train=[]: needs a list of texts, at least 1 of them"),
        ("data.train=[1]", "data.train=1 (entry 1): needs a list of texts"),
        ("evaluate.prompts=[]", "evaluate.prompts=[]: needs names with texts"),
        ("evaluate.prompts={a: 3}", "evaluate.prompts.a=3: needs text"),
        ("topology.targets=3", "topology.targets=3: needs auto or a list of texts"),
        (
            "topology.slots=0",
            "topology.slots=0: needs a whole number, at least 1, at most 4096, or null",
        ),
        ("run.device=tpu", "run.device='tpu': needs auto, cpu, cuda or cuda:0"),
        ("run.strict_choices=3", "run.strict_choices=3: needs true or false"),
        ("target.dtype=half", "target.dtype='half': needs one of auto, float32, bfloat16"),
        (
            "train.clip=no",
            "train.clip=false: needs a finite number, above 0, at most 1e+30, or null; yes, no",
        ),
        ("train.warmup_ratio=2", "train.warmup_ratio=2: needs a finite number, at least 0"),
        ("train.betas=[0.9]", "train.betas=[0.9]: needs a list of 2 finite numbers"),
        ("block_size=", "block_size=null: needs a whole number, at least 2"),
    ],
)
def test_a_fault_is_said_in_plain_words(override: str, said: str) -> None:
    message = refuse(override)
    assert said in message
    assert not INTERNAL.search(message)


def test_every_key_says_what_it_needs_in_plain_words() -> None:
    for section in Config.model_fields.values():
        fields = getattr(section.annotation, "model_fields", {"": section})
        for field in fields.values():
            assert not re.search(r"another value|other values|Optional|\[", needs(field))


# Paths


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.dir='~/x'", "run.dir"),
        ("target.path=~/x", "target.path"),
        ("data.train=['~/x']", "data.train"),
        ("evaluate.prompts.a=~/x", "evaluate.prompts.a"),
        ("features={source: disk, dir: ~/x}", "features.dir"),
    ],
)
def test_a_tilde_is_the_home_directory(
    override: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    value: Any = build_config(LEAST, [override]).model_dump()
    for part in key.split("."):
        value = value[part]
    assert value in ("/home/somebody/x", ["/home/somebody/x"])


@pytest.mark.parametrize(
    "override",
    ["run.dir=''", "run.dir='  '", "target.path=''", "data.train=['']", "evaluate.prompts.a=' '"],
)
def test_an_empty_path_is_refused(override: str) -> None:
    message = refuse(override)
    assert override.partition("=")[0].removesuffix(".a") in message
    assert "needs a path of more than blanks" in message


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
    words = {True: "true", False: "false"} if isinstance(value, bool) else {None: "null"}
    assert any(
        words.get(v, repr(v)) in message for v in (shown, value) if not isinstance(v, list)
    ) or (repr(value) in message)


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
        ("block_size.x=1", "block_size is 16 here, not a section"),
        ("target.path.x=1", "path is 'some/model' here, not a section"),
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
        ("[]", "holds a list, not keys with their values"),
        ("3", "holds only '3', not keys"),
        ("- a\n- b\n", "holds a list, not keys"),
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
    with pytest.raises(ConfigError, match=r"gone.yaml does not exist; README.md has one"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=rf"{tmp_path} cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: {dir: \xe9}")
    with pytest.raises(ConfigError, match=r"latin.yaml cannot be read"):
        load_config(tmp_path / "latin.yaml")


def bomb(levels: int) -> str:
    """A few lines that stand for ten to the power of `levels` values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    return "\n".join(lines)


# PyYAML's own words where its C part sees it first.
DEEP = "nested more than 32 levels|exceeded maximum nesting depth"
HOSTILE = [
    (bomb(9), "line 5: more than 20000 values"),
    ("a: &a {b: &b {c: 1}}\nd: &d {<<: [" + "*a, " * 200 + "]}\n" + bomb(12), "more than 20000"),
    ("a: &a [*a]", r"line 1: \*a stands inside"),
    ("a: 1\nb: &b\n  c: {d: *b}", r"line 3: \*b stands inside"),
    ("a: &a\n  <<: *a", "stands inside"),
    ("a: " + "[" * 200_000, DEEP),
    ("a: " + "{b: " * 5000, "line 1: nested more than 32 levels"),
    ("".join(f"{' ' * n}a:\n" for n in range(600)), "line 33: nested more than 32 levels"),
    ("- " * 5000, "nested more than 32 levels"),
    (
        "a: &a [[[[[[[[[[x]]]]]]]]]]\nb: &b [[[[[[[[[[*a]]]]]]]]]]\nc: &c [[[[[[[[[[*b]]]]]]]]]]\n"
        "d: [[[[[[[[[*c]]]]]]]]]",
        "line 4: nested more than 32 levels",
    ),
    ("train: {steps: " + "9" * 5000 + "}", r"line 1: 9{40}\.\.\. has 5000 digits"),
    ("\ntrain: {steps: 0x" + "f" * 90_000 + "}", r"line 2: 0xf+\.\.\. has 90002 digits"),
    ("train: {steps: 1" + ":59" * 9000 + "}", r"line 1: .* has 27001 digits"),
    ("train: {steps: 1" + "_0" * 9000 + "}", r"line 1: .* has 18001 digits"),
    ("train: {clip: 1.0e+999}", r"line 1: 1.0e\+999 is not a finite number"),
    ("data: {template: {temperature: .nan}}", "line 1: .nan is not a finite number"),
    ("data:\n  template: [-.inf]", "line 2: -.inf is not a finite number"),
    ("1: 2", "line 1: the key 1 is read as int"),
    ("data: {template: {yes: 2}}", "line 1: the key yes is read as bool"),
    ("~: 2", "line 1: the key ~ is read as null"),
    ("2024-01-01: 2", "line 1: the key 2024-01-01 is read as timestamp"),
    ("a: {<<: {1: 2}}", "line 1: the key 1 is read as int"),
    ("a: !!binary aGVsbG8=", "line 1: !!binary is no kind of value"),
    ("a: !!set {x, y}", "line 1: !!set is no kind of value"),
    ("a: !!omap [x: 1]", "line 1: !!omap is no kind of value"),
    ("a: !!int x", "line 1: 'x' is no int"),
    ("a: !!float x", "line 1: 'x' is no float"),
    ("a: !!bool x", "line 1: 'x' is no bool"),
    ("a: !!int [1]", "line 1: a list or mapping is no int"),
    ("a: !!timestamp {}", "line 1: a list or mapping is no timestamp"),
    ("a: !!python/name:os.system", "is not YAML"),
    ("a: !!str {}", "line 1: a list or mapping is no str"),
    ('run:\n  dir: "a\\0b"', "line 2: text with a NUL character"),
    ("a: b\n---\na: c", "is not YAML"),
    ("a:\n\tb: 1", "is not YAML"),
    ("a: *nowhere", "is not YAML"),
    ("a: \x00", "is not YAML"),
    ("a: 'b", "is not YAML"),
    ("just words", "holds only '.*', not keys"),
    ("42", "holds only '42', not keys"),
    ("2024-01-01", "holds only '.*', not keys"),
    ("a: " + "x" * (1 << 18), "larger than 256 KiB"),
]


@pytest.mark.parametrize(("text", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_yaml_is_refused_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    message = refuse_text(tmp_path, text)
    assert re.search(reason, message)
    assert str(tmp_path / "run.yaml") in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("&a [*a]", r"line 1: \*a stands inside"),
        ("[" * 100_000, DEEP),
        ("9" * 5000, "has 5000 digits"),
        ("{a: 1, a: 2}", "'a' stands twice"),
        ("{1: 2}", "the key 1 is read as int"),
        ("!!binary aGVsbG8=", "!!binary is no kind"),
        (".inf", "not a finite number"),
        ("\x00", "the value is not YAML"),
        ("x" * (1 << 19), "is no value of a key"),
    ],
)
@pytest.mark.parametrize("key", ["data.template.x", "train.steps", "run.dir"])
def test_hostile_overrides_are_refused_by_key(key: str, value: str, reason: str) -> None:
    message = refuse(f"{key}={value}")
    assert f"override '{key}=" in message
    assert re.search(reason, message)
    assert len(message) < 1000


def numbers(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key that takes a count or another whole number."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numbers(kind, f"{prefix}{name}.")
        elif kind in (int, int | None):
            yield prefix + name


@pytest.mark.parametrize("key", [*numbers(), "train.epochs", "topology.deadline_s", "loss.gamma"])
@pytest.mark.parametrize("value", [2**63, 2**70, 10**30, -1, "1e300", "-1e300"])
def test_no_number_is_too_large_for_where_it_goes(key: str, value: object) -> None:
    """torch and numpy take 64 bits, kernels 32, and a checkpoint's name eight digits."""
    tree = LEAST if key != "train.epochs" else {**LEAST, "train": {}}
    message = refuse(f"{key}={value}", tree=tree)
    assert f"{key}=" in message


def test_the_largest_seed_is_a_seed() -> None:
    seed = 2**63 - 1
    assert build_config(LEAST, [f"run.seed={seed}"]).run.seed == seed


@pytest.mark.parametrize("device", ["cuda:1000", "cuda:99999999999999999999"])
def test_no_machine_has_so_many_devices(device: str) -> None:
    assert "run.device=" in refuse(f"run.device={device}")
    assert "topology.targets=" in refuse(f"topology.targets=[{device}]")


@pytest.mark.parametrize("betas", ["[1.0, 0.9]", "[0.9, 2]", "[-0.1, 0.9]"])
def test_betas_that_average_nothing_are_refused(betas: str) -> None:
    assert "each is at least 0 and under 1" in refuse(f"train.betas={betas}")


def test_many_faults_are_said_in_few_lines() -> None:
    message = refuse(tree=LEAST | {f"key{n}": n for n in range(5000)})
    assert message.count("unknown key") == 20
    assert "and 4980 more" in message
    assert len(refuse("run.device='" + "x" * 100_000 + "'")) < 1000


def test_a_key_of_too_many_sections_is_refused() -> None:
    assert "no key lies in 5000 sections" in refuse("run." + "a." * 4999 + "b=1")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("train: {steps: 1}".encode("utf-16"), "UTF-16"),
        ("train: {steps: 1}".encode("utf-16-be"), "is not YAML"),
        (b"a: 1\nb: 2\nc: \xff\xfe", "line 3 is not UTF-8 .byte 0xff."),
        (bytes(range(256)), "line 2 is not UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00", "is not YAML"),
        (b"\x1f\x8b\x08\x00", "line 1 is not UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / "run.yaml")


def test_ordinary_anchors_and_dates_are_read(tmp_path: Path) -> None:
    text = yaml.safe_dump(LEAST | {"run": {"dir": "runs/x"}})
    text += "evaluate:\n  prompts: &p {a: a.jsonl, b: 2024-05-01}\nfeatures: {}\n"
    config = load(tmp_path, text.replace("runs/x", "2024-01-01"))
    assert config.run.dir == "2024-01-01"
    assert config.evaluate.prompts == {"a": "a.jsonl", "b": "2024-05-01"}
    shared = "data: {train: &files [a.jsonl, b.jsonl], template: {files: *files}}\n"
    rest = yaml.safe_dump({k: v for k, v in LEAST.items() if k != "data"})
    config = load(tmp_path, shared + rest)
    assert config.data.template == {"files": config.data.train}


@pytest.mark.parametrize("tree", [{"run": 10**5000}, {"run": {(1, 2): 3}}])
def test_a_tree_of_no_plain_values_is_refused(tree: dict[str, Any]) -> None:
    assert "no plain values" in refuse(tree=tree)
    around: dict[str, Any] = {}
    around["run"] = around
    assert "no plain values" in refuse(tree=around)


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
    assert by_name["drafter.num_heads"].type == "integer | null"
    assert by_name["drafter.init"].type == "scratch | target"
    assert by_name["topology.targets"].type == "auto | [text, ...]"
    assert by_name["signal.on_volatile"].type == "stop | warn | null"
    assert by_name["target.batches"].type == "[[integer, integer], ...] | null"
    assert by_name["train.clip"].default == "1.0"
    assert by_name["run.strict_choices"].default == "false"
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
        ("topology.deadline_s=0.001", "needs a finite number, at least 1"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run:\n\tdir: x\n", "line 2 is indented with a tab; use spaces"),
        ("run:\n  dir: x\n\ttrain: y\n", "line 3 is indented with a tab; use spaces"),
        (
            '{"messages": []}\n{"messages": []}\n',
            "it looks like JSONL; name a data file in data.train",
        ),
    ],
)
def test_usual_slips_in_yaml_are_said_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_one_file_where_a_list_is_needed_is_shown_as_a_list() -> None:
    with pytest.raises(ConfigError, match=re.escape("data.train=['answers.jsonl']")):
        build_config({"train": {"steps": 1}}, ["data.train=answers.jsonl"])
