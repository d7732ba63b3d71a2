"""The file of answers: what it may be, what it may hold, and that one call writes to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftline.data.conversations import Conversation, Message
from draftline.decode.answer_file import AnswerFile
from draftline.errors import ConfigError, DataError

GENERATOR: dict[str, Any] = {
    "target": "some/model",
    "vocab_size": 64,
    "template_sha256": "0123456789abcdef",
    "template": {"enable_thinking": False},
    "date": None,
    "temperature": 0.7,
    "top_p": None,
    "top_k": None,
    "seed": 0,
    "max_new_tokens": 8,
}


def row(name: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
        "finish_reason": "stop",
        "generated": [
            {"turn": 1, "prompt_ids": [1, 2], "answer_ids": [5, 3], "finish_reason": "stop"}
        ],
        "generator": GENERATOR | changes,
    }


def refused(path: Path, *inputs: Path) -> str:
    with pytest.raises((ConfigError, DataError)) as caught, AnswerFile(path, inputs):
        pass
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_only_a_regular_file_is_written_to(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / "socket"))
    for path, kind in [
        (tmp_path, "a directory"),
        (pipe, "a pipe"),
        (tmp_path / "socket", "a socket"),
        (Path("/dev/null"), "a device"),
        (Path("/dev/zero"), "a device"),
        (link, "a device"),
    ]:
        assert f"is {kind}; name a regular file" in refused(path)
    bound.close()
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    assert "is a directory" in refused(tmp_path / "to-folder")
    assert "cannot be written" in refused(tmp_path / "socket" / "x.jsonl")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/2", "own.txt"])
def test_the_commands_own_output_is_not_written_to(tmp_path: Path, name: str) -> None:
    """Redirected into a file it is a regular one, and answers would be mixed with messages."""
    code = (
        "import sys; from pathlib import Path; from draftline.decode.answer_file import AnswerFile\n"
        "try:\n    AnswerFile(Path(sys.argv[1])).__enter__()\nexcept Exception as e: print(e)"
    )
    with (tmp_path / "own.txt").open("w") as own:
        subprocess.run([sys.executable, "-c", code, name], stdout=own, stderr=own, check=True,
                       cwd=tmp_path)  # fmt: skip
    assert "is where this command prints to" in (tmp_path / "own.txt").read_text()


@pytest.mark.parametrize("link", ["the file", "symlink", "hard link", "link to a link"])
def test_an_input_is_not_written_to(tmp_path: Path, link: str) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("kept")
    if link == "the file":
        out = tmp_path / "." / "prompts.jsonl"
    elif link == "hard link":
        out.hardlink_to(prompts)
    else:
        (tmp_path / "between").symlink_to(prompts)
        out.symlink_to(prompts if link == "symlink" else tmp_path / "between")
    assert "one of the files with the prompts" in refused(out, tmp_path / "other", prompts)
    assert prompts.read_text() == "kept"


def test_a_link_to_a_regular_file_and_a_missing_parent_are_fine(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real.jsonl")
    for path in (tmp_path / "link", tmp_path / "a" / "b" / "out.jsonl"):
        with AnswerFile(path) as file:
            assert file.append([row()]) == 1
        with AnswerFile(path) as file:
            assert "a" in file
            assert file.answers("a") == [[5, 3]]
    assert (tmp_path / "real.jsonl").exists()


def test_a_second_writer_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "link").symlink_to(out)
    with AnswerFile(out) as file:
        file.append([row()])
        code = (
            "import sys; from pathlib import Path; "
            "from draftline.decode.answer_file import AnswerFile\n"
            "with AnswerFile(Path(sys.argv[1])) as file: file.append([{}])"
        )
        for name in (out, tmp_path / "link"):
            done = subprocess.run([sys.executable, "-c", code, str(name)], capture_output=True,
                                  text=True, check=False)  # fmt: skip
            assert "is being written by another call" in done.stderr
        file.append([row("b")])
    with AnswerFile(out) as file:
        assert len(file) == 2


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("target", "some/other-model"),
        ("vocab_size", 65),
        ("template_sha256", "f" * 16),
        ("template", {"enable_thinking": True}),
        ("template", {}),
        ("date", "2024-07-26"),
        ("temperature", 0.0),
        ("top_p", 0.9),
        ("top_k", 20),
        ("seed", 1),
        ("max_new_tokens", 9),
    ],
)
def test_answers_of_another_kind_are_not_mixed_in(tmp_path: Path, key: str, other: object) -> None:
    out = tmp_path / "out.jsonl"
    with AnswerFile(out) as file:
        file.append([row("a"), row("b", **{key: other})])
    with AnswerFile(out) as file:
        with pytest.raises(DataError) as caught:
            file.check_generator(lambda name: GENERATOR)
        assert f"{out}:2 was made with {key}={json.dumps(other)}" in str(caught.value)
        assert f"this call has {key}={json.dumps(GENERATOR[key])}" in str(caught.value)
        file.check_generator(lambda name: {"seed": 1 if key == "seed" and name == "b" else 0})


def test_the_order_of_arguments_and_another_way_to_the_target_are_no_difference(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    out = tmp_path / "out.jsonl"
    with AnswerFile(out) as file:
        file.append([row(target=str(tmp_path / "model"), template={"a": 1, "b": [True]})])
    with AnswerFile(out) as file:
        file.check_generator(
            lambda name: {"target": str(tmp_path / "link"), "template": {"b": (True,), "a": 1}}
        )


def test_rows_without_ids_are_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    old = row()
    del old["generated"], old["generator"]
    text = json.dumps(old) + "\n"
    out.write_text(text)
    message = refused(out)
    assert "wrote text without token ids" in message
    assert "name another --out" in message
    assert out.read_text() == text


@pytest.mark.parametrize("change", [{"generated": []}, {"generated": None}, {"generator": 3}])
def test_what_only_looks_like_an_answer_is_not_touched(
    tmp_path: Path, change: dict[str, object]
) -> None:
    out = tmp_path / "out.jsonl"
    text = json.dumps(row() | change) + "\n"
    out.write_text(text)
    assert "not a line of an earlier regeneration" in refused(out)
    out.write_text(json.dumps(row(date="yesterday")) + "\n")
    assert "not a line of an earlier regeneration" in refused(out)


def test_the_same_id_with_another_question_is_refused(tmp_path: Path) -> None:
    def talk(*turns: str) -> Conversation:
        messages = tuple(Message("user" if i % 2 == 0 else "assistant", t)
                         for i, t in enumerate(turns))  # fmt: skip
        return Conversation("a", messages, "prompts.jsonl:7")

    with AnswerFile(tmp_path / "out.jsonl") as file:
        file.append([row()])
    with AnswerFile(tmp_path / "out.jsonl") as file:
        file.check_questions([talk("Q"), talk("Q", "old"), talk("Q", "old", "more")])
        with pytest.raises(DataError, match=r"prompts.jsonl:7, whose id a is the same"):
            file.check_questions([talk("another")])


def test_a_call_that_wrote_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "link").symlink_to(out)
    for path in (out, tmp_path / "link"):
        with AnswerFile(path):
            assert out.exists()
        assert not out.exists()
    assert (tmp_path / "link").is_symlink()
    out.touch()
    with AnswerFile(out):
        pass
    assert out.exists(), "what was there before stays"


def test_the_date_of_the_rows_is_known(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "out.jsonl") as file:
        assert file.date is None
        file.append([row(date="2024-07-26")])
    with AnswerFile(tmp_path / "out.jsonl") as file:
        assert file.date == "2024-07-26"
