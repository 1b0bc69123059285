"""Documents as one token stream, in memory or memory-mapped, and selections of it. Torch-free.

Shapes: N tokens, D documents, S stretches (contiguous ranges of a stream).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spurline.data.sources import combined_hash, stable_hash
from spurline.data.tokenizer import Tokens

Positions = npt.NDArray[np.int64]
DOCUMENT = np.dtype([("start", "<i8"), ("hash", "<u8")])
"""Record of a document: position of its first token, and the hash that determines the train/validation split."""


class Part(Protocol):
    """Tokens that can be sliced: an array, or a wrapper that checks what is read."""

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Tokens: ...


@dataclass(frozen=True)
class DocumentStream:
    """The tokens of one source: concatenated documents, each preceded by a boundary token."""

    parts: Sequence[Part]
    """Consecutive parts of the stream, such as files."""
    start_D: Positions
    """Position of each document's boundary token."""
    hash_D: npt.NDArray[np.uint64]
    """`split_hash` of each document's name, which determines the train/validation split."""
    checksums: Sequence[str] = ()
    """SHA-256 of the document table and of each part, if they are known without reading them."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.parts))

    def fingerprint(self) -> str:
        """A hash of all documents, equal for raw and prepared text if the latter has a single part."""
        checksums = self.checksums or [_sha256(document_table(self)), *(_sha256(part[:]) for part in self.parts)]
        return combined_hash(checksums)

    def sizes(self) -> Positions:
        """Number of tokens (D,) of each document, including its boundary token."""
        return np.diff(self.start_D, append=self.num_tokens)


def document_table(stream: DocumentStream, num_tokens_before: int = 0) -> npt.NDArray[np.void]:
    """The documents' records (D,) as stored, for a stream that begins at position `num_tokens_before` of another."""
    table_D = np.empty(len(stream.start_D), DOCUMENT)
    table_D["start"] = stream.start_D + num_tokens_before
    table_D["hash"] = stream.hash_D
    return table_D


def _sha256(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def split_hash(name: str) -> int:
    return int.from_bytes(stable_hash("split", name)[:8], "big")


class Stretches:
    """Stretches of a multi-part stream, concatenated into one sliceable sequence; copies only what is sliced."""

    def __init__(self, parts: Sequence[Part], begin_S: Positions, end_S: Positions) -> None:
        """The stretches must be sorted and disjoint."""
        part_begin = np.cumsum([0, *map(len, parts)])
        # Split stretches that cross the boundary between two parts.
        num_begun, num_ended = np.searchsorted(begin_S, part_begin), np.searchsorted(end_S, part_begin, side="right")
        cuts = part_begin[num_begun > num_ended]
        begin_S, end_S = np.sort(np.append(begin_S, cuts)), np.sort(np.append(end_S, cuts))
        self.dtype = parts[0].dtype
        self._parts = parts
        self._part_S = np.searchsorted(part_begin[:-1], begin_S, side="right") - 1
        self._end_S = end_S - part_begin[self._part_S]
        self._stop_S = np.cumsum(end_S - begin_S)

    def __len__(self) -> int:
        return int(self._stop_S[-1]) if len(self._stop_S) else 0

    def __getitem__(self, where: slice) -> Tokens:
        start, stop, step = where.indices(len(self))
        assert step == 1
        pieces = [np.empty(0, self.dtype)]
        stretch = int(np.searchsorted(self._stop_S, start, side="right"))
        while start < stop:
            end, to_go = int(self._end_S[stretch]), int(self._stop_S[stretch]) - start
            begin = end - to_go
            pieces.append(self._parts[self._part_S[stretch]][begin : min(end, begin + stop - start)])
            start += to_go
            stretch += 1
        return np.concatenate(pieces)


def whole(stream: DocumentStream) -> Stretches:
    return between(stream, 0, stream.num_tokens)


def between(stream: DocumentStream, begin: int, end: int) -> Stretches:
    return Stretches(stream.parts, np.array([begin]), np.array([end]))


def split_by_document(stream: DocumentStream, is_chosen_D: npt.NDArray[np.bool_]) -> tuple[Stretches, Stretches]:
    """(documents that are not chosen, chosen documents)."""
    first_S = np.flatnonzero(np.diff(is_chosen_D, prepend=~is_chosen_D[:1]))
    begin_S = stream.start_D[first_S]
    end_S = np.append(begin_S[1:], stream.num_tokens)
    is_chosen_S = is_chosen_D[first_S]
    rest, chosen = (Stretches(stream.parts, begin_S[side], end_S[side]) for side in (~is_chosen_S, is_chosen_S))
    return rest, chosen


def choose_documents(hash_D: npt.NDArray[np.uint64], size_D: Positions, fraction: float) -> npt.NDArray[np.bool_]:
    """Select documents with close to, and at most, `fraction` of the tokens; none if no selection comes close.

    Greedy in hash order: the selection does not depend on document order, and mostly persists as a dataset grows.
    """
    total = int(size_D.sum())
    target = round(total * fraction)
    is_chosen_D = np.zeros(len(size_D), dtype=bool)
    room = target
    left = np.argsort(hash_D, kind="stable")
    while len(left):
        sums = np.cumsum(size_D[left])
        num_fitting = int(np.searchsorted(sums, room, side="right"))
        is_chosen_D[left[:num_fitting]] = True
        room -= int(sums[num_fitting - 1]) if num_fitting else 0
        left = left[num_fitting:]
        left = left[size_D[left] <= room]
    is_close = room <= min(target, total - target) / 2
    return is_chosen_D if is_close else np.zeros_like(is_chosen_D)
