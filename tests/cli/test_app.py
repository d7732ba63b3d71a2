"""The commands as a user types them: output, exit codes, and bad input."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from draftline.cli.app import main
from draftline.train.step.step import TrainStep
from tests.support.runs import before, events

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Exit code, stdout, and log with stderr of `draftline ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftline", *(str(a) for a in arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def talk(number: int, answer: str = "the cat sat on the mat and ran away") -> dict[str, Any]:
    return {
        "id": str(number),
        "messages": [
            {"role": "user", "content": f"what is {number}?"},
            {"role": "assistant", "content": f"{answer} {number}"},
        ],
    }


@pytest.fixture
def config(tmp_path: Path, target_dir: Callable[[str], Path]) -> Path:
    (tmp_path / "talks.jsonl").write_text(
        "".join(json.dumps(talk(n)) + "\n" for n in range(8)), encoding="utf-8"
    )
    tree = {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "target": {"path": str(target_dir("llama")), "tap_layers": [1, 2]},
        "drafter": {"layers": 1},
        "block_size": 4,
        "token_budget": 160,
        "max_batch_size": 4,
        "max_anchors": 8,
        "data": {"train": [str(tmp_path / "talks.jsonl")], "max_length": 128},
        "train": {"steps": 3, "trackers": []},
        "evaluate": {
            "prompts": {"talks": str(tmp_path / "talks.jsonl")},
            "max_new_tokens": 6,
            "limit": 2,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_train_evaluate_and_export(run: Run, config: Path, tmp_path: Path) -> None:
    code, out, err = run("train", config, "train.steps=4")
    assert code == 0, err
    assert "trained to step 4, " in out
    assert "left out" not in err
    result = tmp_path / "scores.json"
    code, out, err = run("eval", tmp_path / "run", "--out", result)
    assert code == 0, err
    assert "accept_length" in out
    assert "talks T=0: slots accepted " in out
    assert "talks T=0: rounds by tokens committed 1:" in out
    score = json.loads(result.read_text())["scores"][0]
    assert score["identical"] == score["compared"] == 2
    assert score["accept_length"] == score["committed"] / score["rounds"]
    code, out, err = run("export", tmp_path / "run", tmp_path / "out", "--dtype", "float32")
    assert code == 0, err
    assert "target.weights: not compared" in err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert f'"model": "{tmp_path / "out"}", "num_speculative_tokens": 3' in out
    assert "--speculative-num-draft-tokens 4" in out
    assert "at most 256 positions" in out
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 2
    err = run("export", tmp_path / "run", tmp_path / "new", "--engine", "vlm")[2]
    assert "--engine=vlm is not one of auto, vllm, sglang, dflash" in err
    assert not (tmp_path / "new").exists()


def test_every_command_takes_a_drafter_from_wherever_it_lies(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("train", config, "drafter.vocab_size=20")[0] == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    # What only a resume needs is not read.
    (checkpoint / "optimizer.safetensors").write_bytes(b"cut")
    target = yaml.safe_load(config.read_text())["target"]["path"]
    there = (f"target.path={target}", "run.device=cpu", "evaluate.max_new_tokens=6")
    prompts = (f"evaluate.prompts.talks={tmp_path / 'talks.jsonl'}", "evaluate.limit=2")
    scores, exports = [], []
    with monkeypatch.context() as patch:
        # An export needs shapes and some rows of the head: a target of 8B would be 32 GiB.
        patch.setattr("draftline.model.target.target.load_weights", None)
        for number, drafter in enumerate((tmp_path / "run", checkpoint, tmp_path / "out-0")):
            out = tmp_path / f"out-{number}"
            given = there[:1] if number == 2 else ()
            code, said, err = run("export", drafter, out, *given, "--dtype", "float32")
            assert code == 0, err
            assert f"exported {'step 3' if number < 2 else drafter} to {out}" in said
            named = {k: t.tolist() for k, t in load_file(out / "model.safetensors").items()}
            exports.append((json.loads((out / "config.json").read_text()), named))
    assert exports[0] == exports[1] == exports[2]
    for drafter in (tmp_path / "run", checkpoint, tmp_path / "out-0"):
        code, _, err = run("eval", drafter, *there, *prompts, "--out", tmp_path / "x.json")
        assert code == 0, err
        found = json.loads((tmp_path / "x.json").read_text())
        assert found["step"] == (None if drafter.name == "out-0" else 3)
        scores.append([found["scores"][0][key] for key in ("committed_counts", "identical")])
    assert scores[0] == scores[1] == scores[2]
    code, _, err = run("eval", tmp_path / "out-0", *prompts)
    assert code == 2
    assert "add target.path=PATH" in err


def test_the_demo_goes_the_way_of_the_commands(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.cli.demo.demo_config", lambda: config)
    code, said, err = run("demo", "--out", tmp_path / "demo")
    assert code == 0, err
    assert "2 of 2 prompts" in said
    assert "serve with vLLM" in err
    assert run("export", tmp_path / "run", tmp_path / "again")[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("demo", "again"))
    assert {k: t.tolist() for k, t in one.items()} == {k: t.tolist() for k, t in two.items()}


def test_rejected_rows_are_counted_and_listed(run: Run, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(
        file.read_text() + "not json\n" + json.dumps({"id": "x", "messages": []}) + "\n"
    )
    code, _, err = run("train", config)
    assert code == 0, err
    assert "left out 1 not_json, 1 empty_conversation" in err
    listed = [json.loads(x) for x in (tmp_path / "run" / "rejects.jsonl").read_text().splitlines()]
    assert {(x["line"], x["reason"]) for x in listed} == {
        (9, "not_json"),
        (10, "empty_conversation"),
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b'{"id": "1", "messages": [{"role": "user", "content": "\xff\xfe"}]}\n', "UTF-8"),
        (gzip.compress(json.dumps(talk(1)).encode() * 50)[:60], "gzip"),
        (b'{"id": "1", "mess', "cut off"),
        (json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode(), "no_assistant"),
        (json.dumps({"messages": talk(1)["messages"][1:]}).encode(), "no_user"),
        (json.dumps(talk(1, answer="") | {"messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}).encode(),
         "empty_turn"),
        (json.dumps({"messages": [{"role": "user", "content": "hi"},
                                  {"role": "assistant", "content": "a"}]}).encode(),
         "shorter_than_a_block"),
    ],
)  # fmt: skip
def test_a_data_file_with_nothing_usable_is_refused_by_name(
    run: Run, config: Path, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "talks.jsonl").write_bytes(content)
    block = 64 if expected == "shorter_than_a_block" else 4
    code, _, err = run("train", config, f"block_size={block}")
    assert code == 2, err
    assert expected.lower() in err.lower().replace("-", "_") or expected in err


def test_arrays_gzip_and_long_conversations_are_read(
    run: Run, config: Path, tmp_path: Path
) -> None:
    long = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(300)]
    rows = [talk(1), talk(2), {"id": "long", "messages": long}]
    (tmp_path / "talks.jsonl").write_bytes(gzip.compress(json.dumps(rows).encode()))
    code, _, err = run("train", config)
    assert code == 0, err
    assert "3 samples of 3 rows" in err
    assert "1 sample ends early" in err
    assert "answers lie behind data.max_length" in err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.path=/nowhere/model", "/nowhere/model"),
        ("target.tap_layers=[1,5]", "last layer"),
        ("target.tap_layers=[1,50]", "0..4"),
        ("target.tap_layers=null", "too few"),
        ("drafter.mask_token_id=100000", "outside the target's embedding"),
        ("block_size=200", "block_size=200 clashes with data.max_length=128"),
        ("train.stepz=3", "did you mean train.steps"),
        ("run.device=cuda:7", "run.device=cuda:7"),
        ("data.train=[missing.jsonl]", "missing.jsonl"),
        ("data.train=[builtin:nothing]", "builtin:nothing"),
        ("train.steps=", "train.steps or train.epochs"),
    ],
)
def test_bad_settings_are_one_clear_line_and_exit_2(
    run: Run, config: Path, override: str, expected: str
) -> None:
    code, _, err = run("train", config, override)
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last
    assert "Traceback" not in err


def test_a_run_directory_that_cannot_be_made(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run("train", config, f"run.dir={tmp_path}/file/run")
    assert code == 2
    assert "run.dir=PATH" in err


def test_evaluating_nothing_and_exporting_nothing(run: Run, config: Path, tmp_path: Path) -> None:
    assert run("eval", tmp_path / "nowhere")[0] == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("eval", empty)[0] == 2
    err = run("export", empty, tmp_path / "out")[2]
    assert "none of these: a run directory, a checkpoint or an exported drafter" in err
    assert run("train", config)[0] == 0
    code, _, err = run("eval", tmp_path / "run", "evaluate.prompts={}")
    assert code == 2
    assert "evaluate.prompts" in err
    code, _, err = run("eval", tmp_path / "run", "block_size=8")
    assert code == 2
    assert "fixed by the training" in err
    assert run("eval", tmp_path / "run", "--out", tmp_path / "no" / "x.json")[0] == 2
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", tmp_path, "/dev/null", "", config / "x.json"):
        code, _, err = run("eval", tmp_path / "run", "--out", out)
        assert code == 2, err
        assert "talks at temperature" not in err, "nothing was decoded before the refusal"
    assert Path("/dev/null").is_char_device()
    code, _, err = run("export", tmp_path / "run", tmp_path / "out", "--dtype", "int8")
    assert code == 2
    assert "--dtype=int8" in err


def test_config_commands(run: Run, config: Path) -> None:
    code, out, _ = run("config", "show", config, "max_anchors=5")
    assert code == 0
    assert yaml.safe_load(out)["max_anchors"] == 5
    assert "is valid, hash" in run("config", "check", config)[1]
    assert "loss.gamma" in run("config", "schema")[1]
    assert json.loads(run("config", "schema", "--json")[1])["title"] == "Config"
    assert run("config", "check", "nowhere.yaml")[0] == 2


def test_check_and_plan_name_every_missing_file(run: Run, config: Path) -> None:
    wrong = [
        "target.path=/no/model",
        "data.train=[/no/a]",
        "data.heldout=[/no/h]",
        "evaluate.prompts.x=/no/x",
    ]
    for command in (["config", "check"], ["plan"]):
        code, out, err = run(*command, config, *wrong)
        assert (code, out) == (2, "")
        assert all(name in err for name in ("/no/model", "/no/a", "/no/h", "/no/x"))


def test_a_tilde_in_an_option_is_the_home_directory(
    run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells expand it at the beginning of a word, not behind --out=."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("config", "check", "~/config.yaml", "run.dir=~/run")[0] == 0
    assert run("train", "~/config.yaml", "train.steps=1", "run.dir=~/other")[0] == 0
    code, _, err = run("eval", "~/other", "--out=~/scores.json", "evaluate.max_new_tokens=2")
    assert code == 0, err
    assert (tmp_path / "scores.json").is_file()
    code, _, err = run("export", "~/other", "~/exported")
    assert code == 0, err
    assert (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.parametrize("command", ["train", "plan", "eval", "export", "bench step", "demo"])
def test_a_command_speaks_before_it_loads_anything_large(command: str, config: Path) -> None:
    """In a process of its own, in which torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['draftline', *{[*command.split(), str(config)]!r}]\n"
        "from draftline.cli.app import main\nmain()"
    )
    if command == "export":
        code = code.replace("]\nfrom", ", 'out']\nfrom")
    if command == "demo":
        code = code.replace(f", {str(config)!r}", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.startswith("loading PyTorch ...\n"), done.stderr


def test_a_librarys_warning_stays_out_of_the_terminal(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that PyTorch's synchronization debug mode is a prototype, in the middle of a table."""
    text = "Synchronization debug mode is a prototype feature"
    monkeypatch.setattr(sys, "warnoptions", [])

    def warn(*_: object) -> None:
        warnings.warn(text, stacklevel=1)
        logging.getLogger("torch._inductor.utils").warning(text)

    before(monkeypatch, TrainStep, "compile", warn)
    monkeypatch.setattr(warnings, "filters", [("always", None, Warning, None, 0)])
    code, _, err = run("train", config)
    assert code == 0, err
    assert text not in err
    assert "libraries warned " in err
    found = events(config.parent / "run")
    assert sum(text in event.get("text", "") for event in found) == 2
    code, _, err = run("bench", "step", config)
    assert code == 0, err
    assert text not in err


def test_commands_and_options_that_do_not_exist_are_corrected(run: Run, config: Path) -> None:
    assert "Did you mean 'train'?" in run("trian", config)[2]
    assert "--resume" in run("train", config, "--resum")[2]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("draftline pl", "plan"),
        ("draftline config ch", "check"),
        ("draftline train --re", "--resume"),
    ],
)
def test_shells_complete_commands_and_options(words: str, offered: str) -> None:
    """As bash asks; nothing heavy is loaded for it."""
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
    code += "sys.argv = ['draftline']\nfrom draftline.cli.app import main\nmain()"
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_DRAFTLINE_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
    )
    assert done.stdout.split() == [offered], done.stderr


