"""The answers of one conversation as the target would say them, and those it would not.

For the assistant turn at index i let P be the render of the turns before it with the generation
prompt, and F the render up to and including it. Where F is P and then the answer as the row has it,
F is used. Else the turn is put into serving form: P, the row's answer, the token that ends a turn.
What fits neither is left out with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from draftline.data.chat import REFUSALS, Chat
from draftline.data.conversations import Conversation
from draftline.data.messages import Message
from draftline.data.thinking import (
    Thought,
    holds_empty_block,
    names_thinking,
    opened_by,
    spoken_after,
    thought_at_end,
    without_empty_block,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer: it is `text[begin:end]`, and `text` is all up to this turn.

    `ended` says that it includes the token with which the target stops.
    """

    text: str
    begin: int
    end: int
    ended: bool


class _LeftOut(Exception):
    """Why a turn is not trained: its args are a reason and a detail."""


class Answers:
    """The answers of one conversation, each rendered when first asked for, and the failures.

    `turns` are the indexes of the messages to be trained.
    """

    def __init__(self, chat: Chat, conversation: Conversation) -> None:
        self.chat = chat
        self.id = conversation.id
        self.notes: set[str] = set()
        self.failures: dict[str, dict[int, str]] = {}
        self._said = conversation.messages
        self._tools = conversation.tools
        self._cut = None if conversation.complete else len(self._said) - 1
        self._messages = [message.to_template() for message in self._said]
        self._turns: dict[int, Turn | None] = {}
        answers = [i for i, m in enumerate(self._said) if m.role == "assistant"]
        self.turns = [i for i in answers if self._said[i].trained]
        if any(message.tool_calls for message in self._said):
            self._choose_arguments(answers[-1])

    def get(self, index: int) -> Turn | None:
        """The answer at this message, or None where it is left out, with the reason noted."""
        if index not in self._turns:
            try:
                self._turns[index] = self._turn(index)
            except _LeftOut as left:
                reason, detail = left.args
                self.leave_out(index, reason, detail)
        return self._turns[index]

    def leave_out(self, index: int, reason: str, detail: str) -> None:
        """Notes that this turn is not trained."""
        self._turns[index] = None
        self.failures.setdefault(reason, {})[index] = detail

    def _choose_arguments(self, last: int) -> None:
        """Gives the template the arguments of calls as text where it cannot write an object."""
        as_text = [message.to_template(arguments_as_text=True) for message in self._said]
        try:
            shown = self.chat.render(self._messages[: last + 1], False, self._tools)
        except REFUSALS:
            try:
                self.chat.render(as_text[: last + 1], False, self._tools)
            except REFUSALS:
                return
            self._messages = as_text
            return
        objects = [json.loads(call.arguments) for m in self._said for call in m.tool_calls]
        if any(
            given and str(given) in shown and json.dumps(given) != str(given) for given in objects
        ):
            self._messages = as_text

    def _turn(self, index: int) -> Turn:
        message, cut = self._said[index], self._cut == index
        history = self._messages[:index]
        try:
            prompt = self.chat.render(history, True, self._tools)
        except REFUSALS as error:
            raise _LeftOut("template_error", str(error)) from None
        self._note_tools(prompt)
        plain = not message.tool_calls and not message.reasoning_content
        text: str | None = None
        try:
            text = self.chat.render([*history, self._messages[index]], False, self._tools)
        except REFUSALS as error:
            # Some refuse an answer that holds their own marks, and it was said all the same.
            if not plain or not self.chat.mark.search(message.content):
                raise _LeftOut("template_error", str(error)) from None
        thought = thought_at_end(prompt) or opened_by(self.chat.prompt_adds, prompt)
        if plain:
            return self._plain(index, prompt, text, thought, cut)
        assert text is not None, "only a plain answer is taken without its render"
        return self._structured(index, prompt, text, thought, cut)

    def _note_tools(self, prompt: str) -> None:
        if self._tools:
            names = {tool["function"]["name"] for tool in json.loads(self._tools)}
            if not all(name in prompt for name in names):
                self.notes.add("tools_ignored")

    def _plain(
        self, index: int, prompt: str, text: str | None, thought: Thought | None, cut: bool
    ) -> Turn:
        """An answer that is text and nothing else, thinking in it included."""
        said = spoken_after(self._said[index].content, thought, cut)
        if said is None:
            raise _LeftOut("template_not_prefix", _does_not_follow(prompt))
        if text is not None and text.startswith(prompt):
            at = self._find(said, text, len(prompt))
            if at is not None:
                after = at + len(said)
                if cut:
                    return Turn(text[:after], len(prompt), after, False)
                ending = self._ending(index, text, after)
                whole = text if text.startswith(ending, after) else text[:after] + ending
                return Turn(whole, len(prompt), after + len(ending), bool(ending))
        ending = "" if cut else self._ending(index, *self._own_end(text, said))
        if ending and said.endswith(ending.strip()):
            return Turn(prompt + said, len(prompt), len(prompt + said), True)
        whole = prompt + said + ending
        return Turn(whole, len(prompt), len(whole), bool(ending))

    def _find(self, said: str, text: str, begin: int) -> int | None:
        """Where `text`, past its prompt, has the answer; None where it has another.

        White space before it and special tokens around it are the template's way to write an
        answer, so the target says them too; an empty thinking block is not.
        """
        rest = text[begin:]
        at = 0 if rest.startswith(said) else rest.find(said)
        if at < 0 or not self.chat.closing.fullmatch(rest, at + len(said)):
            return None
        before = rest[:at]
        if before.strip():
            marks = list(self.chat.mark.finditer(before))
            framed = marks and marks[0].start() == 0 and marks[-1].end() == len(before)
            if not framed or names_thinking(before):
                return None
        return begin + at

    def _structured(
        self, index: int, prompt: str, text: str, thought: Thought | None, cut: bool
    ) -> Turn:
        """An answer with thinking or calls in fields of their own, which the template writes."""
        message = self._said[index]
        if text.startswith(prompt):
            begin, given, served = len(prompt), text, False
        elif thought is not None and text.startswith(prompt[: thought.begin]):
            rest = spoken_after(text[thought.begin :], thought, cut)
            if rest is None:
                raise _LeftOut("template_not_prefix", _does_not_follow(prompt))
            begin, given, served = len(prompt), prompt + rest, True
        else:
            raise _LeftOut("template_not_prefix", _does_not_follow(prompt))
        at = self.chat.close_at(given, begin)
        body, close = given[begin:at], given[at:]
        for what, part in _parts(message):
            if part not in body:
                reason = f"{what}_not_in_template"
                raise _LeftOut(reason, f"the template does not write {what}: {part[:40]!a}")
        if not message.reasoning_content:
            if thought is not None and thought.open and thought.closer not in message.content:
                raise _LeftOut("template_not_prefix", _does_not_follow(prompt))
            if holds_empty_block(body):
                body, served = without_empty_block(body), True
        if cut:
            # What the target had not written yet cannot be told from what the template closes.
            if message.tool_calls:
                raise _LeftOut("cut_call", "the answer was cut, and its calls are no text")
            last = message.content.strip() or message.reasoning_content.strip()
            body = body[: body.rfind(last) + len(last)]
            return Turn(prompt + body, begin, begin + len(body), False)
        whole = prompt + body
        ending = self._ending(index, whole + close, len(whole))
        end = len(whole) + len(ending)
        shown = given if not served and given.startswith(whole + ending) else whole + ending
        return Turn(shown, begin, end, bool(ending))

    def _own_end(self, text: str | None, said: str) -> tuple[str, int]:
        """A render and the place in it at which its last answer's own text ends."""
        if text is None:
            user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
            text, said = self.chat.render([user, answer], False), "b"
        at = text.rfind(said.strip()) + len(said.strip())
        if said.strip() in text and self.chat.closing.fullmatch(text, at):
            return text, at
        return text, self.chat.close_at(text, 0)

    def _ending(self, index: int, text: str, after: int) -> str:
        """The text with which the target ends this answer, which ends at `after` in `text`."""
        turns = self._messages[: index + 1]
        calls = bool(self._said[index].tool_calls)
        ending, note = self.chat.endings.of(turns, text, after, calls, self._tools)
        if note:
            self.notes.add(note)
        return ending


def _parts(message: Message) -> list[tuple[str, str]]:
    """What the render of a turn must hold, by the name of its field."""
    parts = [("reasoning", message.reasoning_content.strip()), ("content", message.content.strip())]
    for call in message.tool_calls:
        parts.append(("tool_calls", call.name))
        parts += [("tool_calls", key) for key in json.loads(call.arguments)]
    return [(what, part) for what, part in parts if part]


def _does_not_follow(prompt: str) -> str:
    return f"the generation prompt ends {prompt[-30:]!a}, the answer does not follow it"


def reject_reasons(failures: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """The detail of each reason: the turns that it concerns, and the first one's words."""
    return {
        reason: f"turns {', '.join(map(str, turns))}: {next(iter(turns.values()))}"
        for reason, turns in failures.items()
    }
