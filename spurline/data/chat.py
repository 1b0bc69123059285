"""Batches of conversations: samples packed into windows of equal length, masked so that they don't see each other.

B windows of L tokens; N tokens over all samples. A sample of n tokens takes n - 1 positions of a window: its last token
is a label only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from spurline.config import Data
from spurline.data.batch import IGNORE_INDEX, Batch
from spurline.data.chat_files import read_records
from spurline.data.chat_samples import ChatFormat, Sample, chat_format
from spurline.data.conversations import Conversation, read_conversation
from spurline.data.loader import TrainBatches, ValidationBatches
from spurline.data.mixture import SampleOrder
from spurline.data.packing import first_fit
from spurline.data.sources import combined_hash, each_path
from spurline.data.stream import choose_documents, split_hash

if TYPE_CHECKING:
    from spurline.data import DataSets

NUM_QUESTIONS = 4


@dataclass(frozen=True)
class Question:
    """A held-out prompt and its answer in the data."""

    prompt: list[int]
    text: str
    answer: str


@dataclass(frozen=True)
class Questions:
    """Held-out prompts for sampling the model's answers."""

    chat: ChatFormat
    questions: list[Question]


@dataclass
class Counts:
    """What was done with the records, to report to the user."""

    conversations: int = 0
    truncated: int = 0
    too_long: int = 0
    invalid: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Chat:
    """A conversation and the samples made from it."""

    conversation: Conversation
    samples: list[Sample]


class ChatWindows:
    """The samples of several sources, packed into windows; no window mixes sources."""

    def __init__(self, sources: Sequence[Sequence[Sample]], seq_len: int, padding_id: int) -> None:
        self.samples = [sample for samples in sources for sample in samples]
        self.seq_len, self._padding_id = seq_len, padding_id
        self._windows: list[list[int]] = []
        self.part_sizes: list[int] = []
        first = 0
        for samples in sources:
            packed = first_fit([len(sample.tokens_N) - 1 for sample in samples], seq_len)
            self._windows += [[first + number for number in window] for window in packed]
            self.part_sizes.append(len(packed))
            first += len(samples)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens_N) for sample in self.samples)

    @property
    def num_learned(self) -> int:
        return sum(int(sample.is_learned_N[1:].sum()) for sample in self.samples)

    def batch(self, window_ids: Sequence[int]) -> Batch:
        """Tokens, labels and sample index of each position; tokens outside the loss are labeled IGNORE_INDEX."""
        shape = len(window_ids), self.seq_len
        token_BL = np.full(shape, self._padding_id, np.int64)
        label_BL = np.full(shape, IGNORE_INDEX, np.int64)
        document_BL = np.empty(shape, np.int64)  # in ascending order, as masks require
        for row, window_id in enumerate(window_ids):
            stop = 0
            document_BL[row] = len(self._windows[window_id])  # padding comes last
            for number, sample_id in enumerate(self._windows[window_id]):
                tokens_N, is_learned_N = self.samples[sample_id]
                start, stop = stop, stop + len(tokens_N) - 1
                token_BL[row, start:stop] = tokens_N[:-1]
                label_BL[row, start:stop] = np.where(is_learned_N[1:], tokens_N[1:].astype(np.int64), IGNORE_INDEX)
                document_BL[row, start:stop] = number
        tokens_BL, labels_BL, documents_BL = map(torch.from_numpy, (token_BL, label_BL, document_BL))
        return Batch(tokens_BL, labels_BL, documents_BL=documents_BL)


def open_chat(data: Data, seq_len: int, seed: int) -> DataSets:
    """Read, split, encode and pack the conversations; raises a ValueError if one of them is invalid."""
    from spurline.data import DataSets

    chat, counts = chat_format(data), Counts()
    sources = [list(_read(one, chat, seq_len, counts)) for one in each_path(data)]
    for one, chats in zip(each_path(data), sources, strict=True):
        if not chats:
            raise ValueError(f"data.path {one.path!r} has no conversation to learn from{_skipped(counts)}")
    held_out: list[Chat] = []
    train: list[list[Sample]] = []
    for number, chats in enumerate(sources):
        left, chosen = _split(chats, data.validation_fraction)
        sources[number], held_out = left, held_out + chosen
        train.append([sample for one in left for sample in one.samples])
    padding = chat.tokenizer.boundary_id
    windows = ChatWindows(train, seq_len, padding)
    validation = ChatWindows([[sample for one in held_out for sample in one.samples]], seq_len, padding)
    return DataSets(
        tokenizer=chat.tokenizer,
        train=TrainBatches(windows, seed, ChatWindows.batch, SampleOrder(windows.part_sizes, data.shares, seed)),
        validation=ValidationBatches(validation, ChatWindows.batch) if held_out else None,
        num_documents=counts.conversations,
        num_tokens=windows.num_tokens + validation.num_tokens,
        fingerprint=lambda: combined_hash(map(_sample_hash, [*windows.samples, *validation.samples])),
        notes=_notes(chat, counts, windows, validation, len(held_out)),
        questions=Questions(chat, list(_questions(held_out, chat, seq_len))) if held_out else None,
    )