def test_plan_times_a_step_when_asked(run: Run, config: Path) -> None:
    code, out, err = run("plan", config, "--time")
    assert code == 0, err
    assert "timing one drafter's step on random weights" in err
    assert "plan: timed 3 steps of one drafter on CPU" in out
    assert "plan: duration under a minute (at " in out
    assert "duration unknown" not in out
    code, out, err = run("plan", config, "--time", "--json")
    tree = json.loads(out)
    assert tree["rows_per_s"] > 0
    assert tree["hours"] == pytest.approx(3 * 8 * 4 / tree["rows_per_s"] / 3600)
    for other in (("--rate", "5"), ("--devices", "8xH200")):
        code, _, err = run("plan", config, "--time", *other)
        assert code == 2
        assert f"{other[0]} speaks of another measurement" in err


def test_regenerate(run: Run, tmp_path: Path, target_dir: Callable[[str], Path]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(talk(n)) + "\n" for n in range(3)))
    target = ["--target", target_dir("llama"), "--max-new-tokens", 5]
    code, text, err = run("regenerate", prompts, "--out", out, *target)
    assert code == 0, err
    rows = [json.loads(x) for x in out.read_text().splitlines()]
    assert f"{len(rows)} conversations" in text
    assert all(r["finish_reason"] in ("stop", "length") for r in rows)
    before = out.read_text()
    assert run("regenerate", prompts, "--out", out, *target)[0] == 0
    assert out.read_text() == before
    code, _, err = run("regenerate", out, "--out", out, *target)
    assert code == 2
    assert "one of the files with the prompts" in err
    assert out.read_text() == before


