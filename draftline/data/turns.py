"""The turns of a conversation in order: which are kept, and which are one."""

from __future__ import annotations

from dataclasses import replace

from draftline.data.messages import Message
from draftline.data.rows import BadRow


def trim(messages: list[Message], need_answer: bool) -> tuple[tuple[Message, ...], set[str]]:
    """The turns that are kept, neighbours of one role joined by a blank line; raises BadRow."""
    notes = set()
    roles = [message.role for message in messages]
    if "user" not in roles:
        raise BadRow("no_user_turn", f"the roles are {', '.join(sorted(set(roles)))}")
    first, end = roles.index("user"), len(roles)
    if need_answer:
        if "assistant" not in roles[first:]:
            raise BadRow("no_assistant_turn", "no assistant turn follows a user turn")
        end -= roles[::-1].index("assistant")
    if end < len(roles):
        notes.add("trailing_turns_dropped")
    lead = [message for message in messages[:first] if message.role == "system"]
    if len(lead) < first:
        notes.add("leading_turns_dropped")
    merged: list[Message] = []
    for message in [*lead, *messages[first:end]]:
        if merged and _joins(merged[-1], message):
            notes.add("turns_merged")
            if merged[-1].trained != message.trained:
                notes.add("untrained_by_merge")
            merged[-1] = _joined(merged[-1], message)
        else:
            merged.append(message)
    return tuple(merged), notes


def _joins(first: Message, second: Message) -> bool:
    """Whether two neighbours are one turn: nothing that is written first may come to stand last."""
    if first.role != second.role or first.role == "tool":
        return False
    behind = second.content or second.reasoning_content
    return not (first.tool_calls and behind) and not (first.content and second.reasoning_content)


def _joined(first: Message, second: Message) -> Message:
    plain = not second.tool_calls
    contents = (first.content, second.content)
    thoughts = (first.reasoning_content, second.reasoning_content)
    return replace(
        first,
        content="\n\n".join(contents if plain else filter(None, contents)),
        reasoning_content="\n\n".join(filter(None, thoughts)),
        tool_calls=first.tool_calls + second.tool_calls,
        trained=first.trained and second.trained,
    )
