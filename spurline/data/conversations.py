"""Conversations: records with `messages`, or with `prompt` and `completion`. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("messages", "prompt", "completion", "tools")
# Which roles may follow which; "" is the start of the conversation.
_NEXT = {
    "": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Conversation:
    name: str
    """Where it comes from; its hash determines order and train/validation split."""
    messages: list[Message]
    tools: list[Any] | None = None
    num_given: int = 0
    """How many of the messages belong to the prompt, which is excluded from the loss."""


def read_conversation(record: Any, name: str) -> Conversation:
    """The conversation of a record; raises a ValueError if it is not a valid one."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object with a field 'messages', or with 'prompt' and 'completion'")
    tools = _tools(record.get("tools"))
    if record.get("messages") is not None:
        conversation = Conversation(name, _messages(record["messages"], "messages"), tools)
    elif record.get("prompt") is not None and record.get("completion") is not None:
        prompt = _turns(record["prompt"], "prompt", "user")
        conversation = Conversation(name, prompt + _turns(record["completion"], "completion", "assistant"), tools)
        conversation = Conversation(name, conversation.messages, tools, num_given=len(prompt))
    else:
        has = ", ".join(repr(field) for field in record) or "no field"
        raise ValueError(f"neither 'messages' nor 'prompt' and 'completion' (it has {has})")
    _check_order([message["role"] for message in conversation.messages])
    return conversation


def _turns(value: Any, field: str, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, field)


def _messages(value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field!r} is not a list of messages")
    return [_message(message, f"{field}[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is not an object with 'role' and 'content'")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}, which is none of {', '.join(ROLES)}")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise ValueError(f"{where} has no 'content'")
    # Tables store missing keys as nulls, and templates check whether a key is present.
    return {key: value for key, value in message.items() if value is not None} | {"content": content or ""}


def _tools(value: Any) -> list[Any] | None:
    """Descriptions of tools, given as a list or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise ValueError("'tools' is text, but not JSON") from None
    if value is not None and not isinstance(value, list):
        raise ValueError("'tools' is not a list")
    return value or None


def _check_order(roles: list[str]) -> None:
    for number, (before, role) in enumerate(zip(["", *roles], roles, strict=False)):
        if role not in _NEXT[before]:
            what = f"follows {before!r}" if before else "is the first"
            raise ValueError(f"roles out of order: message {number}, {role!r}, {what}")
    if roles[-1] != "assistant":
        raise ValueError(f"roles out of order: the last message is of {roles[-1]!r}, and nobody answers")