def test_prompts_that_cannot_be_used_are_said(run: Run, config: Path, tmp_path: Path) -> None:
    assert run("train", config)[0] == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(talk(1)) + "\nnot json\n")
    code, _, err = run("eval", tmp_path / "run", f"evaluate.prompts.talks={prompts}")
    assert code == 0, err
    assert "talks: left out 1 prompts: not_json" in err


def test_plan_on_this_machine_and_on_one_that_is_only_thought_of(run: Run, config: Path) -> None:
    code, out, err = run("plan", config, "--rate", "24")
    assert code == 0, err
    assert "placement: 1 target(s) on cpu; 1 drafter(s) on cpu, 1 slot(s) each" in out
    assert "plan: 3 steps" in out
    assert "under a minute (at 24 rows/s per drafter" in out
    eight = ("--devices", "8x141", "run.device=auto")
    code, out, err = run("plan", config, *eight, "topology.drafters=[cuda:5,cuda:6,cuda:7]")
    assert code == 0, err
    assert "5 target(s) on cuda:0, cuda:1, cuda:2, cuda:3, cuda:4; 3 drafter(s) on cuda:5" in out
    assert "cuda:0 to 4" in out
    assert "cuda:5 to 7" in out
    assert "141.00" in out
    assert "duration unknown here; draftline plan --time" in out
    code, out, err = run("plan", config, "--devices", "8xH200", "run.device=auto", "--json")
    assert code == 0, err
    tree = json.loads(out)
    placed = tree["placement"]
    assert len(placed["targets"]) + len(placed["drafters"]) <= 8
    assert tree["hours"] > 0
    assert "a pack is" in err, "the choice and its numbers are said"


