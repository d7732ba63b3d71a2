"""One turn of a conversation: what a row says of it, and how a chat template takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftline.data.rows import BadRow

_CALLERS = ("function_call", "tool_call")
_ROLE_OF = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", *_CALLERS), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_NAMES = {"name", "tool_call_id"}
_FLAGS = {"weight", "loss_weight", "train", "training", "trainable", "loss_mask", "loss"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""

    def to_template(self, as_text: bool) -> dict[str, Any]:
        arguments = self.arguments if as_text else json.loads(self.arguments)
        called = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"id": self.id, **called} if self.id else called


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is system, user, assistant or tool.

    `trained` is False where the row says that the answer is history only.
    """

    role: str
    content: str
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    trained: bool = True

    def to_template(self, arguments_as_text: bool = False) -> dict[str, Any]:
        """The turn as a chat template takes it; arguments of calls are objects unless asked."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content:
            # Templates disagree on the name: Qwen's has the first, gpt-oss's the last.
            turn.update(dict.fromkeys(_THOUGHTS, self.reasoning_content))
        if self.tool_calls:
            turn["tool_calls"] = [call.to_template(arguments_as_text) for call in self.tool_calls]
        if self.name:
            turn["name"] = self.name
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def read_message(name: object, turn: object) -> tuple[Message, set[str]]:
    """The turn and the notes on it; raises BadRow."""
    where = f"turn {name}"
    if not isinstance(turn, dict):
        raise BadRow("turn_not_object", f"{where} is a {type(turn).__name__}")
    alias = turn.get("role", turn.get("from"))
    alias = alias.strip().lower() if isinstance(alias, str) else alias
    role = _ROLE_OF.get(alias) if isinstance(alias, str) else None
    if role is None:
        raise BadRow("unknown_role", f"{where} has the role {turn.get('role', alias)!a}")
    content = turn.get("content", turn.get("value"))
    parts = content if isinstance(content, list) else [content]
    text = "".join(_part(part, where) for part in parts if part is not None)
    calls = _calls(turn, where)
    if not calls and alias in _CALLERS and (said := _calls_in(text)):
        calls, text = said, ""
    thought = _thought(turn, where)
    # A tool may return nothing and a system turn may ask for no default prompt.
    if role in ("user", "assistant") and not (text.strip() or calls or thought):
        raise BadRow("empty_turn", f"{where} ({role}) has no text")
    trained, notes = read_flag(turn, where), set()
    if role != "assistant":
        if trained:
            notes.add("prompt_weight_ignored")
        trained = None
    named = {
        key: turn[key] for key in _NAMES & turn.keys() if isinstance(turn[key], str) and turn[key]
    }
    for value in (text, thought, *named.values(), *(c.name + c.arguments + c.id for c in calls)):
        check_unicode(value, where)
    return Message(role, text, thought, calls, trained=trained is not False, **named), notes


def read_flag(holder: Mapping[str, Any], where: str) -> bool | None:
    """Whether a turn or row is to be learned, None where it does not say; raises BadRow."""
    if not _FLAGS & holder.keys():
        return None
    said: dict[str, bool] = {}
    for key in sorted(_FLAGS & holder.keys()):
        value = holder[key]
        # A list says it token by token, beside ids.
        if value is None or (isinstance(value, list) and "input_ids" in holder):
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadRow("bad_weight", f"{where} has {key}={value!a}; only 0 and 1 are honoured")
        said[key] = bool(value)
    if len(set(said.values())) > 1:
        raise BadRow("bad_weight", f"{where} is to be learned and not: {said}")
    return next(iter(said.values()), None)


def read_tools(row: Mapping[str, Any]) -> str:
    """JSON text of the row's list of tools in OpenAI's form, "" without any; raises BadRow."""
    given = row.get("tools") or row.get("functions")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("bad_tools", f"the tools are no JSON: {error}") from None
    if not given:
        return ""
    tools = []
    for tool in given if isinstance(given, list) else [given]:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise BadRow("bad_tools", f"a tool has a name and parameters, this is {tool!a:.60}")
        tools.append(tool if inner is not tool else {"type": "function", "function": tool})
    text = json.dumps(tools, ensure_ascii=False)
    check_unicode(text, "the list of tools")
    return text


def check_unicode(text: str, where: str) -> None:
    """Raises BadRow for a lone surrogate, which is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("bad_unicode", f"{where} has a lone {text[error.start]!a}") from None


def _part(part: object, where: str) -> str:
    text = part
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text", part.get("value"))
    if isinstance(text, str):
        return text
    kind = (part.get("type") if isinstance(part, dict) else None) or type(part).__name__
    raise BadRow("not_text", f"{where} holds {kind!a}, only text is read")


def _thought(turn: Mapping[str, Any], where: str) -> str:
    said = {key: turn[key] for key in _THOUGHTS if turn.get(key)}
    for key, value in said.items():
        if not isinstance(value, str):
            raise BadRow("unsupported_field", f"{where} has {key} that is no text")
    if len(set(said.values())) > 1:
        raise BadRow("unsupported_field", f"{where} has {' and '.join(said)}, which differ")
    return next(iter(said.values()), "")


def _calls(turn: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    given = turn.get("tool_calls") or ([call] if (call := turn.get("function_call")) else [])
    field = "tool_calls" if turn.get("tool_calls") else "function_call"
    calls = [_call(one) for one in given] if isinstance(given, list) else [None]
    read = tuple(call for call in calls if call is not None)
    if len(read) < len(calls):
        need = "a call has a name and arguments that are a JSON object"
        raise BadRow("unsupported_field", f"{where} has {field} that cannot be read: {need}")
    return read


def _calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls that a turn of a caller's role holds as JSON; () where it is other text."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    calls = [_call(one) for one in (given if isinstance(given, list) else [given])]
    read = tuple(call for call in calls if call is not None)
    return read if len(read) == len(calls) else ()


def _call(given: object) -> ToolCall | None:
    """One call out of OpenAI's form or its inner part, None where it is something else."""
    inner = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(inner, dict):
        return None
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters"))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    text = "{}" if arguments in (None, "") else text
    try:
        readable = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        readable = False
    if not readable or not isinstance(name, str) or not name:
        return None
    called = given.get("id")
    return ToolCall(name, text, called if isinstance(called, str) else "")
