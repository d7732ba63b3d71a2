"""Where a generation prompt leaves thinking, and what an answer still has to say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Tags of families whose names do not follow from each other.
_PAIRS = {
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "[THINK]": "[/THINK]",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|think_start|>": "<|think_end|>",
}
_NAMED = r"<(?P<name>[\w:-]*(?:think|thought|reason)[\w:-]*)>"
_OPENER = "|".join([*map(re.escape, _PAIRS), _NAMED])
_OPEN_END = re.compile(rf"(?P<opener>{_OPENER})(?P<space>\s*)\Z")
_CLOSERS = "|".join(map(re.escape, _PAIRS.values()))
_PAIRED_EMPTY = "|".join(rf"{re.escape(o)}\s*{re.escape(c)}" for o, c in _PAIRS.items())
_BLOCK = rf"(?:{_PAIRED_EMPTY}|{_NAMED}\s*</(?P=name)>)"
_CLOSED_END = re.compile(rf"{_BLOCK}(?P<space>\s*)\Z")
_EMPTY_START = re.compile(rf"\s*{_BLOCK}\s*")
_EMPTY_ANYWHERE = re.compile(_BLOCK)
_STARTS = re.compile(rf"\s*(?:{_OPENER})")
_ANY_TAG = re.compile(r"\s*(?P<tag><[\w:-]+>|\[[\w:-]+\])(?P<space>\s*)")
# No block at the end of a prompt is longer.
_REACH = 160


@dataclass(frozen=True, slots=True)
class Thought:
    """The thinking block at the end of a prompt: it begins at character `begin` there.

    `opener` and `closer` are its tags; `space` is the white space after the last tag. An `open`
    block has only the opener: what follows is a thought.
    """

    begin: int
    opener: str
    closer: str
    space: str
    open: bool


def thought_at_end(prompt: str) -> Thought | None:
    """The block with which `prompt` ends, None where it does not end in one."""
    start = max(0, len(prompt) - _REACH)
    tail = prompt[start:]
    if match := _CLOSED_END.search(tail):
        return Thought(start + match.start(), "", "", match["space"], False)
    if match := _OPEN_END.search(tail):
        opener = match["opener"]
        closer = _PAIRS.get(opener) or f"</{match['name']}>"
        return Thought(start + match.start(), opener, closer, match["space"], True)
    return None


def opened_by(added: str, prompt: str) -> Thought | None:
    """The block that `added` opens, a tag under any name, if `prompt` ends in it.

    `added` is what the template puts into a generation prompt and not before an answer it is given.
    """
    match = _ANY_TAG.fullmatch(added)
    if match is None or not prompt.endswith(added):
        return None
    tag = match["tag"]
    closer = f"{tag[0]}/{tag[1:]}"
    begin = len(prompt) - len(added) + match.start("tag")
    return Thought(begin, tag, closer, match["space"], True)


def spoken_after(content: str, thought: Thought | None, cut: bool) -> str | None:
    """What of `content` the target says after a prompt that ends in `thought`.

    The opener that the prompt has goes, and an empty block that it has. None where the target would
    not say it there: no thought behind an open block, or one behind a closed block.
    """
    if thought is None:
        return content
    if not thought.open:
        if not _STARTS.match(content):
            return content
        empty = _EMPTY_START.match(content)
        return content[empty.end() :] if empty else None
    if content.lstrip().startswith(thought.opener):
        said = content.lstrip()[len(thought.opener) :]
        # White space after the opener is the prompt's as far as it has any.
        same = 0
        while same < len(thought.space) and said[same : same + 1] == thought.space[same]:
            same += 1
        return said[same:]
    # A thought that was cut has no end; without its beginning nothing else shows that it is one.
    return content if thought.closer in content or cut else None


def without_empty_block(text: str) -> str:
    """`text` without an empty thinking block at its start."""
    match = _EMPTY_START.match(text)
    return text[match.end() :] if match else text


def holds_empty_block(text: str) -> bool:
    """Whether `text` has a thinking block without a thought, or the end of one that it opens not."""
    return bool(_EMPTY_ANYWHERE.search(text))


def names_thinking(text: str) -> bool:
    """Whether `text` has a tag of a thinking block, whether it opens or closes one."""
    return bool(re.search(rf"{_OPENER}|{_CLOSERS}|</[\w:-]*(?:think|thought|reason)[\w:-]*>", text))
