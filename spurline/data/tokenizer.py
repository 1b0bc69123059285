"""The tokenizer interface, the built-in byte tokenizer, and the choice of a run's tokenizer."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spurline.config import Data
from spurline.data.prepared_index import is_prepared, load_index
from spurline.data.shipped import tokenizer_path
from spurline.data.sources import each_path

Tokens = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller."""
        ...

    @property
    def boundary_id(self) -> int:
        """The token before every document; no text encodes to it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Tokenizers with equal fingerprints produce the same ids."""
        ...

    @property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text per id (V,): 0 for special tokens."""
        ...

    def encode(self, text: str) -> Tokens:
        """Text to ids (N,) of `token_dtype(vocab_size)`, without a boundary token."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; special tokens and ids outside the vocabulary are dropped."""
        ...

    def decoder(self) -> Decoder:
        """A new incremental decoder."""
        ...


class Decoder(Protocol):
    """Incremental decoder: the concatenated results of `add` and `finish` equal `decode` of all ids.

    (Invalid UTF-8 may differ, for tokenizers whose `decode` replaces a sequence of invalid bytes as a whole.)
    """

    def add(self, token_id: int) -> str:
        """Decode one more id; returns the new complete characters, possibly none."""
        ...

    def finish(self) -> str:
        """The remaining text."""
        ...


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest dtype for the ids, in files and in memory; little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; 256 is the boundary token."""

    boundary_id = 256
    vocab_size = 257
    fingerprint = "bytes"
    token_bytes = (np.arange(257) < 256).astype(np.int64)

    def encode(self, text: str) -> Tokens:
        """Text to ids, without a boundary token; lone surrogates become question marks."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; boundary tokens and ids outside the vocabulary are dropped, invalid UTF-8 becomes U+FFFD."""
        id_array = np.asarray(ids)
        return id_array[id_array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._utf8.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class TextDecoder:
    """An incremental decoder from any `decode`: withholds text while it ends in a partial character (U+FFFD)."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # Decoded again with every new token, since `decode` may treat the first token of a text differently.
        self._shown: list[int] = []
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._shown, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]


def tokenizer_for(data: Data) -> Tokenizer:
    """The tokenizer of the data options: `data.tokenizer`, else that of prepared data, else bytes."""
    if data.tokenizer:
        return load_tokenizer(data.tokenizer)
    for one in each_path(data):
        folder = os.path.expanduser(one.path)
        if is_prepared(folder):
            from spurline.data.prepared import prepared_tokenizer

            return prepared_tokenizer(folder, load_index(folder))
    return ByteTokenizer()


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer.json file, a folder with one, or a shipped tokenizer; an empty path gives the byte tokenizer."""
    if not path:
        return ByteTokenizer()
    from spurline.data.tokenizer_file import FileTokenizer

    return FileTokenizer.load(tokenizer_path(path))