def _read(data: Data, chat: ChatFormat, seq_len: int, counts: Counts) -> Iterator[Chat]:
    """The conversations of one path as samples that fit into a window, ordered by a hash of their names."""
    found: list[Chat] = []
    for record in read_records(data):
        try:
            conversation = read_conversation(record.value, record.name)
            samples = chat.samples(conversation)
        except ValueError as problem:
            if data.invalid_samples == "error":
                raise ValueError(f"{record.where}: {problem} (data.invalid_samples skip leaves such out)") from None
            counts.invalid[str(problem).partition(":")[0]] += 1
            continue
        if fitting := list(_fitting(samples, seq_len + 1, data.long_samples == "truncate", counts)):
            counts.conversations += 1
            found.append(Chat(conversation, fitting))
    yield from sorted(found, key=lambda one: split_hash(one.conversation.name))


def _fitting(samples: list[Sample], room: int, truncate: bool, counts: Counts) -> Iterator[Sample]:
    """The samples of at most `room` tokens; longer ones are truncated, if a token to learn is left, or skipped."""
    for sample in samples:
        cut = Sample(sample.tokens_N[:room], sample.is_learned_N[:room])
        if len(sample.tokens_N) <= room:
            yield sample
        elif truncate and cut.is_learned_N[1:].any():
            counts.truncated += 1
            yield cut
        else:
            counts.too_long += 1


def _sample_hash(sample: Sample) -> str:
    return hashlib.sha256(sample.tokens_N.tobytes() + sample.is_learned_N.tobytes()).hexdigest()


def _split(chats: list[Chat], fraction: float) -> tuple[list[Chat], list[Chat]]:
    """(training, held out): a split by conversation, determined by a hash of their names."""
    hash_D = np.array([split_hash(one.conversation.name) for one in chats], np.uint64)
    size_D = np.array([sum(len(sample.tokens_N) for sample in one.samples) for one in chats], np.int64)
    is_held_D = choose_documents(hash_D, size_D, fraction)
    if is_held_D.all():
        is_held_D[:] = False
    pairs = list(zip(chats, is_held_D.tolist(), strict=True))
    return [one for one, held in pairs if not held], [one for one, held in pairs if held]


def _questions(held_out: list[Chat], chat: ChatFormat, seq_len: int) -> Iterator[Question]:
    """A few held-out prompts that leave room for an answer."""
    num_found = 0
    for one in held_out:
        *before, answer = one.conversation.messages
        prompt = chat.prompt(before, one.conversation.tools)
        if len(prompt) < seq_len and isinstance(answer["content"], str) and num_found < NUM_QUESTIONS:
            num_found += 1
            yield Question(prompt.tolist(), f"{before[-1]['content']}", answer["content"])


def _notes(
    chat: ChatFormat, counts: Counts, windows: ChatWindows, validation: ChatWindows, num_held_out: int
) -> list[str]:
    template = chat.template
    if template is None:
        how = "prompts and completions as they are"
    elif chat.learn_all:
        how = f"template {template.where}, loss on all tokens"
    elif template.marks_generation:
        how = f"template {template.where}, which marks answers"
    else:
        how = f"template {template.where}, answers derived from it, as it marks none"
    learned, tokens = windows.num_learned + validation.num_learned, windows.num_tokens + validation.num_tokens
    num_windows = len(windows) + len(validation)
    lines = [
        f"chat: {counts.conversations:,} conversations ({num_held_out:,} held out), {how}",
        f"chat: loss on {learned:,} of {tokens:,} tokens, in {len(windows):,} sequences to train on, of which"
        f" {1 - tokens / max(1, num_windows * windows.seq_len):.1%} is padding",
    ]
    if chat.ending.text:
        lines.append(f"chat: answers end with the text {chat.ending.text!r}, for which the tokenizer has no token")
    if chat.num_split:
        lines.append(
            f"chat: {chat.num_split:,} conversations became a sample for each answer, as the template writes earlier"
            " turns in another way"
        )
    if counts.truncated:
        lines.append(f"chat: {counts.truncated:,} samples were cut to training.seq_len {windows.seq_len}")
    if skipped := _skipped(counts):
        lines.append(f"chat{skipped}")
    return lines


def _skipped(counts: Counts) -> str:
    reasons = [f"{count:,} because {reason}" for reason, count in counts.invalid.most_common(5)]
    if counts.too_long:
        reasons.append(f"{counts.too_long:,} longer than training.seq_len")
    return f": left out {', '.join(reasons)}" if reasons else ""
