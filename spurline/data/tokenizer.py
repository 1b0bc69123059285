"""Text to ids and back: what a tokenizer offers, the built-in one (a token is a byte), and which one a run uses."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spurline.config import Data
from spurline.data.prepared_index import is_prepared, load_index
from spurline.data.sources import each_path

Tokens = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def boundary_id(self) -> int:
        """Marks where a document begins; no text encodes to it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Two tokenizers with the same fingerprint give the same ids."""
        ...

    def encode(self, text: str) -> Tokens:
        """Text to ids (N,) of `token_dtype(vocab_size)`, without boundary."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; boundaries, other special tokens and ids past the vocabulary are dropped."""
        ...

    def decoder(self) -> Decoder:
        """A fresh decoder for ids that come one by one."""
        ...


class Decoder(Protocol):
    """Turns ids into text as they come: what `add` and `finish` return, joined, is what `decode` makes of them all.

    (Broken UTF-8 may show otherwise, with a tokenizer whose `decode` judges a run of bytes as a whole.)
    """

    def add(self, token_id: int) -> str:
        """The text that is certain after one more id, never with half a character: often nothing yet."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type of ids that files and memory hold, little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 text; one more marks where a document begins."""

    boundary_id = 256
    vocab_size = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> Tokens:
        """Text to ids, without boundary; what UTF-8 can't say (a lone surrogate) becomes a question mark."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Ids to text; boundaries and ids past the vocabulary are dropped, broken UTF-8 shows as U+FFFD."""
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
    """A decoder made of any `decode`: it holds text back while its end may be half a character (U+FFFD)."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # What was shown last stays in view of `decode`, which may treat the first token of a text in its own way.
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
    """The tokenizer that data options mean: `data.tokenizer`, else that of prepared data, else bytes."""
    if data.tokenizer:
        return load_tokenizer(data.tokenizer)
    for one in each_path(data):
        folder = os.path.expanduser(one.path)
        if is_prepared(folder):
            from spurline.data.prepared import prepared_tokenizer

            return prepared_tokenizer(folder, load_index(folder))
    return ByteTokenizer()


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in a `tokenizers` JSON file or in a Hugging Face tokenizer's folder; bytes for an empty path."""
    if not path:
        return ByteTokenizer()
    from spurline.data.tokenizer_file import FileTokenizer

    return FileTokenizer.load(path)
