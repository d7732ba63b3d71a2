"""`draftline regenerate`: every answer of a data set replaced by the target's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftline.amounts import counted
from draftline.errors import ConfigError, UserError

if TYPE_CHECKING:
    from draftline.data.conversations import Conversation
    from draftline.decode.sampling import Sampling

# What an error of a target or a device calls a setting, and what this command calls it.
_OPTIONS = {
    "target.path=": "--target ",
    "target.dtype=": "--dtype ",
    "target.trust_remote_code=true": "--trust-remote-code",
    "run.device=": "--device ",
    "evaluate.max_new_tokens": "--max-new-tokens",
    "data.template": "--template",
}
# Arguments of apply_chat_template that are no arguments of a template.
_RESERVED = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt",
             "continue_final_message", "chat_template", "return_dict", "return_tensors", "padding",
             "truncation", "max_length", "strftime_now")  # fmt: skip


def regenerate_command(
    files: Annotated[list[Path], typer.Argument(help="Conversation files with the prompts.")],
    out: Annotated[Path, typer.Option(help="JSONL to write, a regular file.")],
    target: Annotated[
        str, typer.Option(help="The target: what target.path may be.")
    ] = "builtin:smollm2",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that the target brings.")
    ] = False,
    template: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Argument of the chat template, as data.template of the training; repeatable.",
        ),
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="T[,T...]",
            help="0, the default, is greedy; conversations are spread over several.",
        ),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens with this share.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many of the likeliest tokens.")
    ] = None,
    target_sampling: Annotated[
        bool,
        typer.Option(
            "--target-sampling",
            help="Temperature, top-p and top-k of the target's generation_config.json, where they "
            "are not given.",
        ),
    ] = False,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Longer answers are cut, marked finish_reason=length, and end their conversation.",
        ),
    ] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out and counted.")
    ] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 8,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer this many conversations, the first ones.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Replace every answer by the target's own, which is what a drafter must be trained on.

    Each row holds the token ids that the target was given and gave. Rows that OUT already holds are
    kept as they are and skipped, so an interrupted call continues.
    """
    from draftline.choices import Choices
    from draftline.data.conversations import read_conversations
    from draftline.decode.answer_file import AnswerFile
    from draftline.decode.progress import Progress
    from draftline.decode.request import Request

    files, out = [file.expanduser() for file in files], out.expanduser()
    arguments = _template(template or [])
    choices = Choices()
    with AnswerFile(out, files) as answers, Progress() as progress, _own_words():
        progress.stage(f"reading {', '.join(map(str, files))}")
        sampling = _sampling(target, temperature, top_p, top_k, seed, target_sampling)
        reading = read_conversations(files, need_answer=False)
        for reason, count in reading.counts().items():
            typer.echo(f"left out {counted(count, 'row')}: {reason}", err=True)
        chosen = reading.conversations[:limit]
        progress.stage(f"loading {target}")

        # These bring torch with them, which takes seconds.
        from draftline.decode.regenerate import regenerate
        from draftline.model.target.target import load_target
        from draftline.runtime.devices import pick_device

        request = Request(target, arguments, sampling, max_new_tokens)
        answers.check_generator(request.facts)
        loaded = load_target(
            target,
            device=pick_device(device, choices),
            dtype=dtype,
            num_taps=1,
            trust_remote_code=trust_remote_code,
            context=max_prompt_tokens + max_new_tokens,
            choices=choices,
        )
        _say_unread(arguments, chosen, loaded.tokenizer.chat_template)
        done = regenerate(
            chosen,
            loaded,
            answers,
            request,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
            choices=choices,
            progress=progress,
        )
    typer.echo(
        f"{out}: {counted(done.written, 'conversation')}, {done.new_tokens} new tokens; "
        f"{done.cut} cut at {max_new_tokens} tokens, {sum(done.dropped.values())} dropped or shortened"
    )
    if done.unasked:
        typer.echo(
            f"{done.unasked} later answers not asked for, because an earlier one was cut; "
            "raise --max-new-tokens"
        )
    for reason, count in done.dropped.items():
        typer.echo(f"dropped or shortened {count}: {reason}")


def _template(given: Sequence[str]) -> dict[str, Any]:
    """Arguments of the chat template, read as the values of a configuration are."""
    from draftline.config.faults import shown
    from draftline.config.yaml_text import parse_yaml

    arguments: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--template {item}: give KEY=VALUE, such as enable_thinking=false")
        if key in _RESERVED:
            raise ConfigError(f"--template {key} is set by draftline, not by you")
        arguments[key] = parse_yaml(text, f"--template {shown(item)}: the value")
    return arguments


def _sampling(
    target: str,
    temperature: Sequence[str] | None,
    top_p: float | None,
    top_k: int | None,
    seed: int,
    by_target: bool,
) -> Sampling:
    from draftline.decode.sampling import Sampling, target_sampling

    temperatures: tuple[float, ...] = (0.0,)
    if by_target:
        defaults = target_sampling(target, seed)
        temperatures = defaults.temperatures
        top_p = defaults.top_p if top_p is None else top_p
        top_k = defaults.top_k if top_k is None else top_k
    if temperature:
        try:
            temperatures = tuple(float(t) for item in temperature for t in item.split(","))
        except ValueError:
            seen = ",".join(temperature)
            raise ConfigError(f"--temperature {seen}: give numbers, such as 0,0.7,1") from None
    sampling = Sampling(temperatures, top_p, top_k, seed)
    if by_target:
        typer.echo(
            f"sampling of {target}: temperature {', '.join(f'{t:g}' for t in temperatures)}, "
            f"top_p {top_p}, top_k {top_k}",
            err=True,
        )
    if not any(temperatures) and (top_p is not None or top_k is not None):
        typer.echo("temperature 0 is greedy: top-p and top-k change nothing there", err=True)
    return sampling


def _say_unread(
    arguments: Mapping[str, Any], conversations: Sequence[Conversation], chat_template: Any
) -> None:
    def reads(key: str) -> bool:
        return re.search(rf"\b{key}\b", str(chat_template)) is not None

    for key in arguments:
        if not reads(key):
            typer.echo(f"--template {key}: the target's chat template does not read it", err=True)
    rows = sum(bool(conversation.tools) for conversation in conversations)
    if rows and not reads("tools"):
        typer.echo(
            f"{counted(rows, 'row has', 'rows have')} tools, which the target's chat template does "
            "not read",
            err=True,
        )


@contextmanager
def _own_words() -> Iterator[None]:
    """Errors name the options of this command, not the keys of a configuration."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key, option in _OPTIONS.items():
            text = text.replace(key, option)
        raise type(error)(text) from None
