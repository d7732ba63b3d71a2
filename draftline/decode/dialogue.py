"""One conversation while its answers are replaced by the target's own."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from draftline.data.chat import REFUSALS
from draftline.data.conversations import Conversation, Message


class Dialogue:
    """The turns that are settled, those to come, and what the target said so far.

    Every answer is asked for anew, after a user's turn or a tool's. An answer that a tool's result
    follows stays in the history as the data has it, because the result belongs to it; what the target
    said in its place is kept beside it. An answer that is not to be trained on stays as well, and
    nothing is asked in its place. `cut` says that the last answer has no end, so that nothing follows it;
    `dropped` why a dialogue ended before its last turn otherwise.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.id = conversation.id
        self.tools: list[Any] | None = json.loads(conversation.tools or "null")
        self.generated: list[dict[str, Any]] = []
        self.dropped: str | None = None
        self._remaining = list(conversation.messages)
        self._calls_as_text = False
        self._settled: list[Message | str] = []
        self.cut = False

    @property
    def ended(self) -> bool:
        return self.cut or not any(m.role in ("user", "tool") for m in self._remaining)

    @property
    def finish_reason(self) -> str:
        """Of the last answer."""
        return str(self.generated[-1]["finish_reason"]) if self.generated else "stop"

    def asks(self) -> int:
        """How many answers are still to be asked for, if none is cut."""
        turns = self._remaining
        return sum(_asks(turns[i], turns[i + 1 : i + 2]) for i in range(len(turns)))

    def next_prompt(self) -> bool:
        """Moves turns into the history up to the next that is answered; False when none is left."""
        while self._remaining:
            turn = self._remaining.pop(0)
            if turn.role == "assistant" and turn.trained:
                continue  # its question was answered by the target
            self._settled.append(turn)
            if _asks(turn, self._remaining[:1]):
                return True
        return False

    def prompt_ids(self, tokenizer: Any, template: Mapping[str, Any]) -> list[int] | None:
        """What serving would give the target now; None, and the dialogue ends, where the template
        refuses its turns."""
        attempts = [False, True] if any(map(_calls, self._settled)) else [False]
        for as_text in attempts:
            self._calls_as_text = as_text
            tools = {"tools": self.tools} if self.tools else {}
            try:
                text = tokenizer.apply_chat_template(
                    self._turns(), tokenize=False, add_generation_prompt=True, **template, **tools
                )
            except REFUSALS as error:
                refused = error
                continue
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        self.drop(f"template error: {refused}")
        return None

    def answer(
        self, prompt: Sequence[int], tokens: Sequence[int], stop: Collection[int], tokenizer: Any
    ) -> None:
        """Takes the target's answer to `prompt`, the token that stopped it included."""
        stopped = bool(tokens) and tokens[-1] in stop
        text = tokenizer.decode(list(tokens[:-1] if stopped else tokens))
        given = self._remaining[0] if _belongs_to_result(self._remaining) else None
        if given is None and not text.strip():
            self.drop("empty answer")
            return
        self.generated.append(
            {
                "turn": len(self._settled),
                "prompt_ids": list(prompt),
                "answer_ids": list(tokens),
                "finish_reason": "stop" if stopped else "length",
            }
        )
        if given is None:
            self._settled.append(text)
            self.cut = not stopped  # never continued: serving would show no such history
        else:
            self._settled.append(self._remaining.pop(0))

    def drop(self, reason: str) -> None:
        """Ends here, with its last answer; what was asked after that stays unanswered."""
        self.dropped = reason
        self._remaining.clear()
        while self._settled and not _answers(self._settled[-1]):
            self._settled.pop()

    def row(self, generator: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row to write, or None where the target gave no answer."""
        if not self.generated:
            return None
        # What was history only stays so for whoever reads the row.
        untrained = [isinstance(turn, Message) and not turn.trained for turn in self._settled]
        messages = [
            {**turn, "weight": 0} if kept else turn
            for turn, kept in zip(self._turns(), untrained, strict=True)
        ]
        return {
            "id": self.id,
            "messages": messages,
            **({"tools": self.tools} if self.tools else {}),
            "finish_reason": self.finish_reason,
            "generated": self.generated,
            "generator": dict(generator),
        }

    def _turns(self) -> list[dict[str, Any]]:
        return [
            {"role": "assistant", "content": turn}
            if isinstance(turn, str)
            else turn.to_template(self._calls_as_text)
            for turn in self._settled
        ]


def questions(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The turns that are not answers, by which a row is known to belong to a conversation."""
    return [
        (str(m.get("role")), str(m.get("content")))
        for m in messages
        if m.get("role") != "assistant"
    ]


def _asks(turn: Message, after: Sequence[Message]) -> bool:
    answered = not after or (after[0].role == "assistant" and after[0].trained)
    return turn.role in ("user", "tool") and answered


def _belongs_to_result(remaining: Sequence[Message]) -> bool:
    return [m.role for m in remaining[:2]] == ["assistant", "tool"]


def _calls(turn: Message | str) -> bool:
    return isinstance(turn, Message) and bool(turn.tool_calls)


def _answers(turn: Message | str) -> bool:
    return isinstance(turn, str) or turn.role == "assistant"
