"""Conversations that were rendered elsewhere: where their answers lie in the text."""

from __future__ import annotations

from draftline.data.answers import Turn
from draftline.data.chat import REFUSALS, Chat
from draftline.data.conversations import Conversation
from draftline.data.thinking import thought_at_end

_USER, _SAID = "\u2042 asked", "\u2042 said"


class Formatted:
    """The answers of a rendered conversation, found between the template's own marks.

    It has the same members as `Answers`; `turns` number its answers.
    """

    def __init__(self, chat: Chat, conversation: Conversation) -> None:
        self.chat = chat
        self.id = conversation.id
        self.notes: set[str] = set()
        self.failures: dict[str, dict[int, str]] = {}
        self.turns: list[int] = []
        self._turns: dict[int, Turn | None] = {}
        try:
            opener, thought = _opener(chat)
        except REFUSALS as error:
            self.failures["template_error"] = {0: str(error)}
            return
        text = conversation.text
        bos = getattr(chat.tokenizer, "bos_token", None)
        begins = chat.render([{"role": "user", "content": "a"}], False)
        if bos and begins.startswith(bos) and not text.startswith(bos):
            text = bos + text
            self.notes.add("bos_added")
        self._find(text, opener, thought)
        if not self._turns:
            detail = f"the text has no {opener!a}, which begins an answer in the chat template"
            self.failures["no_answer_mark"] = {0: detail}

    def get(self, index: int) -> Turn | None:
        """The answer of this number, or None where it is left out, with the reason noted."""
        return self._turns[index]

    def leave_out(self, index: int, reason: str, detail: str) -> None:
        """Notes that this answer is not trained."""
        self._turns[index] = None
        self.failures.setdefault(reason, {})[index] = detail

    def _find(self, text: str, opener: str, thought: str) -> None:
        ends = self.chat.stops if self.chat.stops is not None else {self.chat.eos}
        at = text.find(opener) if opener else -1
        while at >= 0:
            begin = at + len(opener)
            nexts = text.find(opener, begin)
            reach = len(text) if nexts < 0 else nexts
            marks = list(self.chat.mark.finditer(text, begin, reach))
            end = next((m.end() for m in marks if m[0] in ends), None)
            if end is None and nexts >= 0 and marks:
                # No stop token: the next turn begins with the special token after the answer.
                end = marks[0].end() if self.chat.stops is None else marks[0].start()
            number, at = len(self._turns), nexts
            if not text[begin:end].strip():
                continue
            self.turns.append(number)
            if not text.startswith(thought, begin):
                detail = f"the generation prompt ends {thought!a}, the answer does not follow it"
                self.leave_out(number, "template_not_prefix", detail)
                continue
            stop = len(text) if end is None else end
            self._turns[number] = Turn(text, begin + len(thought), stop, end is not None)


def _opener(chat: Chat) -> tuple[str, str]:
    """What stands before an answer in the template, and the thinking block that follows it."""
    user = {"role": "user", "content": _USER}
    prompt, without = chat.render([user], True), chat.render([user], False)
    if prompt.startswith(without) and prompt[len(without) :].strip():
        opened = prompt[len(without) :]
        block = thought_at_end(prompt)
        split = len(opened) if block is None else block.begin - len(without)
        return opened[:split], opened[split:]
    whole = chat.render([user, {"role": "assistant", "content": _SAID}], False)
    between = whole[whole.rfind(_USER) + len(_USER) : max(0, whole.rfind(_SAID))]
    return between.rstrip(), ""
