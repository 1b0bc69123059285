"""`spurline generate --chat` on a terminal: a conversation, turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.tools.generate import Command, first_messages, load_model, open_chat_format

if TYPE_CHECKING:
    from torch import nn

    from spurline.data.chat_samples import ChatFormat

_INTRODUCTION = "an empty line or Ctrl-D ends the conversation; /new begins another one"


def converse(run_folder: Path, config: RunConfig[Any], command: Command) -> int:
    """Read questions from the terminal and print answers as they are generated, until the user ends it."""
    chat = open_chat_format(config)
    model = load_model(run_folder, config, command.step, command.sign_key_file)
    print(_INTRODUCTION)
    messages: list[dict[str, Any]] = []
    while question := _ask():
        if question == "/new":
            messages = []
            continue
        messages += first_messages(command, question) if not messages else [{"role": "user", "content": question}]
        messages, num_dropped = _fitting(messages, chat, config.training.seq_len)
        if num_dropped:
            print(f"({num_dropped} earlier messages no longer fit into the context)")
        if not messages:
            print(f"(the question is longer than the context of {config.training.seq_len} tokens: shorten it)")
            continue
        answer = _answer(messages, chat, model, config.training.seq_len, command)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _fitting(messages: list[dict[str, Any]], chat: ChatFormat, context: int) -> tuple[list[dict[str, Any]], int]:
    """Drop the oldest turns until there is room for an answer; returns the messages and how many were dropped."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    rest, num_dropped = messages[len(system) :], 0
    while rest and len(chat.prompt([*system, *rest])) >= context:
        num_dropped += len(rest[:2])
        rest = rest[2:]
    return ([*system, *rest], num_dropped) if rest else ([], 0)


def _answer(messages: list[dict[str, Any]], chat: ChatFormat, model: nn.Module, context: int, command: Command) -> str:
    """Generate an answer and print it as it comes, holding back characters that may belong to the stop text."""
    from spurline.models.common.generate import printable, stream

    decoder, text, num_shown = chat.tokenizer.decoder(), "", 0
    hold = len(chat.ending.text)
    for (token,) in stream(
        model,
        [chat.prompt(messages).tolist()],
        command.max_tokens,
        sampling=command.sampling,
        seed=command.seed + len(messages),
        max_context=context,
        stop_id=chat.stop_ids,
        cached=not command.no_cache,
    ):
        assert token is not None
        text += decoder.add(token)
        if chat.cut(text) != text:
            break
        print(printable(text[num_shown : max(num_shown, len(text) - hold)]), end="", flush=True)
        num_shown = max(num_shown, len(text) - hold)
    answer = chat.cut(text + decoder.finish())
    print(printable(answer[num_shown:]), flush=True)
    return answer
