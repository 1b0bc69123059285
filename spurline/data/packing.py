"""Documents become one stream of tokens, split into training and validation and cut into windows.

Shapes: N tokens of a stream, B windows, L tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spurline.data.sources import Document, stable_hash
from spurline.data.tokenizer import ByteTokenizer

Tokens = npt.NDArray[np.uint16]


class Windows:
    """A stream (N,) as windows of seq_len + 1 tokens; each begins with the last token of the one before.

    So the windows' labels (all but their first token) are the stream from its second token on, each exactly once,
    up to the `num_dropped` at the end that fill no window.
    """

    def __init__(self, stream_N: Tokens, seq_len: int, boundary_id: int) -> None:
        self._num_windows, self.num_dropped = divmod(max(0, len(stream_N) - 1), seq_len)
        self.seq_len = seq_len
        self.boundary_id = boundary_id
        self._stream_N = stream_N

    def __len__(self) -> int:
        return self._num_windows

    def take(self, window_ids: Sequence[int]) -> Tokens:
        """The windows (B, L + 1) with these ids."""
        start_B = np.asarray(window_ids, dtype=np.int64) * self.seq_len
        return self._stream_N[start_B[:, None] + np.arange(self.seq_len + 1)]

    def document_ids(self, window_id: int) -> npt.NDArray[np.int64]:
        """Which document each token (L,) of a window belongs to; 0 is the one that began before the window."""
        tokens_L = self.take([window_id])[0, :-1]
        return np.cumsum(tokens_L == self.boundary_id)


@dataclass(frozen=True)
class Packed:
    train: Windows
    validation: Windows | None
    """None when nothing is held out, or the share asked for is less than half a window."""
    num_documents: int
    num_tokens: int


def pack(documents: Iterable[Document], tokenizer: ByteTokenizer, seq_len: int, validation_fraction: float) -> Packed:
    """Join the documents, each after a boundary token, split off what is held out, and cut both parts into windows."""
    boundary = np.array([tokenizer.boundary_id], dtype=np.uint16)
    names: list[str] = []
    pieces: list[Tokens] = []
    for document in documents:
        names.append(document.name)
        pieces.append(np.concatenate([boundary, tokenizer.encode(document.text)]))
    num_tokens = sum(map(len, pieces))
    if num_tokens < seq_len + 1:
        raise ValueError(
            f"data.path has {num_tokens} tokens, and one training window needs {seq_len + 1}"
            " (training.seq_len + 1): give more text or a smaller training.seq_len"
        )
    train_N, validation_N = _split(names, pieces, seq_len, validation_fraction)
    validation = Windows(validation_N, seq_len, tokenizer.boundary_id)
    return Packed(
        train=Windows(train_N, seq_len, tokenizer.boundary_id),
        validation=validation if len(validation) else None,
        num_documents=len(names),
        num_tokens=num_tokens,
    )


def _split(names: Sequence[str], pieces: Sequence[Tokens], seq_len: int, fraction: float) -> tuple[Tokens, Tokens]:
    """The stream of the training documents and that of the held-out ones.

    Where whole documents can't come near the fraction (there is one document, or a few large ones),
    the last windows of the joint stream are held out instead.
    """
    stream_N = np.concatenate(pieces)
    num_windows = (len(stream_N) - 1) // seq_len
    num_held_out = min(round(num_windows * fraction), num_windows - 1)
    if num_held_out == 0:
        return stream_N, stream_N[:0]

    sizes = [len(piece) for piece in pieces]
    held_out = choose_held_out(names, sizes, fraction)
    is_held_out_N = np.repeat([name in held_out for name in names], sizes)
    train_N, validation_N = stream_N[~is_held_out_N], stream_N[is_held_out_N]
    if min(len(train_N), len(validation_N)) > seq_len:
        return train_N, validation_N

    cut = (num_windows - num_held_out) * seq_len
    return stream_N[: cut + 1], stream_N[cut:]


def choose_held_out(names: Sequence[str], sizes: Sequence[int], fraction: float) -> set[str]:
    """Names of documents that hold at most, and close to, `fraction` of the tokens; none where no choice comes close.

    They are tried in the order of a hash of their name and taken while they fit: the order of the documents
    doesn't matter, and a data set that grows keeps most of its split.
    """
    target = round(sum(sizes) * fraction)
    chosen: set[str] = set()
    num_chosen = 0
    for name, size in sorted(zip(names, sizes, strict=True), key=lambda entry: stable_hash("split", entry[0])):
        if num_chosen + size <= target:
            chosen.add(name)
            num_chosen += size
    is_close = target - num_chosen <= min(target, sum(sizes) - target) / 2
    return chosen if is_close else set()
