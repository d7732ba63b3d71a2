"""`draftline regenerate` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftline.cli.app import main
from draftline.errors import TargetError
from draftline.model.target.facts import read_facts
from draftline.model.target.target import load_target
from tests.support.fakes import tiny_model, tiny_target_dir, tiny_tokenizer
from tests.support.recordings import read_rows

Run = Callable[..., tuple[int, str, str]]
# Reads an argument, opens thinking in the generation prompt, and drops it from the history.
THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% else %}<|spare|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|spare|>{% if enable_thinking is false %}no think"
    "{% else %}think\n{% endif %}{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Exit code, stdout, and log with stderr of `draftline regenerate ARGUMENTS`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        words = ["draftline", "regenerate", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    talks = [
        {"id": str(i), "messages": [{"role": "user", "content": f"say it {i}"}]} for i in range(6)
    ]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_dir(tmp_path_factory.mktemp("thinker") / "target", template=THINKS)


def test_answers_are_written_and_a_second_call_keeps_them(
    run: Run, prompts: Path, tmp_path: Path, target_dir: Callable[[str], Path]
) -> None:
    out = tmp_path / "answers.jsonl"
    call = [prompts, "--out", out, "--target", target_dir("llama"), "--max-new-tokens", 5]
    code, text, err = run(*call)
    assert code == 0, err
    assert f"{out}: {len(read_rows(out))} conversations, " in text
    assert f"reading {prompts}" in err
    assert f"loading {target_dir('llama')}" in err
    assert "answering: 0 of 6 rows" in err
    assert all(r["finish_reason"] in ("stop", "length") for r in read_rows(out))
    assert all(r["generator"]["target"] == str(target_dir("llama")) for r in read_rows(out))
    before = out.read_text()
    code, _, err = run(*call)
    assert code == 0, err
    assert "are kept" in err
    assert out.read_text() == before
    code, _, err = run(out, *call[1:])
    assert code == 2
    assert "one of the files with the prompts" in err
    assert out.read_text() == before


def test_answers_that_a_cut_one_took_away_are_counted(
    run: Run, tmp_path: Path, target_dir: Callable[[str], Path]
) -> None:

    def turns(word: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": word}, {"role": "assistant", "content": "b"}] * 3

    path, out = tmp_path / "turns.jsonl", tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": turns(i)}) + "\n" for i in "xyz"))
    target = target_dir("llama")
    code, text, err = run(path, "--out", out, "--target", target, "--max-new-tokens", 1)
    assert code == 0, err
    assert [len(r["generated"]) for r in read_rows(out)] == [1, 1, 1]
    assert "6 later answers not asked for, because an earlier one was cut" in text
    assert "raise --max-new-tokens" in text


def test_a_template_that_opens_and_drops_thinking_loses_nothing(
    run: Run, prompts: Path, tmp_path: Path, thinker: Path
) -> None:
    """Case 03: train refused every such row, because the render does not give the answer back."""
    out = tmp_path / "answers.jsonl"
    code, _, err = run(prompts, "--out", out, "--target", thinker, "--max-new-tokens", 24)
    assert code == 0, err
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    assert len(read_rows(out)) == 6
    for row in read_rows(out):
        generated = row["generated"][0]
        prompt = f"<|im_start|>{row['messages'][0]['content']}<|spare|>think\n"
        assert generated["prompt_ids"] == tokenizer(prompt)["input_ids"]
        assert 0 < len(generated["answer_ids"]) <= 24
        stopped = generated["answer_ids"][-1] == tokenizer.eos_token_id
        assert generated["finish_reason"] == row["finish_reason"]
        assert row["finish_reason"] == ("stop" if stopped else "length")


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        (["--template", "enable_thinking=false"], {"template": {"enable_thinking": False}}),
        (["--template", "a=1", "--template", "b=[x, 2.5]"], {"template": {"a": 1, "b": ["x", 2.5]}}),
        (['--template', 'who={"name": null}'], {"template": {"who": {"name": None}}}),
        (["--template", "date_string=2024-07-26"], {"template": {"date_string": "2024-07-26"}}),
        (["--template", "date_string=26 Jul 2024"], {"template": {"date_string": "26 Jul 2024"}}),
        (["--trust-remote-code"], {"template": {}}),
        (["--top-p", "0.8"], {"top_p": 0.8, "top_k": None, "temperature": 0.0}),
        (["--temperature", "0.7", "--top-k", "5"], {"temperature": 0.7, "top_k": 5}),
        (["--temperature", "1", "--seed", "9"], {"temperature": 1.0, "seed": 9}),
    ],
)  # fmt: skip
def test_options_are_taken_and_recorded(
    run: Run,
    prompts: Path,
    tmp_path: Path,
    thinker: Path,
    options: list[str],
    recorded: dict[str, Any],
) -> None:
    """Case 12."""
    out = tmp_path / "answers.jsonl"
    code, _, err = run(
        prompts, "--out", out, "--target", thinker, "--max-new-tokens", 4, "--limit", 2, *options
    )
    assert code == 0, err
    for row in read_rows(out):
        assert row["generator"] | recorded == row["generator"]
        opened = "enable_thinking=false" not in options
        text = AutoTokenizer.from_pretrained(thinker).decode(row["generated"][0]["prompt_ids"])
        assert text.endswith("<|spare|>think\n" if opened else "<|spare|>no think")
    for name in ("a", "who"):
        unread = any(option.startswith(f"{name}=") for option in options)
        assert (f"--template {name}: the target's chat template does not read it" in err) == unread
    assert ("temperature 0 is greedy: top-p and top-k change nothing" in err) == (
        options == ["--top-p", "0.8"]
    )


@pytest.mark.parametrize("temperatures", [["0,0.7,1.5"], ["0", "0.7", "1.5"], ["0,0.7", "1.5"]])
def test_several_temperatures(
    run: Run, prompts: Path, tmp_path: Path, thinker: Path, temperatures: list[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    options = [word for t in temperatures for word in ("--temperature", t)]
    call = [prompts, "--out", out, "--target", thinker, "--max-new-tokens", 4, *options]
    assert run(*call)[0] == 0
    seen = [row["generator"]["temperature"] for row in read_rows(out)]
    assert len(set(seen)) > 1
    assert set(seen) <= {0.0, 0.7, 1.5}


def test_the_targets_own_sampling_by_choice(
    run: Run, prompts: Path, tmp_path: Path, target_dir: Callable[[str], Path]
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in target_dir("llama").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "temperature": 0.6, "top_p": 0.95, "top_k": 20})
    )
    call = [prompts, "--target", target, "--max-new-tokens", 4, "--limit", 2, "--target-sampling"]
    code, _, err = run(*call, "--out", tmp_path / "a.jsonl")
    assert code == 0, err
    assert "temperature 0.6, top_p 0.95, top_k 20" in err
    wanted = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    generator = read_rows(tmp_path / "a.jsonl")[0]["generator"]
    assert generator | wanted == generator
    code, _, err = run(*call, "--out", tmp_path / "b.jsonl", "--temperature", "1.5", "--top-k", 3)
    assert code == 0, err
    generator = read_rows(tmp_path / "b.jsonl")[0]["generator"]
    assert generator | {"temperature": 1.5, "top_p": 0.95, "top_k": 3} == generator
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    code, _, err = run(*call, "--out", tmp_path / "c.jsonl")
    assert code == 2
    assert f"--target {target}: its generation_config.json names no temperature" in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--template", "enable_thinking"], "give KEY=VALUE"),
        (["--template", "=3"], "give KEY=VALUE"),
        (["--template", "a=[1"], "not YAML"),
        (["--template", "a=" + "[" * 5000], "nest"),
        (["--template", "a=" + "9" * 5000], "5000 digits"),
        (["--template", "a=.nan"], "not a finite number"),
        (["--template", "a={b: 1, b: 2}"], "stands twice"),
        (["--template", "tools=[]"], "--template tools is set by draftline"),
        (["--template", "add_generation_prompt=false"], "is set by draftline"),
        (["--temperature", "warm"], "--temperature warm: give numbers"),
        (["--temperature", "-1"], "temperature -1.0: give numbers from 0"),
        (["--temperature", "0,,1"], "--temperature 0,,1"),
        (["--top-p", "0"], "top-p 0.0 is a share"),
        (["--top-k", "0"], "top-k 0 is a number of tokens"),
        (["--target", "/nowhere/model"], "--target /nowhere/model: no such directory"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--device", "cuda:7"], "--device cuda:7"),
    ],
)
def test_wrong_options_are_one_clear_line(
    run: Run, prompts: Path, tmp_path: Path, thinker: Path, options: list[str], expected: str
) -> None:
    out = tmp_path / "out.jsonl"
    code, _, err = run(prompts, "--out", out, "--target", thinker, *options)
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last
    assert "target.path" not in last
    assert not out.exists()


def test_code_of_the_target_is_named_by_the_option_that_allows_it(
    run: Run, prompts: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config",
                                              "AutoModelForCausalLM": "mine.Model"}}  # fmt: skip
    (target / "config.json").write_text(json.dumps(own))
    tiny_tokenizer().save_pretrained(target)
    code, _, err = run(prompts, "--out", tmp_path / "out.jsonl", "--target", target)
    assert code == 2, err
    assert "code that comes with the model" in err
    assert "run it with --trust-remote-code" in err
    assert "trust_remote_code" not in err
    # A training has a key where this command has an option.
    for read in (read_facts, partial(load_target, device=torch.device("cpu"))):
        with pytest.raises(TargetError, match=r"run it with target\.trust_remote_code=true"):
            read(str(target))


def test_another_way_of_asking_does_not_go_into_the_same_file(
    run: Run, prompts: Path, tmp_path: Path, thinker: Path, target_dir: Callable[[str], Path]
) -> None:
    out = tmp_path / "answers.jsonl"
    base = [prompts, "--out", out, "--max-new-tokens", 4, "--limit", 2]
    assert run(*base, "--target", thinker)[0] == 0
    before = out.read_text()
    for options, key in [
        (["--target", target_dir("llama")], "target"),
        (["--target", thinker, "--template", "enable_thinking=false"], "template"),
        (["--target", thinker, "--temperature", "1"], "temperature"),
        (["--target", thinker, "--top-p", "0.5"], "top_p"),
        (["--target", thinker, "--max-new-tokens", "5"], "max_new_tokens"),
    ]:
        code, _, err = run(*base, *options)
        assert code == 2, (options, err)
        assert f"{out}:1 was made with {key}=" in err
        assert "answering" not in err, "it is refused before anything is generated"
    assert out.read_text() == before
    # The same path with another template inside is seen when the target is loaded.
    template = thinker / "chat_template.jinja"
    text = template.read_text()
    try:
        template.write_text(text + " ")
        code, _, err = run(*base, "--target", thinker)
    finally:
        template.write_text(text)
    assert code == 2
    assert "made with template_sha256=" in err


def test_the_date_of_a_template_is_pinned_said_and_kept(
    run: Run, prompts: Path, tmp_path: Path
) -> None:
    target = tiny_target_dir(tmp_path / "target", template=DATED)
    out = tmp_path / "answers.jsonl"
    call = [prompts, "--out", out, "--target", target, "--max-new-tokens", 4]
    code, _, err = run(*call, "--limit", 2)
    assert code == 0, err
    first = read_rows(out)
    today = first[0]["generator"]["date"]
    assert f"date in the prompts: {today} (the chat template writes the date; today)" in err
    # The day after, in effect: the rows of the file say another day, which is gone on with.
    changed = [row | {"generator": row["generator"] | {"date": "2024-07-26"}} for row in first]
    out.write_text("".join(json.dumps(row) + "\n" for row in changed))
    code, _, err = run(*call)
    assert code == 0, err
    assert "date in the prompts: 2024-07-26" in err
    tokenizer = AutoTokenizer.from_pretrained(target)
    later = read_rows(out)[len(first) :]
    assert later
    for row in later:
        assert row["generator"]["date"] == "2024-07-26"
        assert tokenizer.decode(row["generated"][0]["prompt_ids"]).startswith("2024-07-26user")


def test_the_first_words_come_before_anything_heavy(prompts: Path, tmp_path: Path) -> None:
    """Whatever the machine, `reading` and `loading` are said before torch is imported."""
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': sys.exit('torch is imported now')\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from draftline.cli.app import main\n"
        "main()"
    )
    words = ["regenerate", prompts, "--out", tmp_path / "out.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines() == [
        f"reading {prompts}",
        "loading builtin:smollm2",
        "torch is imported now",
    ]


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, and pairs of letters that the tokenizer always joins; a target need not."""
    letters = [*"abcdefgh ?", "<end>", "<user>"]
    pairs = [(a, b) for a in "abcdefgh" for b in "abcdefgh"]
    vocabulary = {piece: i for i, piece in enumerate([*letters, *(a + b for a, b in pairs)])}
    raw = Tokenizer(models.BPE(vocabulary, pairs, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(t, special=True) for t in ("<end>", "<user>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}<user>{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<user>{% endif %}"
    )
    return tokenizer


def test_ids_survive_where_their_text_would_come_back_as_others(run: Run, tmp_path: Path) -> None:
    """A target says `a` and `b` where its tokenizer would write `ab`."""
    target = tmp_path / "target"
    tokenizer = pairs_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=10, pad_token_id=10, bos_token_id=10)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    talks = [{"messages": [{"role": "user", "content": w}]} for w in ("abc", "hgf", "e d", "fa ce")]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    code, _, err = run(prompts, "--out", out, "--target", target, "--max-new-tokens", 16,
                       "--temperature", 1)  # fmt: skip
    assert code == 0, err
    differing = 0
    for row in read_rows(out):
        given = row["generated"][0]
        said = [i for i in given["answer_ids"] if i != tokenizer.eos_token_id]
        text = row["messages"][1]["content"]
        assert tokenizer.decode(said) == text
        differing += tokenizer(text, add_special_tokens=False)["input_ids"] != said
    assert differing >= 2, "the fixture no longer shows the difference"
