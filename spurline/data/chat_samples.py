"""Conversations as tokens, with a mask of those to learn. Torch-free.

If the template marks the assistant's text ({% generation %}), that is the mask. Otherwise an answer is the text that
the template adds after the preceding turns and the generation prompt. Some templates render earlier turns differently
once others follow (without their reasoning, for instance): then each answer becomes a sample of its own, after the
preceding turns as the model will see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spurline.config import Data
from spurline.data.chat_template import ChatTemplate, find_template
from spurline.data.conversations import Conversation, Message
from spurline.data.tokenizer import ByteTokenizer, Tokenizer, Tokens, token_dtype, tokenizer_for
from spurline.data.tokenizer_file import FileTokenizer

Span = tuple[int, int]
_QUESTION, _ANSWER = "which way is up", "that one is up"


class Sample(NamedTuple):
    """Tokens (N,) and which of them are to be learned (N,)."""

    tokens_N: Tokens
    is_learned_N: npt.NDArray[np.bool_]


class Text(NamedTuple):
    """A rendered conversation, and the characters to learn."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class Ending:
    """How the template ends an answer."""

    token_id: int | None
    """The first token after the answer, if it is a special token."""
    text: str
    """Otherwise, the text that follows the answer; empty if there is none."""


class ChatFormat:
    """A tokenizer and a template, which turn conversations into samples and prompts into tokens."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, learn_all: bool = False) -> None:
        """Without a template, prompt and completion are encoded as they are."""
        self.tokenizer, self.template, self.learn_all = tokenizer, template, learn_all
        self.ending = self._ending()
        self.num_split = 0
        """Conversations that became several samples."""

    def samples(self, conversation: Conversation) -> list[Sample]:
        """The samples of a conversation; raises a ValueError if the template rejects it or it has no token to learn."""
        if self.template is None:
            found = [self._plain_sample(conversation)]
        else:
            texts = [self._whole(conversation)] if self._is_whole(conversation) else self._derived(conversation)
            self.num_split += len(texts) > 1
            found = [self._encode(text) for text in texts]
        if not all(sample.is_learned_N[1:].any() for sample in found):
            raise ValueError("there is no token to learn in it")
        return found

    def prompt(self, messages: list[Message], tools: list[object] | None = None) -> Tokens:
        """The tokens that precede an answer to the last message."""
        if self.template is None:
            text = "".join(_as_text(message) for message in messages)
            return np.append(self._boundary, self.tokenizer.encode(text))
        return encode(self.tokenizer, self.template.render(messages, tools, add_generation_prompt=True).text, [])[0]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(
            {self.tokenizer.boundary_id, *([] if self.ending.token_id is None else [self.ending.token_id])}
        )

    def cut(self, text: str) -> str:
        """A generated answer, up to the text that ends it."""
        return text.partition(self.ending.text)[0] if self.ending.text else text

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of a generated answer, up to its end."""
        end = next((number for number, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return self.cut(self.tokenizer.decode(tokens[:end]))

    @property
    def _boundary(self) -> Tokens:
        return np.array([self.tokenizer.boundary_id], token_dtype(self.tokenizer.vocab_size))

    def _is_whole(self, conversation: Conversation) -> bool:
        assert self.template is not None
        given_answers = any(
            message["role"] == "assistant" for message in conversation.messages[: conversation.num_given]
        )
        return self.learn_all or (self.template.marks_generation and not given_answers)

    def _whole(self, conversation: Conversation) -> Text:
        assert self.template is not None
        text, spans = self.template.render(conversation.messages, conversation.tools)
        return Text(text, [(0, len(text))] if self.learn_all else spans)

    def _derived(self, conversation: Conversation) -> list[Text]:
        """The full conversation with the spans of its answers, or one text per answer."""
        whole, texts = self._render(conversation, len(conversation.messages)), []
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant" and number >= conversation.num_given:
                before, behind = self._render(conversation, number), self._render(conversation, number + 1)
                prompt = self._render(conversation, number, add_generation_prompt=True)
                start = _common_prefix(prompt, behind)
                if not start.startswith(before):
                    raise ValueError(
                        f"the chat template of {self.template and self.template.where} has no {{% generation %}}, and"
                        f" writes the turns before message {number} in another way once it is there"
                    )
                texts.append(Text(behind, [(len(start), len(behind))]))
        if all(whole.startswith(text) for text, _ in texts):
            return [Text(whole, [span for _, spans in texts for span in spans])]
        return texts

    def _render(self, conversation: Conversation, count: int, add_generation_prompt: bool = False) -> str:
        assert self.template is not None
        messages = conversation.messages[:count]
        return self.template.render(messages, conversation.tools, add_generation_prompt).text if messages else ""

    def _encode(self, text: Text) -> Sample:
        sample = encode(self.tokenizer, *text)
        if self.ending == Ending(None, ""):  # otherwise the model would never learn to stop
            return Sample(np.append(sample.tokens_N, self._boundary), np.append(sample.is_learned_N, True))
        return sample

    def _plain_sample(self, conversation: Conversation) -> Sample:
        messages, num_given = conversation.messages, conversation.num_given
        if not num_given:
            raise ValueError("data.chat_template none is for 'prompt' and 'completion', not for 'messages'")
        given, written = ("".join(map(_as_text, part)) for part in (messages[:num_given], messages[num_given:]))
        parts = self._boundary, self.tokenizer.encode(given), self.tokenizer.encode(written), self._boundary
        tokens_N = np.concatenate(parts)
        is_learned_N = np.arange(len(tokens_N)) >= (0 if self.learn_all else len(parts[0]) + len(parts[1]))
        return Sample(tokens_N, is_learned_N)

    def _ending(self) -> Ending:
        """What the template writes after an answer, found by rendering an example."""
        if self.template is None:
            return Ending(None, "")
        example = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        try:
            behind = self.template.render(example).text.rpartition(_ANSWER)[2]
        except ValueError:  # the template needs more than this example: fall back to the boundary token
            return Ending(None, "")
        if isinstance(self.tokenizer, FileTokenizer) and behind.strip():
            first = self.tokenizer.encode_rendered(behind.lstrip()).ids[0]
            if self.tokenizer.is_special(first):
                return Ending(first, "")
        return Ending(None, behind.strip() or behind)


def _common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _as_text(message: Message) -> str:
    if not isinstance(message["content"], str):
        raise ValueError("data.chat_template none is for 'prompt' and 'completion' that are text")
    return message["content"]


def encode(tokenizer: Tokenizer, text: str, spans: list[Span]) -> Sample:
    """The tokens of a rendered text; those with a character in one of the spans are to be learned."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    if not isinstance(tokenizer, FileTokenizer):
        return _encode_bytes(tokenizer, text, spans)
    encoding = tokenizer.encode_rendered(text)
    is_learned_N = np.zeros(len(encoding.ids), dtype=bool)
    for begin, end in spans:
        first, last = encoding.char_to_token(begin), encoding.char_to_token(end - 1)
        if first is not None and end > begin:
            is_learned_N[first : len(encoding.ids) if last is None else last + 1] = True
    return Sample(np.array(encoding.ids, token_dtype(tokenizer.vocab_size)), is_learned_N)


def _encode_bytes(tokenizer: Tokenizer, text: str, spans: list[Span]) -> Sample:
    assert isinstance(tokenizer, ByteTokenizer)
    tokens_N = tokenizer.encode(text)
    is_learned_N = np.zeros(len(tokens_N), dtype=bool)
    for begin, end in spans:
        is_learned_N[len(text[:begin].encode()) : len(text[:end].encode())] = True
    return Sample(tokens_N, is_learned_N)


def chat_format(data: Data) -> ChatFormat:
    """The tokenizer and the chat template of the data options."""
    template = find_template(data.chat_template, data.tokenizer)
    return ChatFormat(tokenizer_for(data), template, learn_all=data.loss_on == "all")


def check_chat(data: Data) -> list[str]:
    """Errors in the template and tokenizer that can be found without reading the conversations."""
    try:
        chat_format(data)
    except ValueError as problem:
        return [str(problem)]
    return []
