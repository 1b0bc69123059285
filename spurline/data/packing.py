"""Concatenate documents into a token stream, split it into training and validation, cut it into windows. Torch-free.

Shapes: N tokens in a stream, B windows, L tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spurline.data.formats import Document
from spurline.data.stream import (
    DocumentStream,
    Stretches,
    between,
    choose_documents,
    split_by_document,
    split_hash,
    whole,
)
from spurline.data.tokenizer import Tokenizer, Tokens, token_dtype

# Windows kept open for first-fit packing: more windows leave less padding.
_OPEN_WINDOWS = 32


class Windows:
    """A stream (N,) as windows of seq_len + 1 tokens, each overlapping the previous one by one token.

    Every token but the first is thus a label exactly once, except the last `num_dropped`, which fill no window.
    """

    def __init__(self, stream_N: Stretches | Tokens, seq_len: int, boundary_id: int) -> None:
        self._num_windows, self.num_dropped = divmod(max(0, len(stream_N) - 1), seq_len)
        self.seq_len = seq_len
        self.boundary_id = boundary_id
        self._stream_N = stream_N

    def __len__(self) -> int:
        return self._num_windows

    @property
    def part_sizes(self) -> list[int]:
        return [len(self)]

    def take(self, window_ids: Sequence[int]) -> Tokens:
        """The windows (B, L + 1) with these ids."""
        window_BL = np.empty((len(window_ids), self.seq_len + 1), self._stream_N.dtype)
        for row, window_id in enumerate(window_ids):
            start = window_id * self.seq_len
            window_BL[row] = self._stream_N[start : start + self.seq_len + 1]
        return window_BL

    def document_ids(self, window_id: int) -> npt.NDArray[np.int64]:
        """Document id of each token (L,) of a window; 0 is the document that began before the window."""
        return document_ids(self.take([window_id])[0, :-1], self.boundary_id)


class JoinedWindows:
    """The windows of several streams, numbered consecutively; no window spans two streams."""

    def __init__(self, parts: Sequence[Windows]) -> None:
        self._parts = parts
        self.part_sizes = [len(part) for part in parts]
        self._stop_P = np.cumsum(self.part_sizes)
        self.seq_len, self.boundary_id = parts[0].seq_len, parts[0].boundary_id

    def __len__(self) -> int:
        return sum(self.part_sizes)

    def take(self, window_ids: Sequence[int]) -> Tokens:
        """The windows (B, L + 1) with these ids."""
        part_B = np.searchsorted(self._stop_P, window_ids, side="right").tolist()
        begin_P = (self._stop_P - self.part_sizes).tolist()
        rows = [self._parts[part].take([i - begin_P[part]]) for i, part in zip(window_ids, part_B, strict=True)]
        return np.concatenate([self._parts[0].take([]), *rows])


def document_ids(tokens_BL: Any, boundary_id: int) -> Any:
    """Document id of each token (..., L), for arrays and tensors; 0 is the document that began before the window.

    With document masking, a token attends only to positions with the same id.
    """
    return (tokens_BL == boundary_id).cumsum(-1)


def first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Pack items into windows of size `room` without cutting any; returns the indices of the items in each window."""
    windows: list[list[int]] = []
    opened: list[tuple[list[int], int]] = []
    for number, size in enumerate(sizes):
        for place, (window, left) in enumerate(opened):
            if size <= left:
                window.append(number)
                opened[place] = window, left - size
                break
        else:
            windows.append([number])
            opened = [*opened, (windows[-1], room - size)][-_OPEN_WINDOWS:]
    return windows


@dataclass(frozen=True)
class Packed:
    train: Windows
    validation: Windows | None
    """None if nothing is held out, or the fraction is less than half a window."""
    num_documents: int
    num_tokens: int
    stream: DocumentStream
    """The stream that both are taken from."""


def pack(
    documents: Iterable[Document], tokenizer: Tokenizer, seq_len: int, validation_fraction: float, path: str = ""
) -> Packed:
    """Concatenate the documents, each after a boundary token; split into training and validation; cut into windows."""
    stream = stream_of(documents, tokenizer)
    return pack_stream(stream, tokenizer.boundary_id, seq_len, validation_fraction, path)


def stream_of(documents: Iterable[Document], tokenizer: Tokenizer) -> DocumentStream:
    """The tokens of all documents, in memory."""
    boundary = np.array([tokenizer.boundary_id], dtype=token_dtype(tokenizer.vocab_size))
    pieces: list[Tokens] = [boundary[:0]]
    starts: list[int] = []
    hashes: list[int] = []
    num_tokens = 0
    for document in documents:
        if not document.is_rest:
            starts.append(num_tokens)
            hashes.append(split_hash(document.name))
            pieces.append(boundary)
            num_tokens += 1
        pieces.append(tokenizer.encode(document.text))
        num_tokens += len(pieces[-1])
    return DocumentStream([np.concatenate(pieces)], np.array(starts, np.int64), np.array(hashes, np.uint64))


def pack_stream(
    stream: DocumentStream, boundary_id: int, seq_len: int, validation_fraction: float, path: str = ""
) -> Packed:
    """Split into training and validation and cut both into windows; `path` is for error messages."""
    if stream.num_tokens < seq_len + 1:
        raise ValueError(
            f"data.path {path + ' ' if path else ''}has {stream.num_tokens} tokens, but one training window needs"
            f" {seq_len + 1} (training.seq_len + 1): use more text or a smaller training.seq_len"
        )
    train_N, validation_N = _split(stream, seq_len, validation_fraction)
    validation = Windows(validation_N, seq_len, boundary_id)
    return Packed(
        train=Windows(train_N, seq_len, boundary_id),
        validation=validation if len(validation) else None,
        num_documents=len(stream.start_D),
        num_tokens=stream.num_tokens,
        stream=stream,
    )


def _split(stream: DocumentStream, seq_len: int, fraction: float) -> tuple[Stretches, Stretches]:
    """The training part and the held-out part.

    Holds out complete documents. If those can't approximate the fraction (one document, or a few large ones), the last
    windows of the stream are held out instead.
    """
    num_windows = (stream.num_tokens - 1) // seq_len
    num_held_out = min(round(num_windows * fraction), num_windows - 1)
    if num_held_out == 0:
        return whole(stream), between(stream, 0, 0)
    train_N, validation_N = split_by_document(stream, choose_documents(stream.hash_D, stream.sizes(), fraction))
    if min(len(train_N), len(validation_N)) > seq_len:
        return train_N, validation_N
    cut = (num_windows - num_held_out) * seq_len
    return between(stream, 0, cut + 1), between(stream, cut, stream.num_tokens)
