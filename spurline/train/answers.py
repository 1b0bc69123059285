"""A model's answers to held-out questions from chat data."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from spurline.data.chat import Questions
from spurline.models.common.generate import generate, printable
from spurline.models.common.sampling import GREEDY

_MAX_TOKENS = 128


def write_answers(model: nn.Module, asked: Questions, num_tokens: int, max_context: int) -> Iterator[str]:
    """Yield each question with the model's answer and the answer in the data, as text."""
    prompts = [question.prompt for question in asked.questions]
    # No token ends an answer: all ranks must take the same number of steps, even if one of them rounds differently.
    written = generate(model, prompts, min(num_tokens, _MAX_TOKENS), sampling=GREEDY, max_context=max_context)
    for question, tokens in zip(asked.questions, written, strict=True):
        answer = asked.chat.answer(tokens)
        yield f"user: {question.text}\nassistant: {printable(answer)}\nin the data: {question.answer}\n"
