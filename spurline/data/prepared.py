"""Prepared data: memory-mapped token files. Torch-free."""

from __future__ import annotations

import os

import numpy as np

from spurline.data.prepared_index import TOKENIZER_FILE, Index, PreparedSource, content_problem
from spurline.data.stream import DOCUMENT, DocumentStream
from spurline.data.tokenizer import ByteTokenizer, Tokenizer, Tokens


def open_source(folder: str, index: Index, source: PreparedSource) -> DocumentStream:
    """The memory-mapped tokens of one source of a prepared folder."""
    dtype = np.dtype(index.dtype).newbyteorder("<")
    # This file is read completely, so verifying its checksum costs little; `spurline data verify` checks the tokens.
    if problem := content_problem(folder, source.documents):
        raise ValueError(f"data.path: {problem}: prepare the data again")
    records_D = np.fromfile(os.path.join(folder, source.documents.name), DOCUMENT)
    start_D = records_D["start"]
    if not len(start_D) or start_D[0] != 0 or (np.diff(start_D) <= 0).any() or start_D[-1] >= source.num_tokens:
        path = os.path.join(folder, source.documents.name)
        raise ValueError(f"data.path: {path!r} is damaged: documents are not in order: prepare the data again")
    return DocumentStream(
        parts=[_KnownTokens(os.path.join(folder, shard.name), dtype, index.vocab_size) for shard in source.shards],
        start_D=np.ascontiguousarray(records_D["start"]),
        hash_D=np.ascontiguousarray(records_D["hash"]),
        checksums=[stored.sha256 for stored in (source.documents, *source.shards)],
    )


class _KnownTokens:
    """The memory-mapped tokens of a shard; tokens are checked to be in the vocabulary when read."""

    def __init__(self, path: str, dtype: np.dtype[np.unsignedinteger], vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._tokens_N: Tokens = np.memmap(path, dtype, mode="r")
        self.dtype = self._tokens_N.dtype

    def __len__(self) -> int:
        return len(self._tokens_N)

    def __getitem__(self, where: slice) -> Tokens:
        tokens_N = self._tokens_N[where]
        if len(tokens_N) and int(tokens_N.max()) >= self._vocab_size:
            raise ValueError(
                f"data.path: {self._path!r} is damaged: it has token {int(tokens_N.max())}, and its vocabulary"
                f" {self._vocab_size} tokens: prepare the data again"
            )
        return tokens_N


def prepared_tokenizer(folder: str, index: Index) -> Tokenizer:
    """The tokenizer that the folder was prepared with."""
    if index.tokenizer is None:
        return ByteTokenizer()
    from spurline.data.tokenizer_file import FileTokenizer

    if problem := content_problem(folder, index.tokenizer):
        raise ValueError(f"data.path: {problem}: prepare the data again")
    return FileTokenizer.load(os.path.join(folder, TOKENIZER_FILE), index.boundary_token)