def test_plan_from_a_config_json_alone(run: Run, config: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    target = Path(yaml.safe_load(config.read_text())["target"]["path"])
    (bare / "config.json").write_bytes((target / "config.json").read_bytes())
    code, out, err = run("plan", config, f"target.path={bare}")
    assert code == 0, err
    assert "samples of 8 rows, about " in out
    assert "lengths are guessed" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--devices", "2x0.0001"], "free; its largest part is"),
        (["--devices", "2x0.0001"], "would lower it most"),
        (["--devices", "2x80", "topology.targets=[cuda:2]"], "cuda:1 GPU of 80 GiB"),
        (["--devices", "2x80", "topology.drafters=[cpu,cuda:0]"], "mix cpu and cuda"),
        (["--devices", "eight"], "--devices eight is not COUNTxGIB"),
        (["--devices", "0x0", "run.device=cuda"], "no CUDA device is visible"),
        (
            ["--devices", "3x80", "topology.drafters=[cuda:1,cuda:2]", "train.packs_per_step=3"],
            "train.packs_per_step=3 is no multiple of the 2 drafters",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    run: Run, config: Path, arguments: list[str], expected: str
) -> None:
    code, out, err = run("plan", config, "run.device=auto", *arguments)
    assert code == 2, out + err
    assert expected in err
    assert out == ""


@pytest.mark.parametrize("command", [("config", "check"), ("plan",), ("train",)])
def test_an_interrupt_is_said(
    run: Run, config: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftline.config.load.load_config", interrupt)
    assert run(*command, config) == (130, "", "interrupted\n")
